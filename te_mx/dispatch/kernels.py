"""What a kernel is, and the kernels that there are: by op, in the order of preference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from te_mx.dispatch.problem import STREAM_ROWS, Problem
from te_mx.layouts.operand import Operand, Stack

# (lhs, rhs, out) -> whether native code took it
PreparedGemm = Callable[[Operand, Operand, Tensor], bool]


class Wants(NamedTuple):
    """Layouts that a kernel reads best: of both sides as rowwise copies, and as columnwise ones."""

    row: str = "rows"
    col: str = "cols"


class Kernel:
    """One way to run an op. Subclasses give `accepts` and `run`.

    op, name: what it runs, and what te_mx.explain and te_mx.audit call it.
    rank: kernels of an op are asked in the order of their ranks.
    configuration: one of `configurations`; "": the kernel chooses, by its cost model if it has one.
    multiplies: by itself; False: by the kernel that is chosen for the GEMM.
    """

    op: str
    name: str
    rank: int = 0
    configuration: str = ""
    multiplies: bool = True

    def accepts(self, problem: Problem) -> str | None:
        """None, or the reason why this kernel does not run the problem: its envelope."""
        raise NotImplementedError

    def wants(self, problem: Problem) -> Wants:
        """The layouts that the operands of the problem should lie in, so that nothing is copied."""
        return Wants()

    def sized(self, problem: Problem) -> bool:
        """Whether `accepts` looks at sizes that `pick` does not keep apart otherwise: the answer is
        then kept under m, n and k."""
        return False

    def prepares(self, m: int, n: int, k: int) -> bool:
        """Of a GEMM: whether operands that stand still are worth `prepare` for these sizes."""
        return m > STREAM_ROWS

    def note(self, problem: Problem) -> str:
        """What te_mx.explain adds, of a problem that this kernel runs."""
        return ""

    def parts(self, problem: Problem) -> int:
        """Into how many parts k is cut, where that is allowed."""
        return 1

    def configurations(self, problem: Problem) -> tuple[str, ...]:
        """The ways to run a problem that a table may choose between, in words."""
        return ()

    def configured(self, configuration: str) -> Kernel:
        """This kernel, which runs in one of these ways and no other."""
        made = copy.copy(self)
        made.configuration = configuration
        return made

    def sums(self, problem: Problem) -> str:
        """A word for the order in which this kernel, as it is configured, adds up and rounds the
        sums of a problem. Kernels and configurations of an op that say the same give a row of the
        result the same bits; so do problems that differ in m alone, whatever rows are beside it.
        Here: those of no other kernel, and of no other m."""
        return f"{self.name}, {self.configuration}, {problem.m} rows"

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        """An operand that stands still ("lhs" or "rhs" of a GEMM) in the form that this kernel
        reads without work; as it is where there is nothing to gain."""
        return operand

    def prepare_stack(self, stack: Stack, problem: Problem) -> Stack:
        """The same of the weights of all groups."""
        return stack

    def prepared(self, problem: Problem) -> PreparedGemm | None:
        """The call of a GEMM without an epilogue on operands that `prepare` made, of these sizes;
        None where there is nothing to prepare."""
        return None

    def once(self, problem: Problem) -> Callable[..., Any] | None:
        """The call of a problem, with all that its sizes say made before; None where `run` does as
        well. Of a GEMM as `prepared`, of operands that lie as the problem says. Of a quantizer: the
        operand of x, rowwise alone, in memory for codes and scales of any shape and dtype if a pair
        is given. Of values: those of an operand, contiguous, in a given memory too. None from a
        call where native code does not take it."""
        return None

    def run_two(self, first: Any, second: Any) -> tuple[Any, Any] | None:
        """What `run` makes of either call, both at the same time; None where it cannot."""
        return None

    def run_joined(self, parts: Sequence[Tensor], row: str, col: str, rule: str) -> Any:
        """Of a quantizer: matrices as one, their rows behind each other, read where they lie; None
        where they must be joined first."""
        return None

    run: Callable[..., Any]


_kernels: dict[str, list[Kernel]] = {}


def add(kernel: Kernel) -> None:
    """Add a kernel to its op. Raises ValueError if the op has one of its name."""
    listed = _kernels.setdefault(kernel.op, [])
    if any(other.name == kernel.name for other in listed):
        raise ValueError(f"op {kernel.op!r} has a kernel {kernel.name!r} already")
    listed.append(kernel)
    listed.sort(key=lambda one: one.rank)


def kernels(op: str) -> tuple[Kernel, ...]:
    """The kernels of an op in order of preference."""
    return tuple(_kernels.get(op, ()))


def ops() -> tuple[str, ...]:
    """Names of the ops that have kernels."""
    return tuple(_kernels)
