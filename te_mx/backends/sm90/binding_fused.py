"""Native Hopper code of the fused steps: a thin layer over te_mx._sm90, as binding.py. What the
records of normalizations say of sizes and dtypes is written once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, pointer
from te_mx.backends.native import BLOCKWISE, native_target, with_operands
from te_mx.backends.reference.fused_math import inverse
from te_mx.backends.sm90 import binding as sm90
from te_mx.backends.sm90 import binding_blockwise
from te_mx.dispatch.fused import ACT_IDS, Activation, ActParts, Norm, NormParts, Target
from te_mx.dispatch.problem import place_of
from te_mx.dispatch.registry import derive, derived
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Quantized

_F32, _I32 = torch.float32, torch.int32
_known = derived()


class _Same(NamedTuple):
    """What calls of one size share: the record, the index of the GPU, and how many partial sums
    there are of each column."""

    record: Any
    gpu: int
    partial: int = 0


def matrix(x: Tensor) -> Any:
    """The native record of a matrix."""
    rows, cols = x.shape
    return sm90.native().Matrix(  # type: ignore[union-attr]
        data=x.data_ptr(), rows=rows, cols=cols, row_stride=x.stride(0),
        dtype=FLOAT_DTYPES[x.dtype],
    )  # fmt: skip


@lru_cache(maxsize=256)
def _words(row: str, col: str, rule: str, col_sum: bool) -> dict[str, Any] | tuple[Any, ...]:
    """A target in the words of native code: of fp32 scales fields of a record."""
    if (row or col) and spec_of(row or col).format.name in BLOCKWISE:
        return binding_blockwise.words_of_specs(row, col, rule)
    fmt, rowwise, columnwise, rule, spread, col_sum = native_target(Target(row, col, rule, col_sum))
    return fmt, rowwise, columnwise, rule, col_sum, _F32, spread


def _set_target(
    args: Any, rows: int, cols: int, device: torch.device, target: Target
) -> tuple[Quantized, Tensor | None]:
    """Write into a native record what to quantize the result [rows, cols] of a step to: what it
    fills, and scratch memory."""
    words = _words(*target[:4])
    if isinstance(words, tuple):
        parts, scratch = sm90.set_outputs(args, rows, cols, device, words)
        return with_operands(parts, target, rows, cols), scratch
    for field, value in words.items():
        setattr(args, field, value)
    sum_dtype = _F32 if target.col_sum else None
    return binding_blockwise.set_outputs(args, rows, cols, device, *target[:2], sum_dtype)


def _same_norm(
    key: tuple[Any, ...], rows: int, cols: int, device: torch.device, x_dtype: torch.dtype,
    dtype: torch.dtype, norm: Norm,
) -> _Same:  # fmt: skip
    index = place_of(device).index
    record = sm90.native().NormArgs(  # type: ignore[union-attr]
        x_rows=rows, x_cols=cols, x_dtype=FLOAT_DTYPES[x_dtype], rms=norm.kind == "RMSNorm",
        eps=norm.eps, inverse=inverse(cols), z_dtype=FLOAT_DTYPES[dtype], device=index,
    )  # fmt: skip
    return derive(key, _Same(record, index))


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, dtype: torch.dtype, want_z: bool,
    target: Target,
) -> NormParts | None:  # fmt: skip
    """As ops.norm_quantize_2d on a non-empty x; weight and bias are fp32. None for what the native
    code does not take."""
    if x.dtype not in (dtype, _F32):
        x = x.to(_F32)  # exact
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    (rows, cols), device = x.shape, x.device
    key = "normalize", rows, cols, device, x.dtype, dtype, norm
    same = _known.get(key) or _same_norm(key, *key[1:])
    mean = None if norm.kind == "RMSNorm" else torch.empty(rows, dtype=_F32, device=device)
    rstd = torch.empty(rows, dtype=_F32, device=device)
    z = torch.empty((rows, cols), dtype=dtype, device=device) if want_z else None
    counters = torch.empty(1 + (rows + 127) // 128, dtype=_I32, device=device)
    args = same.record.copy(
        x_data=x.data_ptr(), x_row_stride=x.stride(0), weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(), mean=0 if mean is None else mean.data_ptr(),
        rstd=rstd.data_ptr(), z=0 if z is None else z.data_ptr(),
        counters=counters.data_ptr(), stream=sm90.stream(same.gpu),
    )  # fmt: skip
    made, _alive = _set_target(args, rows, cols, device, target)
    status = sm90.native().normalize(args)  # type: ignore[union-attr]
    return NormParts(mean, rstd, z, made) if sm90.supported(status) else None


def _same_norm_backward(
    key: tuple[Any, ...], rows: int, cols: int, device: torch.device, dz_dtype: torch.dtype,
    x_dtype: torch.dtype, dtype: torch.dtype, rms: bool,
) -> _Same:  # fmt: skip
    native, index = sm90.native(), place_of(device).index
    record = native.NormGradArgs(  # type: ignore[union-attr]
        dz_rows=rows, dz_cols=cols, dz_dtype=FLOAT_DTYPES[dz_dtype], x_rows=rows, x_cols=cols,
        x_dtype=FLOAT_DTYPES[x_dtype], rms=rms, inverse=inverse(cols),
        dx_dtype=FLOAT_DTYPES[dtype], device=index,
    )  # fmt: skip
    return derive(key, _Same(record, index, native.norm_partial_sums(rows)))  # type: ignore[union-attr]


def normalize_backward(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor] | None:
    """As fused_math.normalize_backward of the reference on a non-empty x; weight is fp32. None for
    what the native code does not take."""
    if dz.dtype != x.dtype:
        x = x.to(_F32)  # exact, as the next line
    if dz.dtype != x.dtype and dz.dtype not in (torch.bfloat16, torch.float16):
        dz = dz.to(_F32)
    dz = dz if dz.stride(1) == 1 else dz.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    mean, rstd = None if mean is None else mean.contiguous(), rstd.contiguous()
    (rows, cols), device = x.shape, x.device
    key = "normalize backward", rows, cols, device, dz.dtype, x.dtype, dtype, mean is None
    same = _known.get(key) or _same_norm_backward(key, *key[1:])
    dx = torch.empty((rows, cols), dtype=dtype, device=device)
    sums = torch.empty((2, cols), dtype=_F32, device=device)
    # In one piece: partial sums [parts, 2, cols], sums of rows [rows, 2], counters.
    row_sums = same.partial * 2 * cols
    counters = row_sums + 2 * rows
    tiles = 1 + (rows + 127) // 128
    scratch = torch.empty(counters + tiles, dtype=_F32, device=device)
    at, dweight = scratch.data_ptr(), sums.data_ptr()
    args = same.record.copy(
        dz_data=dz.data_ptr(), dz_row_stride=dz.stride(0), x_data=x.data_ptr(),
        x_row_stride=x.stride(0), weight=weight.data_ptr(),
        mean=0 if mean is None else mean.data_ptr(), rstd=rstd.data_ptr(), dx=dx.data_ptr(),
        dweight=dweight, dbias=dweight + 4 * cols, partial=at, row_sums=at + 4 * row_sums,
        counters=at + 4 * counters, stream=sm90.stream(same.gpu),
    )  # fmt: skip
    status = sm90.native().normalize_backward(args)  # type: ignore[union-attr]
    return (dx, sums[0], sums[1]) if sm90.supported(status) else None


def takes(h: Tensor, grad: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the native code computes and quantizes in one step: one dtype for everything."""
    return h.dtype == dtype and (grad is None or grad.dtype == dtype)


def activate(
    h: Tensor, grad: Tensor | None, act: Activation, dtype: torch.dtype, want_out: bool,
    target: Target,
) -> ActParts | None:  # fmt: skip
    """As ops.act_quantize_2d (grad None) and ops.dact_quantize_2d on a non-empty h of dtype; None
    for what the native code does not take."""
    h = sm90.rows_of(h)
    grad = None if grad is None else sm90.rows_of(grad)
    (rows, width), device = h.shape, h.device
    cols = width // 2 if act.gated else width
    made = cols if grad is None else width
    out = torch.empty((rows, made), dtype=dtype, device=device) if want_out else None
    native = sm90.native()
    args = native.ActArgs(  # type: ignore[union-attr]
        h_data=h.data_ptr(), h_rows=rows, h_cols=width, h_row_stride=h.stride(0),
        h_dtype=FLOAT_DTYPES[h.dtype], act=ACT_IDS[act.base], gated=act.gated, limit=act.limit,
        alpha=act.alpha, offset=act.offset, out=pointer(out), out_dtype=FLOAT_DTYPES[dtype],
    )  # fmt: skip
    if grad is not None:
        args.grad = matrix(grad)
    quantized, _alive = _set_target(args, rows, made, device, target)
    sm90.set_execution(args, device.index)
    status = native.activate(args)  # type: ignore[union-attr]
    return ActParts(out, quantized) if sm90.supported(status) else None
