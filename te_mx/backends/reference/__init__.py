"""The reference: plain torch, readable, on every device. It specifies te_mx's numbers."""

from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem


class Reference(Kernel):
    """Takes every problem, and comes last."""

    name, rank = "reference", 1000
    invariant = encodes = True  # dispatch/run.py lets it take no product so

    def accepts(self, problem: Problem) -> str | None:
        return None
