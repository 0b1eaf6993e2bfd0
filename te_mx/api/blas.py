"""BLAS letters: every GEMM becomes TN on two operands whose blocks run along k.

Row-major shapes, with BLAS letters as Transformer Engine uses them; D is always [n, m]:

    TN  A[m, k]  B[n, k]  D = B @ A.T    reads A rowwise,    B rowwise
    NN  A[k, m]  B[n, k]  D = B @ A      reads A columnwise, B rowwise
    NT  A[k, m]  B[k, n]  D = B.T @ A    reads A columnwise, B columnwise

Nothing is copied here: kernels take columnwise copies in both layouts, and bits of the result do
not depend on them. Below this file B is lhs and A is rhs: D[m, n] = lhs[m, k] @ rhs[n, k]^T.

The epilogue words of `te_mx.gemm`, checked and put into the form that ops take."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from te_mx.dispatch.calls import FLOAT_DTYPES, GELUS, Epilogue
from te_mx.layouts.operand import Operand
from te_mx.runtime.arguments import (
    check_flag,
    check_memory,
    check_place,
    check_written,
    is_one_of,
    shown,
)

USAGES = {
    "TN": ("rowwise", "rowwise"),
    "NN": ("columnwise", "rowwise"),
    "NT": ("columnwise", "columnwise"),
}
_K_IS = {"rowwise": "[., k]", "columnwise": "[k, .]"}


def check_layout(layout: str) -> None:
    """Raise ValueError for anything but TN, NN and NT."""
    if not is_one_of(layout, USAGES):
        tt = isinstance(layout, str) and layout == "TT"
        more = " (TT: swap the operands and transpose the result)" if tt else ""
        raise ValueError(f'layout must be "TN", "NN" or "NT", got {shown(layout)}{more}')


def operands(A: Any, B: Any, layout: str) -> tuple[Operand, Operand]:
    """The two operands (logical A [m, k], B [n, k]) that a layout reads from two MXTensors.

    Raises ValueError for a missing copy, other devices or sizes of k, TypeError for no MXTensor."""
    check_layout(layout)
    for name, tensor in (("A", A), ("B", B)):
        if not hasattr(tensor, "operand"):
            raise TypeError(
                f"{name} must be an MXTensor, got {type(tensor).__name__}; use te_mx.quantize"
            )
    usage_a, usage_b = USAGES[layout]
    a = operand_of(A, usage_a, "A", layout)
    b = operand_of(B, usage_b, "B", layout)
    check_place("A", a.codes, b.codes.device, "B")
    if a.k != b.k:
        raise ValueError(
            f"{layout} needs the same k in A {_K_IS[usage_a]} and B {_K_IS[usage_b]}, got {a.k} "
            f"(A is {A.rows} x {A.cols}) and {b.k} (B is {B.rows} x {B.cols})"
        )
    if a.spec != b.spec and a.format.transform != b.format.transform:
        raise ValueError(
            "A and B must have the same Hadamard transform along k or none, got "
            f"{a.format.name} and {b.format.name}; quantize both with the same one"
        )
    return a, b


def operand_of(tensor: Any, usage: str, name: str, layout: str) -> Operand:
    """The copy of an MXTensor that a layout reads. Raises ValueError where it has none."""
    operand: Operand | None = tensor.operand(usage)
    if operand is None:
        raise ValueError(
            f"layout {layout} reads the {usage} copy of {name}, but {name} = {tensor!r} has none; "
            f"make it with te_mx.quantize(x, {usage}=True)"
        )
    return operand


def check_dtype(dtype: torch.dtype, name: str) -> None:
    """Raise TypeError unless dtype is one that kernels write."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {shown(dtype)}")


def resolve(
    n: int, m: int, device: torch.device, bias: Tensor | bool | None, gelu: str | None,
    gelu_in: Tensor | None, grad: bool, accumulate: bool,
) -> Epilogue:  # fmt: skip
    """The Epilogue of one `te_mx.gemm` call with D [n, m]; raises ValueError or TypeError for what
    does not fit.

    grad=False: bias [m] is added, gelu is applied. grad=True: gelu_in [n, m] asks for the product
    with the derivative (gelu names the form, "tanh" by default), bias asks for the bias gradient:
    with gelu_in the column sums of D [m] ("result"), else the sums of B over k [n] ("operand")."""
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
    check_place(name, tensor, device, "A and B")


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
