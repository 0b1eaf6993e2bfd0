"""The reference in the words of native entry points, which tests of these compare with: formats
"e4m3", "e5m2" and "e2m1", orders "k_last" and "k_first", a [m, k] and b [n, k] for D[n, m].
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx import formats
from te_mx.backends.base import Epilogue, Operand, QuantizedParts
from te_mx.backends.reference import torch_gemm
from te_mx.backends.reference.quantize import quantize as quantize_house
from te_mx.dispatch.calls import Quantize
from te_mx.layouts.operand import Operand as HouseOperand

LAYOUTS = {"k_last": "rows", "k_first": "cols", "sm90": "sm90:8"}


def format_of(fmt: str) -> formats.Format:
    """The format that native code calls so."""
    return formats.get("mxfp4" if fmt == "e2m1" else fmt)


def house(operand: Operand) -> HouseOperand:
    """An operand in the words of te_mx._ops."""
    spec = f"{format_of(operand.fmt).name}@{LAYOUTS[operand.order]}"
    return HouseOperand(
        operand.codes, operand.scales, spec, operand.rows, operand.k, operand.packed
    )


def values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """What an operand stands for, as its codes lie."""
    made = house(operand).values(dtype)
    return made.t() if operand.order == "k_first" else made


def quantize(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str | None, rule: str, col_sum: bool
) -> QuantizedParts:
    """Both directions of x [rows, cols]; columnwise "plain", "transposed" or None."""
    name = format_of(fmt).name
    layout = {"plain": "cols", "transposed": "rows"}
    row = f"{name}@rows" if rowwise else ""
    col = f"{name}@{layout[columnwise]}" if columnwise else ""
    made = quantize_house(Quantize(x, row, col, rule, col_sum))
    parts = [t for one in made[:2] for t in ((None, None) if one is None else one[:2])]
    return QuantizedParts(*parts, made.col_sum)


def dequantize(codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype) -> Tensor:
    """The values, as the codes lie."""
    values = house(Operand(codes, scales, fmt, order)).values(dtype)
    return values if order == "k_last" else values.t()


def decode(codes: Tensor, fmt: str) -> Tensor:
    """What codes stand for without scales, fp32."""
    return format_of(fmt).element.decode(codes)


def gemm(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None = None
) -> Tensor | None:
    """Writes out [n, m] and aux; the bias gradient or None."""
    return torch_gemm.gemm(house(b), house(a), epilogue, out, aux)


def relative_matmul(a: Operand, b: Operand) -> Tensor:
    """b @ a^T, which keeps the scales of rows away from fp32's limits."""
    return torch_gemm.relative_matmul(house(b), house(a))
