"""te_mx::dequantize: code * 2^(byte-127)."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends import cpu, reference, sm90
from te_mx.backends.base import FLOAT_DTYPES, Operand
from te_mx.engine.explain import warn_fallback
from te_mx.ops.checks import checked, one_device
from te_mx.ops.library import define, is_direct


def dequantize_2d(
    codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype
) -> Tensor:
    """Values in the shape of codes, rounded once to dtype; a block with scale byte 255 is NaN.

    order "k_last": codes [rows, k], scales [rows, ceil(k/32)]. "k_first": codes [k, rows], scales
    [ceil(k/32), rows].
    """
    if is_direct(codes, scales):
        run = _on_cpu if codes.is_cpu else _on_cuda
        return run(codes, scales, fmt, order, dtype)
    return _OP(codes, scales, fmt, order, dtype)


def _on_cpu(codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype) -> Tensor:
    codes, scales = _checked(codes, scales, fmt, order, dtype)
    if codes.numel() == 0 or dtype not in FLOAT_DTYPES:  # fp64 is for tests: torch does it
        return reference.dequantize(codes, scales, fmt, order, dtype)
    if cpu.native() is not None:
        values = cpu.dequantize(codes, scales, fmt, order, dtype)
        if values is not None:
            return values
    why = cpu.missing_reason() or "the native code does not take this problem"
    warn_fallback("dequantize on the CPU", why)
    return reference.dequantize(codes, scales, fmt, order, dtype)


def _on_cuda(codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype) -> Tensor:
    codes, scales = _checked(codes, scales, fmt, order, dtype)
    if codes.numel() == 0 or dtype not in FLOAT_DTYPES:
        return reference.dequantize(codes, scales, fmt, order, dtype)
    why = sm90.problem(codes.device.index)
    if why is None:
        values = sm90.dequantize(codes, scales, fmt, order, dtype)
        if values is not None:
            return values
        why = "the native code does not take this problem"
    warn_fallback(f"dequantize on {codes.device}", why)
    return reference.dequantize(codes, scales, fmt, order, dtype)


def _on_other(codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype) -> Tensor:
    codes, scales = _checked(codes, scales, fmt, order, dtype)
    return reference.dequantize(codes, scales, fmt, order, dtype)


def _checked(
    codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Contiguous parts that belong together. Raises ValueError or TypeError for others."""
    if order not in ("k_last", "k_first"):
        raise ValueError(f"te_mx: dequantize takes order k_last and k_first, got {order!r}")
    if dtype != torch.float64:
        FLOAT_DTYPES[dtype]
    return checked(Operand(codes, scales, fmt, order), "the matrix")[:2]


def _fake(codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype) -> Tensor:
    one_device(codes.device, ("the scales of the matrix",), (scales,))
    return codes.new_empty(codes.shape, dtype=dtype)


_OP = define(
    "dequantize(Tensor codes, Tensor scales, str fmt, str order, ScalarType dtype) -> Tensor",
    cpu=_on_cpu,
    cuda=_on_cuda,
    other=_on_other,
    fake=_fake,
)
