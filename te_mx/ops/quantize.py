"""te_mx::quantize: codes and scales of a matrix along its rows, its columns or both, in one
read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from te_mx.backends import cpu, reference, sm90, sm90_layout
from te_mx.backends.base import PLAIN, Quantize, QuantizedParts, quantized_shapes
from te_mx.engine.explain import warn_fallback
from te_mx.ops.checks import FORMS, matrix, quantizable
from te_mx.ops.library import define, is_direct


def quantize_2d(
    x: Tensor,
    fmt: str,
    *,
    rowwise: bool,
    columnwise: str | None,
    scale_rule: str,
    col_sum: bool = False,
    sum_dtype: torch.dtype = torch.float32,
    spread: int = PLAIN,
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
        sum_dtype: what these sums are rounded to: fp32, bf16 or fp16.
        spread: 0 to 8 packs both directions as GEMM operands for Hopper, of order "sm90", aligning
            scales that differ by at most 2^spread. `engine.layout.gemm_form` says when to.
    """
    if is_direct(x):
        run = _on_cpu if x.is_cpu else _on_cuda
        return run(x, fmt, rowwise, columnwise, scale_rule, col_sum, sum_dtype, spread)
    parts = _OP(x, fmt, rowwise, columnwise or "", scale_rule, col_sum, sum_dtype, spread)
    return _unpack(parts, rowwise, columnwise, col_sum)


def quantize_two_2d(first: Quantize, second: Quantize) -> tuple[QuantizedParts, QuantizedParts]:
    """quantize_2d of two matrices that do not depend on each other: on a Hopper GPU that has room,
    at the same time. The first without col_sum.
    """
    x = second.x
    if (
        x.is_cuda
        and first.x.device == x.device
        and is_direct(x, first.x)
        and x.numel()
        and first.x.numel()
        and sm90.problem(x.device.index) is None
    ):
        both = sm90.quantize_two(first, second)
        if both is not None:
            return both
    one = quantize_2d(**first._asdict())
    return one, quantize_2d(**second._asdict())


def _on_cpu(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str | None, rule: str, col_sum: bool,
    sum_dtype: torch.dtype, spread: int,
) -> QuantizedParts:  # fmt: skip
    if x.dim() != 2 or columnwise not in FORMS:
        matrix(x, columnwise)  # says what is wrong
    if cpu.native() is not None and x.numel() and spread < 0:
        parts = cpu.quantize(x, fmt, rowwise, columnwise, rule, col_sum)
        if parts is not None:
            return _rounded(parts, sum_dtype)
    if x.numel() and spread < 0:
        why = cpu.missing_reason() or "the native code does not take this problem"
        warn_fallback("quantize on the CPU", why)
    return _on_other(x, fmt, rowwise, columnwise, rule, col_sum, sum_dtype, spread)


def _on_cuda(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str | None, rule: str, col_sum: bool,
    sum_dtype: torch.dtype, spread: int,
) -> QuantizedParts:  # fmt: skip
    if x.numel() == 0:
        return _on_other(x, fmt, rowwise, columnwise, rule, col_sum, sum_dtype, spread)
    matrix(x, columnwise, spread)
    why = sm90.problem(x.device.index)
    if why is None:
        parts = sm90.quantize(
            Quantize(x, fmt, rowwise, columnwise, rule, col_sum, sum_dtype, spread)
        )
        if parts is not None:
            return parts
        why = "the native code does not take this problem"
    warn_fallback(f"quantize on {x.device}", why)
    return _on_other(x, fmt, rowwise, columnwise, rule, col_sum, sum_dtype, spread)


def _on_other(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str | None, rule: str, col_sum: bool,
    sum_dtype: torch.dtype, spread: int,
) -> QuantizedParts:  # fmt: skip
    """The reference, on any device; with a spread, packed as plain torch describes it."""
    quantizable(x, fmt, rule, columnwise, spread)
    if spread < 0:
        parts = reference.quantize(x, fmt, rowwise, columnwise, rule, col_sum)
        return _rounded(parts, sum_dtype)
    form = None if columnwise is None else "transposed"
    parts = _rounded(reference.quantize(x, fmt, rowwise, form, rule, col_sum), sum_dtype)
    packed: list[Tensor | None] = [None] * 4
    for i, codes, scales in ((0, *parts[:2]), (2, *parts[2:4])):
        if codes is not None and scales is not None:
            packed[i : i + 2] = sm90_layout.pack(codes, scales, fmt, spread).operand_parts(codes)
    return QuantizedParts(packed[0], packed[1], packed[2], packed[3], parts.col_sum)


def _rounded(parts: QuantizedParts, dtype: torch.dtype) -> QuantizedParts:
    """With col_sum in the dtype that was asked for."""
    if parts.col_sum is None or parts.col_sum.dtype == dtype:
        return parts
    return parts._replace(col_sum=parts.col_sum.to(dtype))


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


def _make_op(run: Callable[..., QuantizedParts]) -> Callable[..., list[Tensor]]:
    """The implementation of te_mx::quantize around _on_cpu, _on_cuda or _on_other."""

    def op(
        x: Tensor, fmt: str, rowwise: bool, columnwise: str, rule: str, col_sum: bool,
        sum_dtype: torch.dtype, spread: int,
    ) -> list[Tensor]:  # fmt: skip
        parts = run(x, fmt, rowwise, columnwise or None, rule, col_sum, sum_dtype, spread)
        return [part for part in parts if part is not None]

    return op


def _op_fake(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str, rule: str, col_sum: bool,
    sum_dtype: torch.dtype, spread: int,
) -> list[Tensor]:  # fmt: skip
    rows, cols = x.shape
    if spread < 0:
        shapes = quantized_shapes(rows, cols, rowwise, columnwise or None)
        parts = [x.new_empty(shape, dtype=torch.uint8) for shape in shapes]
    else:
        parts = []
        for wanted, shape in ((rowwise, (rows, cols)), (bool(columnwise), (cols, rows))):
            if wanted:
                parts += sm90.empty_operand(*shape, x.device)
    return [*parts, x.new_empty(cols, dtype=sum_dtype)] if col_sum else parts


_OP = define(
    "quantize(Tensor x, str fmt, bool rowwise, str columnwise, str scale_rule, bool col_sum, "
    "ScalarType sum_dtype, int spread) -> Tensor[]",
    cpu=_make_op(_on_cpu),
    cuda=_make_op(_on_cuda),
    other=_make_op(_on_other),
    fake=_op_fake,
)
