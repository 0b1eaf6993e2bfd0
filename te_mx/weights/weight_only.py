"""Products of inputs as they are with what quantized weights stand for: frozen weights whose
activations are not quantized (W4A16 and the like). Shapes as in autograd/linear.py.

    fprop  y[M, N]  = x[M, K] @ values(w)[N, K]^T + bias
    dgrad  dx[M, K] = g[M, N] @ values(w)

Codes of one layer, or of one expert where the host knows the groups, are decoded for the time of a
product and never kept so: backward decodes them again. They take 2 bytes an element in bf16, which
holds every value of MX formats above 2^-133, else 4 in fp32. Products are those of torch, with one
rounding to the dtype of the result. Of NVFP4 code * block scale is exact in bf16: GPUs multiply
that with bf16, and the fp32 sums with the tensor scale; else the values are rounded to fp32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from te_mx._ops import Operand, Stack, dequantize_2d, plain
from te_mx.autograd.grouped import grouped_plain
from te_mx.autograd.saved import flatten, unflatten
from te_mx.dispatch.calls import Groups
from te_mx.dispatch.groups import host_bounds, readable
from te_mx.runtime.kernel_log import LAST_RUN


def decoded_linear(x: Tensor, weight: Operand, bias_N: Tensor | None) -> Tensor:
    """x [..., K] @ weight^T + bias in the dtype of x, which holds the values of the codes and of
    the bias; differentiable in x and bias, any number of times."""
    with torch.autocast(x.device.type, enabled=False):
        wanted = x.requires_grad or (bias_N is not None and bias_N.requires_grad)
        if torch.is_grad_enabled() and wanted:
            codes, scales, spec, rows, k, packed, whole = weight
            return _DecodedLinear.apply(x, bias_N, codes, scales, packed, whole, (spec, rows, k))
        return _times(x, weight, bias_N)


def _times(x: Tensor, weight: Operand, bias_N: Tensor | None) -> Tensor:
    """x @ weight^T + bias in the dtype of x, or in fp32."""
    whole = weight.tensor_scale
    # A product of x in bf16 has fp32 sums there, which the tensor scale multiplies.
    if whole is None or not x.is_cuda or x.dtype != torch.bfloat16:
        return functional.linear(x, dequantize_2d(weight, x.dtype), bias_N)
    bare = dequantize_2d(weight._replace(tensor_scale=torch.ones_like(whole)), x.dtype)
    y = torch.mm(flatten(x), bare.t(), out_dtype=torch.float32) * whole.t()
    return unflatten(y if bias_N is None else y + bias_N, x)


class _DecodedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias_N: Tensor | None, codes: Tensor, scales: Tensor,
        packed: Tensor | None, whole: Tensor | None, sizes: tuple[str, int, int],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(codes, scales, packed, whole)
        ctx.sizes, ctx.dtype = sizes, x.dtype
        return _times(x, Operand(codes, scales, *sizes, packed, whole), bias_N)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dx = db = None
        with torch.autocast(g.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                # The weight is a constant: what autograd makes of this is the second derivative.
                codes, scales, *rest = ctx.saved_tensors
                weight = Operand(codes, scales, *ctx.sizes, *rest)
                dx = (g @ dequantize_2d(weight, g.dtype)).to(ctx.dtype)
            if ctx.needs_input_grad[1]:
                db = g.flatten(0, -2).sum(0) if g.dim() > 1 else g
        return dx, db, None, None, None, None, None


RAN = "weight only"  # what te_mx.audit says in place of a kernel


def linear(
    x: Tensor, weight: Operand, bias_N: Tensor | None, out_dtype: torch.dtype, tag: int = -1
) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias, in out_dtype. x is rounded to out_dtype first, as by
    nn.Linear under torch.autocast."""
    _record(tag)
    dtype = _dtype(weight, out_dtype, bias_N, x.is_cuda)
    bias_N = None if bias_N is None else bias_N.to(dtype)
    return decoded_linear(x.to(out_dtype).to(dtype), weight, bias_N).to(out_dtype)


def grouped(
    x_RK: Tensor, groups: Groups, weights: Stack, bias_GN: Tensor | None, out_dtype: torch.dtype,
    tag: int = -1,
) -> Tensor:  # fmt: skip
    """[R, N]: `linear` of the rows of every group; rows of no group are 0."""

    def each(x: Tensor, weight: Operand, bias_N: Tensor | None) -> Tensor:
        return linear(x, weight, bias_N, out_dtype)

    _record(tag)
    weights = plain(weights)
    x_RK = x_RK if readable(groups.offs) else x_RK.to(out_dtype)
    return by_groups(x_RK, groups, weights, bias_GN, out_dtype, each)


def by_groups(
    x_RK: Tensor, groups: Groups, weights: Stack, bias_GN: Tensor | None, out_dtype: torch.dtype,
    each: Callable[[Tensor, Operand, Tensor | None], Tensor],
) -> Tensor:  # fmt: skip
    """[R, N]: what `each` makes of the rows of every group, its weight and its bias; rows of no
    group are 0. Where the host does not know the groups, the products of torch: all weights are
    decoded at once then, to bf16 where all dtypes are that, else to fp32."""
    offs, capacity = groups
    if readable(offs):
        rows = x_RK.shape[0]
        out = x_RK.new_zeros((rows, weights.rows), dtype=out_dtype)
        for i, (start, end) in enumerate(zip(*host_bounds(offs, capacity, rows), strict=True)):
            if end > start:
                bias = None if bias_GN is None else bias_GN[i]
                out[start:end] = each(x_RK[start:end], weights.group(i), bias)
        return out
    dtype = _dtype(weights.group(0), out_dtype, bias_GN)
    dtype = dtype if x_RK.dtype == out_dtype else torch.float32
    values = torch.stack([dequantize_2d(weights.group(i), dtype) for i in range(weights.groups)])
    biases = () if bias_GN is None else bias_GN.to(dtype).unbind(0)
    with torch.autocast(x_RK.device.type, enabled=False):
        return grouped_plain(x_RK.to(dtype), groups, values, biases).to(out_dtype)


def _dtype(
    weight: Operand, out_dtype: torch.dtype, bias: Tensor | None, unscaled: bool = False
) -> torch.dtype:
    """A dtype that holds weight (perhaps without tensor scale), input and bias exactly."""
    exact = weight.unscaled_dtype if unscaled else weight.format.exact_dtype
    narrow = {exact, out_dtype} | (set() if bias is None else {bias.dtype})
    return torch.bfloat16 if narrow == {torch.bfloat16} else torch.float32


def _record(tag: int) -> None:
    if tag >= 0:
        LAST_RUN[tag] = RAN
