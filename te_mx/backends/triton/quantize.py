"""The quantizer and the way back, in Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import why_not_dtype
from te_mx.backends.native import one_read
from te_mx.backends.triton import binding
from te_mx.backends.triton.binding import NAME, RANK, cdiv
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats import Format
from te_mx.formats.element import BIAS, IMPLICIT_BIT, MANTISSA
from te_mx.formats.fp8_blockwise import LARGEST_FACTOR, bits_of
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized

_TILE = 64, 128  # rows and columns a program reads, of the way back


def empty_operand(spec: str, rows: int, k: int, device: torch.device) -> Operand:
    """An operand to write."""
    fmt, layout = spec_of(spec)
    codes, scales = layout.shapes(fmt, rows, k)
    return Operand(
        torch.empty(codes, dtype=torch.uint8, device=device),
        torch.empty(scales, dtype=fmt.scaling.storage, device=device), spec, rows, k,
    )  # fmt: skip


def of_rule(fmt: Format, rule: str) -> dict[str, Any]:
    """What the kernel of a family asks of a format and a rule."""
    element, (name, epsilon) = fmt.element, split_rule(rule)
    words: dict[str, Any] = dict(binding.element_of(element))
    if fmt.scaling.scale == "fp32":
        return words | {
            "ZERO_SIGN": element.has_negative_zero, "EPSILON": bits_of(epsilon),
            "TINY": bits_of(element.max / LARGEST_FACTOR), "POW2": name == "pow2",
            "SQUARE": fmt.scaling.block[0] > 1,
        }  # fmt: skip
    up_from = {"floor": IMPLICIT_BIT, "even": 0x600000}.get(name, (element.max_bits & MANTISSA) + 1)
    least = element.max_bits - BIAS * IMPLICIT_BIT + 1 if name == "rceil" else -1
    return words | {"EMAX": element.emax, "UP_FROM": up_from, "LEAST": least}


def random_of(what: Quantize) -> dict[str, Any]:
    """What is random: rounding, and the transform of each direction."""
    words: dict[str, Any] = {"RANDOM": what.seed is not None}
    if what.seed is not None:
        words |= {"seed": what.seed, "first_of_all": what.first}
    for side, spec in (("ROW", what.row), ("COL", what.col)):
        transform = spec_of(spec).format.transform if spec else None
        if transform is not None:
            words |= {f"{side}_SIZE": transform.size, f"{side}_SIGNS": transform.signs}
    return words


class TritonQuantize(Kernel):
    """Both directions from one read."""

    op, name, rank = "quantize", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        reason = binding.why_not(problem) or one_read(problem.lhs, problem.rhs)
        if reason is None and not (problem.lhs or problem.rhs):
            reason = "makes codes"
        return reason or why_not_dtype(problem)

    def run(self, what: Quantize) -> Quantized:
        x = what.x.detach().resolve_neg()
        x = x if x.stride(1) == 1 else x.contiguous()
        (rows, cols), device = x.shape, x.device
        fmt = spec_of(what.row or what.col).format
        row = empty_operand(what.row, rows, cols, device) if what.row else None
        col = empty_operand(what.col, cols, rows, device) if what.col else None
        words = of_rule(fmt, what.rule)
        height, width, warps = 32, 128 if fmt.element.bits == 8 else 64, 2
        if fmt.scaling.scale == "fp32":
            height = 128 if col or words["SQUARE"] else 32
            width = 128 if row or words["SQUARE"] else 32
            warps = 8 if height == width else 4
        else:
            words |= random_of(what)
            casts = fmt.element.bits == 8 and not words["RANDOM"]
            words["HARDWARE"] = casts and binding.casts(device.index or 0)
        family = "blockwise" if fmt.scaling.scale == "fp32" else "mx"
        kernel = getattr(binding.kernels("quantize"), f"quantize_{family}")
        kernel[cdiv(cols, width), cdiv(rows, height)](
            x, *_parts(row, x), *_parts(col, x), rows, cols, x.stride(0), **words,
            ROW=row is not None, COL=col is not None,
            TURNED=what.col.endswith("@rows"), R=height, C=width, num_warps=warps,
        )  # fmt: skip
        sums = x.sum(0, dtype=torch.float32).to(what.sum_dtype) if what.col_sum else None
        return Quantized(row, col, sums)


def _parts(operand: Operand | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """What is written; where nothing is, something that is not touched."""
    return (x, x) if operand is None else (operand.codes, operand.scales)


class TritonDequantize(Kernel):
    op, name, rank = "dequantize", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        return binding.why_not(problem) or why_not_dtype(problem, "writes")

    def run(self, operand: Operand, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
        fmt, layout = spec_of(operand.spec)
        rows, k, element = operand.rows, operand.k, fmt.element
        out = into
        if out is None or not out.is_contiguous():
            out = torch.empty((rows, k), dtype=dtype, device=operand.codes.device)
        codes, scales = operand.codes.contiguous(), operand.scales.contiguous()
        kernel = binding.kernels("quantize").dequantize
        height, width = _TILE
        kernel[cdiv(k, width), cdiv(rows, height)](
            codes, scales, out, rows, k, codes.stride(0), scales.shape[1],
            BITS=element.bits, MANTISSA_BITS=element.mantissa_bits, BIAS=element.bias,
            MAX_CODE=element.max_code, HAS_INF=element.has_inf,
            ZERO_SIGN=element.has_negative_zero, E8M0=fmt.scaling.scale == "e8m0",
            HEIGHT=fmt.scaling.block[0], BLOCK=fmt.block, K_FIRST=layout.k_first, R=height,
            C=width,
        )  # fmt: skip
        return out if into is None or out is into else into.copy_(out)


register(TritonQuantize())
register(TritonDequantize())
