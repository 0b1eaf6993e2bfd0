"""The GEMM kernels that run anywhere: the reference, and the epilogue of empty problems."""

from __future__ import annotations

import torch

from te_mx.backends.cpu.binding import missing_reason
from te_mx.backends.reference import Reference, torch_gemm
from te_mx.dispatch.calls import Product, Ran
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.dispatch.run import ZERO_SIZE
from te_mx.layouts import spec_of


class ReferenceGemm(Reference):
    """Every format, layout and device."""

    op = "gemm"

    def note(self, problem: Problem) -> str:
        return (missing_reason() or "") if problem.place.device == "cpu" else ""

    def run(self, p: Product) -> Ran:
        return Ran(self.name, torch_gemm.gemm(p.lhs, p.rhs, p.epilogue, p.out, p.aux))


class DecodedGemm(Kernel):
    """Operands with a tensor scale on GPUs: torch's product of what bf16 holds of both sides, with
    fp32 sums that the tensor scales multiply."""

    op, name, rank = "gemm", "decoded", 900

    def accepts(self, problem: Problem) -> str | None:
        if problem.place.device != "cuda":
            return f"runs on CUDA, the operands are on {problem.place.device}"
        sides = [spec_of(spec).format for spec in (problem.lhs, problem.rhs)]
        if not any(fmt.tensor_scaled for fmt in sides):
            return "decodes formats with a tensor scale and what they are multiplied with"
        if not all(fmt.tensor_scaled or fmt.exact_dtype == torch.bfloat16 for fmt in sides):
            return f"multiplies what bf16 holds, not {sides[0]} with {sides[1]}"
        return None

    def run(self, p: Product) -> Ran:
        return Ran(self.name, torch_gemm.gemm(p.lhs, p.rhs, p.epilogue, p.out, p.aux))


class ZeroSize(ReferenceGemm):
    """Nothing to multiply: the epilogue of zeros."""

    name, rank = ZERO_SIZE, -1

    def accepts(self, problem: Problem) -> str | None:
        return None if problem.empty else "runs problems in which a size is 0"


register(ReferenceGemm())
register(DecodedGemm())
register(ZeroSize())
