"""te_mx.gemm of an MXTensor and a plain tensor: what the codes stand for, times numbers that are
not quantized (W4A16 and the like).

Codes are decoded for the time of the product: to bf16 where the other side is bf16 and the format's
values are too, else to fp32. Products are those of torch, sums fp32, rounded once. Of NVFP4
code * block scale is decoded, and sums are multiplied by the tensor scales. For
te_mx.grouped_gemm of tokens that are not quantized: so for every group."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import GemmParts, Operand, Stack, dequantize_2d
from te_mx.api.blas import USAGES, check_layout, operand_of
from te_mx.backends.reference.gemm import finish, mm_without_tf32
from te_mx.dispatch.calls import Epilogue, Groups
from te_mx.layouts import spec_of
from te_mx.runtime.arguments import check_memory, check_place, parts_of, shown
from te_mx.weights.weight_only import by_groups

_F32, _BF16 = torch.float32, torch.bfloat16
DTYPES = _BF16, torch.float16  # who passes fp32 has forgotten to quantize


Side = Operand | Tensor


class Sides(NamedTuple):
    """B [n, k] and A [m, k]: one an operand, the other a matrix."""

    lhs: Side
    rhs: Side

    @property
    def n(self) -> int:
        return _sizes(self.lhs)[0]

    @property
    def m(self) -> int:
        return _sizes(self.rhs)[0]

    @property
    def parts(self) -> tuple[tuple[str, Tensor], ...]:
        """What the product reads, by name."""
        return *parts_of("A", self.rhs), *parts_of("B", self.lhs)


def sides_of(A: Any, B: Any, layout: str) -> Sides | None:
    """The sides where one of A and B is a plain tensor in 16 bits and the other an MXTensor, else
    None.

    Raises:
        TypeError: the tensor has another dtype.
        ValueError: what does not fit.
    """
    name, plain, other = ("A", A, B) if isinstance(A, Tensor) else ("B", B, A)
    if not isinstance(plain, Tensor) or not hasattr(other, "operand"):
        return None
    if plain.dtype not in DTYPES or plain.dim() == 0:
        raise TypeError(
            f"{name} must be an MXTensor, or a bfloat16 or float16 tensor that stays as it is, got "
            f"{shown(plain)}; use te_mx.quantize, or convert it"
        )
    check_layout(layout)
    usage_a, usage_b = USAGES[layout]
    a, b = _side(A, usage_a, "A", layout), _side(B, usage_b, "B", layout)
    check_place("A", _held(a), _held(b).device, "B")
    if (k := _sizes(a)[1]) != (k_b := _sizes(b)[1]):
        raise ValueError(
            f"{layout} needs the same k in A and B, got {k} (A is {tuple(A.shape)}) and {k_b} "
            f"(B is {tuple(B.shape)})"
        )
    return Sides(b, a)


def _side(tensor: Any, usage: str, name: str, layout: str) -> Side:
    if not isinstance(tensor, Tensor):
        operand = operand_of(tensor, usage, name, layout)
        check_untransformed(name, operand.spec)
        return operand
    check_memory(name, tensor)
    flat = tensor.detach().resolve_neg().reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
    return flat if usage == "rowwise" else flat.t()


def check_untransformed(name: str, spec: str) -> None:
    """Raise ValueError for codes whose transform numbers that are not quantized do not have."""
    fmt = spec_of(spec).format
    if fmt.transform is not None:
        raise ValueError(
            f"{name} is {fmt.name}, whose Hadamard transform the other side does not have; "
            "quantize both with the same one"
        )


def _sizes(side: Side) -> tuple[int, int]:
    return (len(side), side.shape[1]) if isinstance(side, Tensor) else (side.rows, side.k)


def _held(side: Side) -> Tensor:
    return side if isinstance(side, Tensor) else side.codes


@torch.no_grad()
def run(
    sides: Sides, epilogue: Epilogue, out: Tensor | None, out_dtype: torch.dtype,
    aux_dtype: torch.dtype | None,
) -> GemmParts:  # fmt: skip
    """out [n, m] = epilogue(B @ A^T), in place where there is an out, and aux and the bias gradient
    as far as they were asked for."""
    exact = (s.dtype if isinstance(s, Tensor) else s.unscaled_dtype for s in sides)
    narrow = all(one == _BF16 for one in exact)
    dtype = _BF16 if narrow else _F32
    of_lhs, of_rhs = (None if isinstance(s, Tensor) else s.tensor_scale for s in sides)
    scaled = of_lhs is not None or of_rhs is not None
    place = _held(sides.lhs)
    with torch.autocast(place.device.type, enabled=False):
        lhs, rhs = (_values(side, dtype) for side in sides)
        usual = out is None and out_dtype == _BF16 and epilogue == Epilogue()
        if narrow and usual and not scaled:
            return GemmParts(torch.mm(lhs, rhs.t()), None, None)
        bias_grad = lhs.to(_F32).sum(1) if epilogue.bias_grad == "operand" else None
        if bias_grad is not None and of_lhs is not None:
            bias_grad *= of_lhs.flatten()
        if narrow and place.is_cuda:
            value = torch.mm(lhs, rhs.t(), out_dtype=_F32)
        else:
            value = mm_without_tf32(lhs.to(_F32), rhs.to(_F32).t())
        if of_lhs is not None:
            value = value * of_lhs
        elif of_rhs is not None:
            value = value * of_rhs.t()
    out = value.new_empty(value.shape, dtype=out_dtype) if out is None else out
    aux = None
    if epilogue.gelu is not None and epilogue.gelu_in is None:
        aux = torch.empty_like(out, dtype=aux_dtype or out.dtype)
    return GemmParts(out, aux, finish(value, bias_grad, epilogue, out, aux))


def _values(side: Side, dtype: torch.dtype) -> Tensor:
    if isinstance(side, Tensor):
        return side.to(dtype)
    return dequantize_2d(side, dtype) if side.tensor_scale is None else side.unscaled(dtype)


def check(inp: Tensor, weight: Stack, owner: str) -> Tensor:
    """Tokens as they are read. Raises ValueError or TypeError for what does not fit."""
    check_memory(f"{owner}: inp", inp)
    check_untransformed(f"{owner}: weight", weight.spec)
    return inp.detach().resolve_neg()


def run_grouped(
    x_RK: Tensor, groups: Groups, weight: Stack, bias_GN: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """[R, N]: x [K] of the rows of every group times the values of its weight, + bias; rows of no
    group are 0.

    Where the host knows the groups, each has the bits of te_mx.gemm."""

    def each(x: Tensor, weight: Operand, bias_N: Tensor | None) -> Tensor:
        return run(Sides(x, weight), Epilogue(bias=bias_N), None, out_dtype, None).out

    return by_groups(x_RK, groups, weight, bias_GN, out_dtype, each)
