"""te_mx::quantize: codes and scales of a matrix along its rows, its columns or both, in one
read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends import cpu, reference
from te_mx.backends.base import QuantizedParts, quantized_shapes
from te_mx.engine.explain import warn_fallback
from te_mx.ops.library import define, is_direct


def quantize_2d(
    x: Tensor,
    fmt: str,
    *,
    rowwise: bool,
    columnwise: str | None,
    scale_rule: str,
    col_sum: bool = False,
) -> QuantizedParts:
    """Quantize x [rows, cols] (fp32, bf16 or fp16, any strides) to MXFP8.

    Args:
        x: the matrix.
        fmt: "e4m3" or "e5m2".
        rowwise: make codes and scales with blocks along the last dimension.
        columnwise: None, "plain" or "transposed": blocks along the first dimension and how they
            lie.
        scale_rule: "rceil" or "floor".
        col_sum: also sum x over its rows in fp32, for a bias gradient.
    """
    if is_direct(x):
        return _on_cpu(x, fmt, rowwise, columnwise, scale_rule, col_sum)
    parts = _OP(x, fmt, rowwise, columnwise or "", scale_rule, col_sum)
    return _unpack(parts, rowwise, columnwise, col_sum)


def _on_cpu(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str | None, rule: str, col_sum: bool
) -> QuantizedParts:
    if cpu.native() is not None and x.numel():
        parts = cpu.quantize(x, fmt, rowwise, columnwise, rule, col_sum)
        if parts is not None:
            return parts
    if x.numel():
        why = cpu.missing_reason() or "the native code does not take this problem"
        warn_fallback("quantize on the CPU", why)
    return reference.quantize(x, fmt, rowwise, columnwise, rule, col_sum)


def _unpack(
    parts: list[Tensor], rowwise: bool, columnwise: str | None, col_sum: bool
) -> QuantizedParts:
    rest = iter(parts)
    return QuantizedParts(
        next(rest) if rowwise else None,
        next(rest) if rowwise else None,
        next(rest) if columnwise else None,
        next(rest) if columnwise else None,
        next(rest) if col_sum else None,
    )


def _op_cpu(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str, rule: str, col_sum: bool
) -> list[Tensor]:
    parts = _on_cpu(x, fmt, rowwise, columnwise or None, rule, col_sum)
    return [part for part in parts if part is not None]


def _op_other(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str, rule: str, col_sum: bool
) -> list[Tensor]:
    parts = reference.quantize(x, fmt, rowwise, columnwise or None, rule, col_sum)
    return [part for part in parts if part is not None]


def _op_fake(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str, rule: str, col_sum: bool
) -> list[Tensor]:
    rows, cols = x.shape
    shapes = quantized_shapes(rows, cols, rowwise, columnwise or None)
    parts = [x.new_empty(shape, dtype=torch.uint8) for shape in shapes]
    return [*parts, x.new_empty(cols, dtype=torch.float32)] if col_sum else parts


_OP = define(
    "quantize(Tensor x, str fmt, bool rowwise, str columnwise, str scale_rule, bool col_sum)"
    " -> Tensor[]",
    cpu=_op_cpu,
    other=_op_other,
    fake=_op_fake,
)
