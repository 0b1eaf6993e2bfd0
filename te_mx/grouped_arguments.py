"""Checks of what te_mx.grouped_linear and te_mx.grouped_wgrad are given, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from te_mx.arguments import check_address, check_dense, check_memory, shown
from te_mx.autograd import joining
from te_mx.dispatch.calls import FLOAT_DTYPES
from te_mx.dispatch.groups import INDEX_DTYPES, host_bounds, readable
from te_mx.layouts.operand import Stack


def check_floats(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a dense tensor in fp32, bf16 or fp16."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown(value)}")
    check_dense(name, value)
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} must be float32, bfloat16 or float16, got {value.dtype}; convert it"
        )
    check_address(name, value)


def check_place(name: str, value: Tensor, inp: Tensor) -> None:
    """Raise ValueError unless a tensor is on the device of inp."""
    if value.device != inp.device:
        raise ValueError(f"{name} is on {value.device} and inp on {inp.device}; move one")


def check_out(
    owner: str, out: Tensor | None, out_dtype: torch.dtype | None, shape: tuple[int, ...],
    inp: Tensor, accumulate: bool,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless a result of this shape, in the dtype that was asked for
    if one was, can be written to `out`, or there is none and nothing to add to."""
    if out is None:
        if accumulate:
            raise ValueError(f"{owner}: accumulate=True adds to out; pass the tensor as out=")
        return
    check_floats(f"{owner}: out", out)
    check_place(f"{owner}: out", out, inp)
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(
            f"{owner}: out must be contiguous {shape}, got {tuple(out.shape)} with strides "
            f"{out.stride()}"
        )
    if out_dtype not in (None, out.dtype):
        raise ValueError(
            f"{owner}: out is {out.dtype} but out_dtype is {out_dtype}; leave out_dtype away"
        )


def parts(
    inp: Tensor,
    weight: Tensor | Iterable[Tensor],
    bias: Tensor | Iterable[Tensor] | None,
    dims: int,
) -> tuple[tuple[Tensor, ...], int]:
    """(weights and biases as the autograd function takes them, number of groups)."""
    check_floats("grouped_linear: inp", inp)
    stacked = isinstance(weight, Tensor)
    weights = _tensors("weight", weight, inp)
    if not weights or weights[0].dim() != (3 if stacked else 2):
        raise ValueError(
            "grouped_linear: weight must be [G, N, K] or a sequence of [N, K], got "
            f"{[tuple(w.shape) for w in weights]}"
        )
    groups = len(weights[0]) if stacked else len(weights)
    n, k = weights[0].shape[-2:]
    if groups == 0 or any(w.shape != weights[0].shape for w in weights):
        raise ValueError(
            "grouped_linear: weight must hold one group or more, all of one shape, got "
            f"{[tuple(w.shape) for w in weights]}"
        )
    if inp.dim() != dims or inp.shape[-1] != k:
        raise ValueError(
            f"grouped_linear: inp must be {'[R, ' if dims == 2 else '[G, M_max, '}{k}] for weight "
            f"[{n}, {k}] of every group, got {tuple(inp.shape)}"
        )
    if bias is None:
        return weights, groups
    biases = _tensors("bias", bias, inp)
    if isinstance(bias, Tensor) != stacked:  # both as weight is
        biases = bias.unbind(0) if isinstance(bias, Tensor) else (joining.stack(biases),)
    shape = (groups, n) if stacked else (n,)
    if len(biases) != len(weights) or any(b.shape != shape for b in biases):
        raise ValueError(
            f"grouped_linear: bias must be [{groups}, {n}] or {groups} tensors [{n}], got "
            f"{[tuple(b.shape) for b in biases]}"
        )
    return weights + biases, groups


def quantized_parts(
    inp: Tensor, weight: Stack, bias: Tensor | Iterable[Tensor] | None, dims: int
) -> tuple[Tensor, ...]:
    """The biases [G, N] beside weights that are quantized, or nothing. Raises as `parts`, and
    RuntimeError where a gradient is asked for."""
    check_floats("grouped_linear: inp", inp)
    groups, n, k = weight.groups, weight.rows, weight.k
    check_place("grouped_linear: weight", weight.codes, inp)
    if inp.dim() != dims or inp.shape[-1] != k:
        raise ValueError(
            f"grouped_linear: inp must be {'[R, ' if dims == 2 else '[G, M_max, '}{k}] for weight "
            f"[{n}, {k}] of every group, got {tuple(inp.shape)}"
        )
    biases = () if bias is None else _tensors("bias", bias, inp)
    if bias is not None and not isinstance(bias, Tensor):
        if len(biases) != groups or any(b.shape != (n,) for b in biases):
            raise ValueError(
                f"grouped_linear: bias must be [{groups}, {n}] or {groups} tensors [{n}], got "
                f"{[tuple(b.shape) for b in biases]}"
            )
        biases = (joining.stack(biases),)
    if biases and biases[0].shape != (groups, n):
        raise ValueError(
            f"grouped_linear: bias must be [{groups}, {n}] or {groups} tensors [{n}], got "
            f"{tuple(biases[0].shape)}"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (inp, *biases)):
        raise RuntimeError(
            "grouped_linear: gradients do not flow where weights are MXTensors; call it under "
            "torch.no_grad(), or pass weights in high precision"
        )
    return biases


def _tensors(name: str, value: Any, inp: Tensor) -> tuple[Tensor, ...]:
    """The tensor, or those of a sequence: dense, floating, on the device of inp."""
    whole = isinstance(value, Tensor)
    if not whole and (isinstance(value, str | Mapping) or not isinstance(value, Iterable)):
        raise TypeError(
            f"grouped_linear: {name} must be a tensor or a sequence of tensors, got {shown(value)}"
        )
    found = (value,) if whole else tuple(value)
    for i, tensor in enumerate(found):
        label = f"grouped_linear: {name}" if whole else f"grouped_linear: {name}[{i}]"
        check_floats(label, tensor)
        check_place(label, tensor, inp)
    return found


def check_index(
    tensor: Tensor, name: str, shape: tuple[int, ...] | None, inp: Tensor,
    owner: str = "grouped_linear",
) -> None:  # fmt: skip
    """Raise unless a tensor holds offsets, counts or group numbers for the rows of inp."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in INDEX_DTYPES:
        raise TypeError(f"{owner}: {name} must be an int32 or int64 tensor, got {shown(tensor)}")
    check_memory(f"{owner}: {name}", tensor)
    if tensor.dim() != 1 or (shape is not None and tuple(tensor.shape) != shape):
        expected = f"have shape {shape}" if shape is not None else "be a vector"
        raise ValueError(f"{owner}: {name} must {expected}, got {tuple(tensor.shape)}")
    if tensor.device != inp.device and tensor.device.type != "cpu":
        raise ValueError(
            f"{owner}: inp is on {inp.device} and {name} on {tensor.device}; move {name} there or "
            "to the CPU"
        )
    if name == "offs" and readable(tensor):
        host_bounds(tensor, 0, inp.shape[0])


def wgrad_shape(grad: Tensor, inp: Tensor, offs: Tensor) -> tuple[int, int, int]:
    """The shape of the result of te_mx.grouped_wgrad; raises for tensors that do not fit."""
    for name, value in (("grad", grad), ("inp", inp)):
        if value.dim() != 2:
            raise ValueError(
                f"grouped_wgrad: {name} must be a matrix, got shape {tuple(value.shape)}"
            )
    check_place("grouped_wgrad: grad", grad, inp)
    if grad.shape[0] != inp.shape[0]:
        raise ValueError(
            f"grouped_wgrad: grad and inp must have the same rows, got {grad.shape[0]} and "
            f"{inp.shape[0]}"
        )
    check_index(offs, "offs", None, inp, "grouped_wgrad")
    return len(offs), grad.shape[1], inp.shape[1]
