"""Linear layers in high precision: the gradients of a plain layer, and the plain layer itself where
its weight gradient has a place of its own to go.

Shapes as in autograd/linear.py: x [M, K], w [N, K], g [M, N]."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from te_mx.autograd import node
from te_mx.autograd.grad_target import INPUT, OUTPUT_GRADIENT, WeightGradient, Wgrad, refuse_graph
from te_mx.autograd.saved import flatten, shaped

HIGH_PRECISION = "high precision"  # what te_mx.audit says in place of a kernel

_F32 = torch.float32


def dgrad(g_MN: Tensor, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """dx [M, K] = g @ w, computed in the dtype of g."""
    return (g_MN @ w_NK.to(g_MN.dtype)).to(dtype)


def wgrad(
    g_MN: Tensor, x_MK: Tensor, out: Tensor | None, dtype: torch.dtype, accumulate: bool
) -> Tensor:
    """dw [N, K] = g^T @ x on operands in the dtype of g; into `out` where there is one.

    A result of a wider dtype than the operands gets the fp32 sums, not sums that were rounded."""
    left, right = g_MN.t(), x_MK.to(g_MN.dtype)
    wanted = dtype if out is None else out.dtype
    if wanted == _F32 != left.dtype and out is not None:
        if left.is_cuda:
            dw = torch.mm(left, right, out_dtype=_F32)
        else:
            dw = left.to(_F32) @ right.to(_F32)
    else:
        dw = left @ right
    if out is None:
        return dw.to(wanted)
    return out.add_(dw) if accumulate else out.copy_(dw)


def bias_gradient(g_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """db [N]: the sums of g over the tokens, in fp32 or wider, rounded once to dtype."""
    return g_MN.sum(0, dtype=torch.promote_types(g_MN.dtype, _F32)).to(dtype)


class HighPrecisionLinear(torch.autograd.Function):
    """nn.functional.linear whose weight gradient goes where `grad_target` says."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, grad_target: WeightGradient
    ) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        ctx.grad_target = grad_target
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        return nn.functional.linear(x, weight_NK, bias_N).detach()  # no view, see operands.shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        node.refuse_gradients(ctx.grad_target.label, (grad,))
        if torch.is_grad_enabled():
            refuse_graph((ctx.grad_target,))
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        x, weight_NK = ctx.saved_tensors
        g_MN = flatten(grad)
        dx = dw_NK = db_N = None
        if need_dx:
            dx = shaped(dgrad(g_MN, weight_NK, x.dtype), x.shape)
        if need_dw:
            reads = (INPUT, x), (OUTPUT_GRADIENT, g_MN)
            made = Wgrad(partial(wgrad, g_MN, flatten(x)), reads)
            dw_NK = ctx.grad_target.take(made, weight_NK.dtype)
        if need_db:
            db_N = bias_gradient(g_MN, ctx.bias_dtype)
        return dx, dw_NK, db_N, None
