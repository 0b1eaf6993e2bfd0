"""GEMMs in Triton: MX formats by dot_scaled, blockwise FP8 by dot and factors."""

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import why_not_dtype
from te_mx.backends.triton import binding, tiles
from te_mx.backends.triton.binding import NAME, RANK, cdiv
from te_mx.dispatch.calls import Product, Ran
from te_mx.dispatch.kernels import Kernel, PreferredLayouts
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Stack

VALUES = "sm90_bf16", "sm90_bf16_cols"  # codes times block scales, as Hopper quantizes NVFP4
GROUP, _GROUP = 8, 4  # tiles of rows that share columns of b in L2; with tiles by descriptors
_FLAGS = "BIAS", "AUX", "GELU", "DGELU", "ERF", "ACCUMULATE"
_FACTORS = "as_row", "as_k", "bs_row", "bs_k", "A_HEIGHT", "B_HEIGHT"
_ENDS = 16, 128  # rows and columns a program adds up the parts of


def read(operand: Operand | Stack) -> tuple[Tensor, Tensor]:
    """Codes, or values in bf16, and scales, as kernels read them."""
    codes = operand.codes
    return codes.view(torch.bfloat16) if is_values(operand) else codes, operand.scales


def is_values(operand: Operand | Stack) -> bool:
    """Whether it has no codes, but what these stand for without tensor scales."""
    return operand.layout.name in VALUES


def dtype_of(operand: Operand | Stack, decoded: str) -> Any:
    """The element as multiply_mx or multiply_blockwise know it."""
    if is_values(operand):
        return "bf16"
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
    codes, scales = read(operand)
    of_scales = (0, 0) if is_values(operand) else scales.stride()[-2:][::step]
    return codes.stride()[-2:][::step] + of_scales


def multiplied(lhs: Operand | Stack, rhs: Operand | Stack, rows: int) -> dict[str, Any]:
    """What kernels ask of two operands; rows: of a product, which tiles are chosen by."""
    a_first, b_first = lhs.layout.k_first, rhs.layout.k_first
    mx = lhs.format.scaling.scale != "fp32"
    decoded = binding.decoded(lhs.format, rhs.format, lhs.codes.device)
    a_row, a_k, as_row, as_k = strides(lhs)
    b_row, b_k, bs_row, bs_k = strides(rhs)
    tile = tiles.tile(lhs.codes.device.index or 0, mx, rows, rhs.rows)
    # Rows that lie behind each other and do not fill a tile are masked.
    ragged = (a_first and lhs.rows % tile.m) or (b_first and rhs.rows % tile.n)
    return {
        "EVEN": not (lhs.k % tile.k or ragged), "A_FIRST": a_first, "B_FIRST": b_first,
        "MX": mx, "DECODED": decoded, "A_BLOCK": lhs.format.block, "B_BLOCK": rhs.format.block,
        "A_LOOSE": _is_loose(lhs), "B_LOOSE": _is_loose(rhs),
        "a_row": a_row, "a_k": a_k, "b_row": b_row, "b_k": b_k, "as_row": as_row, "as_k": as_k,
        "bs_row": bs_row, "bs_k": bs_k, "A": dtype_of(lhs, decoded),
        "B": dtype_of(rhs, decoded),
        "A_HEIGHT": lhs.format.scaling.block[0], "B_HEIGHT": rhs.format.scaling.block[0],
        **tile.options,
    }  # fmt: skip


@lru_cache(maxsize=1)
def _descriptor() -> Any:
    """What makes descriptors of tiles; None in a Triton that has none."""
    name = "triton.tools.tensor_descriptor"
    found = importlib.util.find_spec("triton.tools") and importlib.util.find_spec(name)
    return importlib.import_module(name).TensorDescriptor.from_tensor if found else None


def descriptors(lhs: Operand, rhs: Operand, m: int, decoded: str) -> Any:
    """Both sides of a product of blockwise FP8 as descriptors, what the kernel asks for its tiles,
    and how many programs run; None where a GPU has none, or they do not lie by whole 16 bytes."""
    kind, processors = tiles.target(lhs.codes.device.index or 0)
    sides = lhs, rhs
    if kind not in tiles.BY_TMA or m <= tiles.FEW_ROWS or decoded or _descriptor() is None:
        return None
    for one in sides:
        dtype, row = one.format.element.torch_dtype, one.codes.stride(0)
        fits = one.format.scaling.scale == "fp32" and not one.layout.k_first
        if not (fits and dtype) or row % 16 or one.codes.data_ptr() % 16:
            return None
    tile, each = tiles.BY_TMA[kind]
    made = [
        _descriptor()(one.codes.view(one.format.element.torch_dtype or torch.uint8), [high, tile.k])
        for one, high in zip(sides, (tile.m, tile.n), strict=True)
    ]
    count = cdiv(lhs.rows, tile.m) * cdiv(rhs.rows, tile.n)
    return made, tile.options, min(count, each * processors)


def why_not_pair(problem: Problem, *layouts: str) -> str | None:
    """Why no kernel multiplies two formats or writes a dtype; None when one does."""
    reason = binding.why_not(problem, *layouts) or why_not_dtype(problem, "writes")
    if reason is not None:
        return reason
    lhs, rhs = spec_of(problem.lhs).format, spec_of(problem.rhs).format
    if rhs.name == "nvfp4_rows":
        return "takes tensor scales by rows on the left alone"
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
        return why_not_pair(problem)

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts("rows", "rows")

    def parts(self, problem: Problem) -> int:
        mx = spec_of(problem.lhs).format.scaling.scale != "fp32"
        return tiles.parts(max(problem.place.index, 0), mx, problem.m, problem.n, problem.k)

    def run(self, p: Product) -> Ran:
        (bias, gelu, gelu_in, bias_grad, accumulate), (m, n) = p.epilogue, p.out.shape
        words = multiplied(p.lhs, p.rhs, m)
        # Sums over the rows of a result that is not rounded yet need it in fp32.
        whole = bias_grad == "result" and (p.out.dtype != torch.float32 or accumulate)
        direct = p.out.is_contiguous() and not whole
        out = p.out if direct else torch.empty_like(p.out, dtype=torch.float32).contiguous()
        aux = None if p.aux is None else p.aux.contiguous()  # its own memory, or room for it
        ends = out, _or(bias, out), _or(aux, out), _or(gelu_in, out)
        finish = {
            "BIAS": bias is not None, "AUX": aux is not None,
            "GELU": gelu is not None and gelu_in is None, "DGELU": gelu_in is not None,
            "ERF": gelu == "erf", "ACCUMULATE": accumulate and direct, **wholes(p.lhs, p.rhs),
        }  # fmt: skip
        sides = p.lhs.codes, p.lhs.scales, p.rhs.codes, p.rhs.scales
        count = cdiv(m, words["BM"]) * cdiv(n, words["BN"])
        parts, kernels = 1, binding.kernels("gemm")
        if p.mode.split_k:
            parts = tiles.parts(out.device.index or 0, words["MX"], m, n, p.lhs.k)
        by_tma = None if parts > 1 else descriptors(p.lhs, p.rhs, m, words["DECODED"])
        if by_tma is not None:
            (a, b), options, programs = by_tma
            kernels.gemm_blocks[(programs,)](
                a, sides[1], b, sides[3], *ends, m, n, p.lhs.k,
                **{name: words[name] for name in _FACTORS}, **finish, **options, GROUP=_GROUP,
            )  # fmt: skip
        elif parts == 1:
            kernels.gemm[(count,)](*sides, *ends, m, n, p.lhs.k, **words, **finish, GROUP=GROUP)
        else:
            sums = torch.empty((parts, m, n), dtype=torch.float32, device=out.device)
            kernels.gemm[count, parts](
                *sides, *(sums,) * 4, m, n, p.lhs.k, **words, **dict.fromkeys(_FLAGS, False),
                GROUP=GROUP, SPLIT=True,
            )  # fmt: skip
            kernels.add_parts[cdiv(n, _ENDS[1]), cdiv(m, _ENDS[0])](
                sums, *ends, m, n, parts, **finish, BM=_ENDS[0], BN=_ENDS[1]
            )
        bias_sums = None
        if bias_grad == "result":
            bias_sums = out.sum(0, dtype=torch.float32)
        elif bias_grad == "operand":
            bias_sums = p.lhs.values(torch.float32).sum(1)
        if not direct:
            p.out.copy_(out + p.out.float() if accumulate else out)
        if aux is not None and p.aux is not None and aux is not p.aux:
            p.aux.copy_(aux)
        return Ran(self.name, bias_sums)


def wholes(lhs: Operand, rhs: Operand | Stack) -> dict[str, Any]:
    """The tensor scales of both sides, where one has any: of a stack and of tokens in groups those
    of all groups."""
    a, b = lhs.tensor_scale, rhs.tensor_scale
    if a is None and b is None:
        return {}
    one = torch.ones(1, device=lhs.codes.device)
    a, b = (one if side is None else side.contiguous() for side in (a, b))
    return {"a_whole": a, "b_whole": b, "by_rows": int(a.dim() == 2), "WHOLE": True}


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What is read, contiguous; where nothing is, something that is not touched."""
    return other if tensor is None else tensor.contiguous()


register(TritonGemm())
