"""Checks of what ops are given, before any address is taken. They look at devices, dtypes and
shapes only, never at values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_mx.backends import sm90, sm90_layout
from te_mx.backends.base import (
    COLUMNWISE_FORMS,
    FLOAT_DTYPES,
    FORMATS,
    ORDERS,
    PLAIN,
    SCALE_RULES,
    Operand,
    blocks,
)
from te_mx.backends.fused import ACTIVATIONS, NORMS, Activation, Norm, Wanted
from te_mx.backends.grouped import INDEX_DTYPES, StackedOperand

FORMS = (None, *COLUMNWISE_FORMS)
_ORDERS = ("k_last", "k_first", "sm90")


def one_device(
    device: torch.device, names: Sequence[str], tensors: Sequence[Tensor | None]
) -> None:
    """Raise ValueError unless all tensors are on a device; they are called `names`."""
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            name = next(n for n, t in zip(names, tensors, strict=True) if t is tensor)
            raise ValueError(
                f"te_mx: {name} is on {tensor.device}, what it belongs to is on {device}; move one"
            )


def writable(out: Tensor) -> None:
    """Raise ValueError if values cannot be written where out lies. For calls that go through the
    dispatcher, which reads negative views and cannot write them."""
    if not torch.compiler.is_compiling() and out.is_neg():
        raise ValueError("te_mx: out is a negative view; pass out.resolve_neg()")


def matrix(x: Tensor, columnwise: str | None = None, spread: int = PLAIN) -> None:
    """Raise ValueError unless x is a matrix, to be quantized to forms that there are."""
    if x.dim() != 2:
        raise ValueError(f"te_mx: x must be a matrix, got shape {tuple(x.shape)}; flatten it")
    if columnwise not in FORMS:
        raise ValueError(f"te_mx: columnwise must be one of {FORMS}, got {columnwise!r}")
    if not PLAIN <= spread <= sm90_layout.MAX_SPREAD:
        raise ValueError(
            f"te_mx: spread must be 0 to {sm90_layout.MAX_SPREAD} or {PLAIN}, got {spread}"
        )


def quantizable(
    x: Tensor, fmt: str, rule: str, columnwise: str | None = None, spread: int = PLAIN
) -> None:
    """The same, and raise unless the dtype and the words are known, as native code does."""
    matrix(x, columnwise, spread)
    FORMATS[fmt], SCALE_RULES[rule], FLOAT_DTYPES[x.dtype]


def offsets(offs: Tensor, device: torch.device, groups: int | None = None) -> None:
    """Raise ValueError unless offs are end offsets that an op on a device reads: there, or on the
    CPU."""
    if offs.dim() != 1 or offs.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"te_mx: offs must be a vector of end offsets in int32 or int64, got {offs.dtype} "
            f"{tuple(offs.shape)}"
        )
    if groups is not None and offs.shape[0] != groups:
        raise ValueError(
            f"te_mx: offs must have an entry for each of {groups} groups, got {len(offs)}"
        )
    if not (offs.is_cpu or offs.device == device):
        one_device(device, ("offs",), (offs,))


def alike(weights: Sequence[Tensor]) -> None:
    """Raise ValueError unless all weights have one shape and lie on one device."""
    shape, device = weights[0].shape, weights[0].device
    for i, weight in enumerate(weights):
        if weight.shape != shape or weight.device != device:
            raise ValueError(
                f"te_mx: weights of groups must be alike, got {tuple(shape)} on {device} for group "
                f"0 and {tuple(weight.shape)} on {weight.device} for group {i}"
            )


def checked(operand: Operand, name: str) -> Operand:
    """The operand with contiguous parts. Raises ValueError when its parts do not belong
    together.
    """
    codes, scales, _, order, _ = operand
    if codes.dim() != 2:
        raise ValueError(f"{name}: codes must be a matrix, got shape {tuple(codes.shape)}")
    if scales.device != codes.device:
        one_device(codes.device, (f"the scales of {name}",), (scales,))
    first, second = codes.shape
    if order == "k_last":
        expected = first, (second + 31) // 32
    elif order == "k_first":
        expected = (first + 31) // 32, second
    elif order == "sm90":
        words = sm90_layout.packed_shapes(first, second)[1]
        if scales.shape != words or codes.dtype != torch.uint8 or scales.dtype != torch.int32:
            raise ValueError(
                f"{name}: packed codes {tuple(codes.shape)} need int32 scale words {words}, got "
                f"codes {codes.dtype}, scales {tuple(scales.shape)} {scales.dtype}"
            )
        return sm90.aligned(operand)
    else:
        raise ValueError(f"{name}: order must be one of {_ORDERS}, got {order!r}")
    if scales.shape != expected or codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"{name}: {order} codes {tuple(codes.shape)} need uint8 scales {expected}, got "
            f"codes {codes.dtype}, scales {tuple(scales.shape)} {scales.dtype}"
        )
    if codes.is_contiguous() and scales.is_contiguous():
        return operand
    return operand._replace(codes=codes.contiguous(), scales=scales.contiguous())


def kinds(operand: Operand | StackedOperand, name: str, dims: int) -> None:
    """Raise ValueError unless codes and scales have the dtypes and the dimensions of its order."""
    codes, scales, _, order, _ = operand
    words = torch.int32 if order in ORDERS[2:] else torch.uint8
    if codes.dim() != dims or codes.dtype != torch.uint8 or scales.dtype != words:
        raise ValueError(
            f"{name}: order {order} needs uint8 codes of {dims} dimensions and {words} scales, got "
            f"{codes.dtype} {tuple(codes.shape)} and {scales.dtype}"
        )


def checked_stack(operand: StackedOperand, name: str) -> StackedOperand:
    """Plain operands of groups with contiguous parts. Raises ValueError when they do not belong
    together."""
    codes, scales, _, order, _ = operand
    if codes.dim() != 3 or order not in _ORDERS[:2]:
        raise ValueError(
            f"{name}: codes must have three dimensions and order be one of {_ORDERS[:2]}, got "
            f"{tuple(codes.shape)} and {order!r}"
        )
    groups, first, second = codes.shape
    k_last = order == "k_last"
    expected = (groups, first, blocks(second)) if k_last else (groups, blocks(first), second)
    if scales.shape != expected or not codes.dtype == scales.dtype == torch.uint8:
        raise ValueError(
            f"{name}: {order} codes {tuple(codes.shape)} need scales {expected}, both uint8, got "
            f"scales {tuple(scales.shape)}, {codes.dtype} and {scales.dtype}"
        )
    if scales.device != codes.device:
        one_device(codes.device, (f"the scales of {name}",), (scales,))
    if codes.is_contiguous() and scales.is_contiguous():
        return operand
    return operand._replace(codes=codes.contiguous(), scales=scales.contiguous())


def vector(name: str, given: Tensor, size: int, device: torch.device) -> None:
    """Raise ValueError unless a tensor is fp32 [size] on a device."""
    if given.dtype != torch.float32 or given.shape != (size,) or given.device != device:
        raise ValueError(
            f"te_mx: {name} must be float32 [{size}] on {device}, got {given.dtype} "
            f"{tuple(given.shape)} on {given.device}"
        )


def norm_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, dtype: torch.dtype, wanted: Wanted
) -> None:
    """Raise unless x [rows, cols] can be normalized with weight and bias [cols]."""
    fmt, _, columnwise, rule, spread, _ = wanted
    FLOAT_DTYPES[dtype]
    quantizable(x, fmt, rule, columnwise, spread)
    if norm.kind not in NORMS:
        raise ValueError(f"te_mx: the normalization must be one of {NORMS}, got {norm.kind!r}")
    cols, device = x.shape[1], x.device
    vector("the weight of the normalization", weight, cols, device)
    if bias is not None:
        vector("the bias of the normalization", bias, cols, device)


def norm_gradient(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> None:
    """Raise unless dz and x [rows, cols], weight [cols], mean and rstd [rows] belong together."""
    FLOAT_DTYPES[dtype], FLOAT_DTYPES[x.dtype], FLOAT_DTYPES[dz.dtype]
    if x.dim() != 2 or dz.shape != x.shape or dz.device != x.device:
        raise ValueError(
            f"te_mx: dz must be a matrix as x, {tuple(x.shape)} on {x.device}, got "
            f"{tuple(dz.shape)} on {dz.device}"
        )
    (rows, cols), device = x.shape, x.device
    vector("the weight of the normalization", weight, cols, device)
    vector("rstd", rstd, rows, device)
    if mean is not None:
        vector("mean", mean, rows, device)


def act_step(
    h: Tensor, grad: Tensor | None, act: Activation, dtype: torch.dtype, wanted: Wanted
) -> None:
    """Raise unless h [rows, cols], or [rows, 2 cols] for a gated activation, can be activated, and
    grad is [rows, cols] if there is one."""
    FLOAT_DTYPES[dtype]
    quantizable(h, wanted.fmt, wanted.scale_rule, wanted.columnwise, wanted.spread)
    if act.name not in ACTIVATIONS:
        raise ValueError(f"te_mx: the activation must be one of {ACTIVATIONS}, got {act.name!r}")
    rows, cols = h.shape
    if act.gated:
        if cols % 2:
            raise ValueError(f"te_mx: {act.name} halves the columns of h, got {tuple(h.shape)}")
        cols //= 2
    if grad is None:
        return
    FLOAT_DTYPES[grad.dtype]
    if grad.shape != (rows, cols) or grad.device != h.device:
        raise ValueError(
            f"te_mx: grad must be [{rows}, {cols}] on {h.device} for h {tuple(h.shape)}, got "
            f"{tuple(grad.shape)} on {grad.device}"
        )
