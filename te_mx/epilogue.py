"""The epilogue words of `te_mx.gemm`, checked and put into the form that ops take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from te_mx.arguments import check_flag, check_memory, is_one_of, shown
from te_mx.dispatch.calls import FLOAT_DTYPES, GELUS, Epilogue
from te_mx.written import check_written

_DTYPES = "float32, bfloat16 or float16"


def check_dtype(dtype: torch.dtype, name: str) -> None:
    """Raise TypeError unless dtype is one that kernels write."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be {_DTYPES}, got {shown(dtype)}")


def resolve(
    n: int, m: int, device: torch.device, bias: Tensor | bool | None, gelu: str | None,
    gelu_in: Tensor | None, grad: bool, accumulate: bool,
) -> Epilogue:  # fmt: skip
    """The Epilogue of one `te_mx.gemm` call with D [n, m]; raises ValueError or TypeError for what
    does not fit.

    grad=False: bias [m] is added, gelu is applied. grad=True: gelu_in [n, m] asks for the product
    with the derivative (gelu names the form, "tanh" by default), bias asks for the bias gradient:
    with gelu_in the column sums of D [m] ("result"), else the sums of B over k [n] ("operand").
    """
    check_flag("grad", grad)
    check_flag("accumulate", accumulate)
    if gelu is not None and not is_one_of(gelu, GELUS):
        raise ValueError(f'gelu must be None, "tanh" or "erf", got {shown(gelu)}')
    if not grad:
        if gelu_in is not None:
            raise ValueError("gelu_in is for the backward pass; pass grad=True with it")
        if isinstance(bias, bool):
            raise TypeError(
                f"bias must be a tensor [{m}] or None when grad=False, got {bias}; "
                "bias=True asks for a bias gradient and needs grad=True"
            )
        if bias is not None:
            check_tensor(bias, "bias", (m,), device, "one value for every row of A")
            bias = bias.resolve_neg()
        return Epilogue(bias, gelu, None, None, accumulate)
    if gelu is not None and gelu_in is None:
        raise ValueError(
            f"grad=True with gelu={gelu!r} needs gelu_in [{n}, {m}], the aux of the forward call"
        )
    if gelu_in is not None:
        check_tensor(gelu_in, "gelu_in", (n, m), device, "the shape of the result")
        gelu_in = gelu_in.resolve_neg()
        gelu = gelu or "tanh"
    kind = None
    if bias is not None and bias is not False:
        kind = "operand" if gelu_in is None else "result"
        if bias is not True:
            size = n if kind == "operand" else m
            reason = "the bias gradient sums B over k" if kind == "operand" else "it sums D over n"
            check_tensor(bias, "bias", (size,), device, reason)
    return Epilogue(None, gelu, gelu_in, kind, accumulate)


def check_tensor(
    tensor: Tensor, name: str, shape: tuple[int, ...], device: torch.device, reason: str
) -> None:
    """Raise unless tensor is a floating tensor of a shape on a device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {shape}, got {type(tensor).__name__}")
    check_memory(name, tensor)
    check_dtype(tensor.dtype, f"the dtype of {name}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} ({reason}), got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device} and A and B are on {device}; move it with .to()"
        )


def check_out(
    out: Tensor | None, n: int, m: int, device: torch.device, out_dtype: torch.dtype,
    accumulate: bool, read: Iterable[tuple[str, Tensor | None]],
) -> None:  # fmt: skip
    """Raise unless out can take D [n, m] in place, while the tensors of `read` are read."""
    if out is None:
        check_dtype(out_dtype, "out_dtype")
        if accumulate:
            raise ValueError("accumulate=True adds to out; pass the tensor as out=")
        return
    check_tensor(out, "out", (n, m), device, "n rows of B, m of A")
    if not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, got strides {out.stride()}; pass a contiguous tensor and copy"
        )
    if out_dtype not in (torch.bfloat16, out.dtype):  # bfloat16 is the default: nothing was asked
        raise ValueError(
            f"out is {out.dtype} but out_dtype is {shown(out_dtype)}; leave out_dtype away"
        )
    check_written(out, "out", read)
