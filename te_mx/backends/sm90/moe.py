"""Routed rows on Hopper: one launch for the lists and one a product, which only the device needs to
understand."""

from __future__ import annotations

from torch import Tensor

from te_mx.backends.native import FORMATS
from te_mx.backends.sm90 import binding_moe
from te_mx.backends.sm90.envelope import why_not, why_not_second
from te_mx.dispatch.calls import FLOAT_DTYPES
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.moe import Align, RoutedGemm
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of

LEAST_ROWS, BLOCK = 16, 32  # of weights, and of k


class HopperMoeGemm(Kernel):
    """Weights are read as they lie, once for eight rows: fit for few rows an expert. Its sums are
    those of the contract in either precision."""

    op, name = "moe_gemm", "sm90_moe"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows")
        if reason is None and spec_of(problem.lhs).format.untransformed.name not in FORMATS:
            reason = f"takes tokens in {', '.join(FORMATS)}, not {spec_of(problem.lhs).format}"
        if reason is None and problem.dtype not in FLOAT_DTYPES:
            reason = f"writes float32, bfloat16 and float16, not {problem.dtype}"
        if reason is None and (problem.n < LEAST_ROWS or problem.k % BLOCK):
            reason = (
                f"takes weights of {LEAST_ROWS} rows or more and k in multiples of {BLOCK}, this "
                f"has {problem.n} and {problem.k}"
            )
        return reason or why_not_second(problem.rhs)

    def note(self, problem: Problem) -> str:
        return "reads weights as they lie, once for 8 routed rows of an expert"

    def run(self, p: RoutedGemm) -> str | None:
        return self.name if binding_moe.gemm(p) else None


class HopperMoeAlign(Kernel):
    op, name = "moe_align", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem)

    def run(self, p: Align) -> tuple[Tensor, Tensor, Tensor] | None:
        return binding_moe.align(p)


register(HopperMoeGemm())
register(HopperMoeAlign())
