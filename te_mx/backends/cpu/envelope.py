"""What every kernel of the CPU backend asks of a problem."""

from __future__ import annotations

from te_mx.backends.cpu import binding
from te_mx.backends.native import BLOCKWISE, COLUMNWISE, MX, NVFP4, unknown
from te_mx.dispatch.problem import Problem

LAYOUTS = ("rows", "cols")


def why_not(
    problem: Problem,
    *more: str,
    blockwise: bool = False,
    columnwise: bool = False,
    random: bool = False,
    nvfp4: bool = False,
) -> str | None:
    """Why no kernel of this backend runs the problem; None when one may. `more`: layouts that a
    kernel takes beside plain ones; blockwise, columnwise: whether it takes fp32 scales, and those
    of blocks of 128 x 1; random: whether it rounds stochastically and transforms; nvfp4: whether it
    takes a tensor scale."""
    if problem.place.device != "cpu":
        return f"runs on the CPU, the operands are on {problem.place.device}"
    if problem.place.level < 0:
        return "needs the native module"
    formats = MX + BLOCKWISE * blockwise + COLUMNWISE * columnwise + NVFP4 * nvfp4
    return unknown(problem, (*LAYOUTS, *more), formats, random)


def why_not_empty(problem: Problem) -> str | None:
    """Why nothing native runs where there is nothing to read."""
    return "takes matrices that are not empty" if problem.empty else None


def why_not_level(kernel: str, level: str, problem: Problem) -> str | None:
    """Why the level in use does not run a kernel."""
    if binding.kernel_available(kernel):
        return None
    if binding.ISA_LEVELS.index(level) <= problem.place.level:
        return "is not in this build of te_mx"
    return (
        f"needs the CPU level {level}, this process runs at "
        f"{binding.ISA_LEVELS[problem.place.level]}"
    )
