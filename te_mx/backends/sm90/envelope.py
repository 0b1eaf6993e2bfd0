"""What every kernel of the Hopper backend asks of a problem."""

from te_mx.backends.native import FP4, MX, unknown
from te_mx.backends.sm90 import binding
from te_mx.dispatch.problem import MOST, Problem
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of

COUNTED = ("gemm", "gemm_rows", "gemm_k", "linear")  # ops whose kernels count sizes in 32 bits


def why_not(problem: Problem, *layouts: str, formats: tuple[str, ...] = MX) -> str | None:
    """Why no kernel of this backend runs the problem on operands in these layouts (names up to a
    colon) and formats; None when one may."""
    place = problem.place
    if place.device != "cuda":
        return f"runs on CUDA, the operands are on {place.device}"
    reason = binding.problem(place.index)
    if reason is not None:
        return reason
    reason = unknown(problem, layouts, formats)
    if reason is not None:
        return reason
    if problem.empty:
        return "takes matrices that are not empty"
    if problem.op in COUNTED and max(problem.m, problem.n, problem.k) > MOST:
        return f"counts sizes up to {MOST}"
    return None


def why_not_each(
    problem: Problem, lhs: tuple[str, ...], rhs: tuple[str, ...], formats: tuple[str, ...] = MX
) -> str | None:
    """As `why_not`, where the operands lie in layouts of their own."""
    left, right = problem._replace(rhs=""), problem._replace(lhs=problem.rhs, rhs="")
    return why_not(left, *lhs, formats=formats) or why_not(right, *rhs, formats=formats)


def not_adaptive(problem: Problem, *more: str) -> str | None:
    """Why not, for kernels of precision "adaptive", and perhaps others."""
    if problem.precision in ("adaptive", *more):
        return None
    return f"is for precision 'adaptive', this asks for {problem.precision!r}"


def as_multiplied(problem: Problem) -> Problem:
    """A problem of products without the stochastic rounding of its left operand, an output
    gradient, where that is of MXFP4: the quantizers here round it, and pack it as any other. And
    with the right operand that kernels read, where one stands still."""
    if layout := spec_of(problem.rhs).layout.reads_as:
        problem = problem._replace(rhs=f"{problem.rhs.partition('@')[0]}@{layout}")
    if spec_of(problem.lhs).format.untransformed.name not in FP4:
        return problem
    return problem._replace(rule=split_rule(problem.rule)[0])


def why_not_weights(problem: Problem) -> str | None:
    """Why no kernel quantizes weights of groups in one launch to what a problem asks for."""
    reasons = (why_not_second(spec) for spec in (problem.lhs, problem.rhs) if spec)
    return next((reason for reason in reasons if reason), None)


def why_not_second(spec: str) -> str | None:
    """Why no kernel on FP8 tensor cores takes an operand as the right one of a product, nor makes
    weights of it: E5M2, of more range and fewer bits, is for gradients, which are left ones."""
    fmt = spec_of(spec).format
    if fmt.element.name != "e5m2":
        return None
    return (
        f"takes {fmt.name} on the left of products, as gradients are, not on the right as weights"
    )
