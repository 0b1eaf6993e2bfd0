"""The GEMM kernels that run anywhere: the reference, and the epilogue of empty problems."""

from __future__ import annotations

from te_mx.backends.cpu.binding import missing_reason
from te_mx.backends.reference import Reference, torch_gemm
from te_mx.dispatch.calls import Product, Ran
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.dispatch.run import ZERO_SIZE


class ReferenceGemm(Reference):
    """Every format, layout and device."""

    op = "gemm"

    def note(self, problem: Problem) -> str:
        return (missing_reason() or "") if problem.place.device == "cpu" else ""

    def run(self, p: Product) -> Ran:
        return Ran(self.name, torch_gemm.gemm(p.lhs, p.rhs, p.epilogue, p.out, p.aux))


class ZeroSize(ReferenceGemm):
    """Nothing to multiply: the epilogue of zeros."""

    name, rank = ZERO_SIZE, -1

    def accepts(self, problem: Problem) -> str | None:
        return None if problem.empty else "runs problems in which a size is 0"


register(ReferenceGemm())
register(ZeroSize())
