"""What every kernel of the CPU backend asks of a problem."""

from __future__ import annotations

from te_mx.backends.cpu import binding
from te_mx.dispatch.problem import Problem
from te_mx.layouts import spec_of

FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2")  # that the native code knows
RULES = ("rceil", "floor")
LAYOUTS = ("rows", "cols")


def why_not(problem: Problem, *more: str) -> str | None:
    """Why no kernel of this backend runs the problem; None when one may. `more`: layouts that a
    kernel takes beside plain ones."""
    if problem.place.device != "cpu":
        return f"runs on the CPU, the operands are on {problem.place.device}"
    if problem.place.level < 0:
        return "needs the native module"
    if problem.rule not in RULES:
        return f"knows the scale rules {', '.join(RULES)}, not {problem.rule}"
    for spec in (problem.lhs, problem.rhs):
        if spec:
            fmt, layout = spec_of(spec)
            if fmt.name not in FORMATS:
                return f"takes {', '.join(FORMATS)}, not {fmt.name}"
            if layout.name not in (*LAYOUTS, *more, "any"):
                return f"takes the layouts {', '.join((*LAYOUTS, *more))}, not {layout.name}"
    return None


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
