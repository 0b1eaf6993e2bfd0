"""What the grouped GEMMs share: which kernels run, one native call, names of what a loop ran on."""

from __future__ import annotations

import threading

import torch

from te_mx.backends import cpu, cpu_grouped
from te_mx.engine import envelopes, workspace
from te_mx.engine.explain import LAST_RUN

_CPU = torch.device("cpu")
NO_KERNEL = (
    "only Hopper GPUs at precision 'adaptive' have kernels for them; splits given as a list loop "
    "over the groups"
)


def kernels(m: int, k: int) -> tuple[str, str] | None:
    """Native kernels for groups of many and of few rows, as gemm_2d would choose them."""
    if m == 0 or k == 0 or cpu.native() is None:
        return None
    few = envelopes.select("cpu", 1, m, k)
    return envelopes.panel_kernel("cpu"), few


def run(call: cpu_grouped.GroupedGemmCall) -> str | None:
    nbytes = call.workspace_bytes()
    scratch = workspace.acquire(_CPU, nbytes)
    ran = call.run(scratch, nbytes)
    workspace.release(scratch, nbytes)
    return ran


class Names:
    """Names of the kernels that a loop of gemm_2d ran on, in order of their first use."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.tag = (1 << 62) + threading.get_ident()  # a slot of LAST_RUN that no layer has

    def note(self) -> None:
        ran = LAST_RUN.pop(self.tag, envelopes.ZERO_SIZE)
        if ran != envelopes.ZERO_SIZE:
            self.names[ran] = None

    def __str__(self) -> str:
        return " + ".join(self.names)
