"""GEMMs in Triton: MX formats by dot_scaled, blockwise FP8 by dot and factors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import why_not_dtype
from te_mx.backends.triton import binding
from te_mx.backends.triton.binding import NAME, RANK, cdiv
from te_mx.dispatch.calls import Product, Ran
from te_mx.dispatch.kernels import Kernel, Wants
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Stack

# By (MX, few rows): BM, BN, BK, warps, stages.
_TILES = {
    (True, True): (16, 64, 128, 4, 4), (True, False): (128, 128, 64, 4, 4),
    (False, True): (64, 64, 128, 4, 4), (False, False): (64, 128, 128, 4, 4),
}  # fmt: skip
_FEW_ROWS, _GROUP = 32, 8


def dtype_of(operand: Operand | Stack, decoded: str) -> Any:
    """The element as multiply_mx or multiply_blockwise know it."""
    element, scale = operand.format.element, operand.format.scaling.scale
    if scale != "fp32" or decoded:
        return element.name
    tl = binding.kernels("gemm").tl
    return {
        "e4m3": tl.float8e4nv, "e5m2": tl.float8e5, "e4m3fnuz": tl.float8e4b8,
        "e5m2fnuz": tl.float8e5b16,
    }[element.name]  # fmt: skip


def _is_loose(operand: Operand | Stack) -> bool:
    """Whether codes of 4 bits lie one a byte."""
    return operand.format.element.bits == 4 and operand.layout.k_first


def strides(operand: Operand | Stack) -> tuple[int, ...]:
    """How far apart rows and k lie, of codes (bytes) and of scales."""
    step = -1 if operand.layout.k_first else 1
    return operand.codes.stride()[-2:][::step] + operand.scales.stride()[-2:][::step]


def multiplied(lhs: Operand | Stack, rhs: Operand | Stack, few: bool) -> dict[str, Any]:
    """What kernels ask of two operands."""
    mx = lhs.format.scaling.scale != "fp32"
    decoded = binding.decoded(lhs.format, rhs.format, lhs.codes.device)
    bm, bn, bk, warps, stages = _TILES[mx, few]
    a_row, a_k, as_row, as_k = strides(lhs)
    b_row, b_k, bs_row, bs_k = strides(rhs)
    return {
        "MX": mx, "DECODED": decoded, "A_BLOCK": lhs.format.block, "B_BLOCK": rhs.format.block,
        "A_LOOSE": _is_loose(lhs), "B_LOOSE": _is_loose(rhs),
        "a_row": a_row, "a_k": a_k, "b_row": b_row, "b_k": b_k, "as_row": as_row, "as_k": as_k,
        "bs_row": bs_row, "bs_k": bs_k, "A": dtype_of(lhs, decoded),
        "B": dtype_of(rhs, decoded),
        "A_HEIGHT": lhs.format.scaling.block[0], "B_HEIGHT": rhs.format.scaling.block[0],
        "BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def why_not_pair(problem: Problem, *layouts: str) -> str | None:
    """Why no kernel multiplies two formats or writes a dtype; None when one does."""
    reason = binding.why_not(problem, *layouts) or why_not_dtype(problem, "writes")
    if reason is not None:
        return reason
    lhs, rhs = spec_of(problem.lhs).format, spec_of(problem.rhs).format
    if (lhs.scaling.scale == "fp32") != (rhs.scaling.scale == "fp32") or (
        lhs.transform != rhs.transform
    ):
        return f"multiplies formats of one family, not {lhs} and {rhs}"
    fnuz = ["fnuz" in one.element.name for one in (lhs, rhs)]
    if fnuz[0] != fnuz[1]:
        return f"multiplies elements of one kind, not {lhs} and {rhs}"
    return None


class TritonGemm(Kernel):
    """TN, NN and NT, of every pair of MX formats and of blockwise formats."""

    op, name, rank = "gemm", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        if problem.rhs.startswith("nvfp4_rows"):
            return "takes tensor scales by rows on the left alone"
        return why_not_pair(problem)

    def wants(self, problem: Problem) -> Wants:
        return Wants("rows", "rows")

    def run(self, p: Product) -> Ran:
        (bias, gelu, gelu_in, bias_grad, accumulate), (m, n) = p.epilogue, p.out.shape
        words = multiplied(p.lhs, p.rhs, m <= _FEW_ROWS)
        # Sums over the rows of a result that is not rounded yet need it in fp32.
        whole = bias_grad == "result" and (p.out.dtype != torch.float32 or accumulate)
        direct = p.out.is_contiguous() and not whole
        out = p.out if direct else torch.empty_like(p.out, dtype=torch.float32).contiguous()
        aux = None if p.aux is None else p.aux.contiguous()  # its own memory, or room for it
        binding.kernels("gemm").gemm[(cdiv(m, words["BM"]) * cdiv(n, words["BN"]),)](
            p.lhs.codes, p.lhs.scales, p.rhs.codes, p.rhs.scales, out, _or(bias, out),
            _or(aux, out), _or(gelu_in, out), m, n, p.lhs.k, **words,
            BIAS=bias is not None, AUX=aux is not None,
            GELU=gelu is not None and gelu_in is None, DGELU=gelu_in is not None,
            ERF=gelu == "erf", ACCUMULATE=accumulate and direct, GROUP=_GROUP,
            EVEN=not (m % words["BM"] or n % words["BN"] or p.lhs.k % words["BK"]), **_wholes(p),
        )  # fmt: skip
        sums = None
        if bias_grad == "result":
            sums = out.sum(0, dtype=torch.float32)
        elif bias_grad == "operand":
            sums = p.lhs.values(torch.float32).sum(1)
        if not direct:
            p.out.copy_(out + p.out.float() if accumulate else out)
        if aux is not None and p.aux is not None and aux is not p.aux:
            p.aux.copy_(aux)
        return Ran(self.name, sums)


def _wholes(p: Product) -> dict[str, Any]:
    """The tensor scales of both sides, where one has any."""
    a, b = p.lhs.tensor_scale, p.rhs.tensor_scale
    if a is None and b is None:
        return {}
    one = torch.ones((), device=p.out.device)
    return {
        "a_whole": one if a is None else a.contiguous(), "b_whole": one if b is None else b,
        "by_rows": int(a is not None and a.dim() > 0), "WHOLE": True,
    }  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What is read, contiguous; where nothing is, something that is not touched."""
    return other if tensor is None else tensor.contiguous()


register(TritonGemm())
