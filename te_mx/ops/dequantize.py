"""te_mx::dequantize: code * 2^(byte-127)."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends import cpu, reference, sm90
from te_mx.backends.base import FLOAT_DTYPES
from te_mx.engine.explain import warn_fallback
from te_mx.ops.library import define, is_direct


def dequantize_2d(
    codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype
) -> Tensor:
    """Values in the shape of codes, rounded once to dtype; a block with scale byte 255 is NaN.

    order "k_last": codes [rows, k], scales [rows, ceil(k/32)]. "k_first": codes [k, rows], scales
    [ceil(k/32), rows].
    """
    if is_direct(codes):
        run = _on_cpu if codes.is_cpu else _on_cuda
        return run(codes, scales, fmt, order, dtype)
    return _OP(codes, scales, fmt, order, dtype)


def _on_cpu(codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype) -> Tensor:
    if codes.numel() == 0 or dtype not in FLOAT_DTYPES:  # fp64 is for tests: torch does it
        return reference.dequantize(codes, scales, fmt, order, dtype)
    if cpu.native() is not None:
        values = cpu.dequantize(codes.contiguous(), scales.contiguous(), fmt, order, dtype)
        if values is not None:
            return values
    why = cpu.missing_reason() or "the native code does not take this problem"
    warn_fallback("dequantize on the CPU", why)
    return reference.dequantize(codes, scales, fmt, order, dtype)


def _on_cuda(codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype) -> Tensor:
    if codes.numel() == 0 or dtype not in FLOAT_DTYPES:
        return reference.dequantize(codes, scales, fmt, order, dtype)
    why = sm90.problem(codes.device.index)
    if why is None:
        values = sm90.dequantize(codes.contiguous(), scales.contiguous(), fmt, order, dtype)
        if values is not None:
            return values
        why = "the native code does not take this problem"
    warn_fallback(f"dequantize on {codes.device}", why)
    return reference.dequantize(codes, scales, fmt, order, dtype)


def _fake(codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


_OP = define(
    "dequantize(Tensor codes, Tensor scales, str fmt, str order, ScalarType dtype) -> Tensor",
    cpu=_on_cpu,
    cuda=_on_cuda,
    other=reference.dequantize,
    fake=_fake,
)
