"""An activation by itself, gated or not, one read and one write each way; it keeps its input alone.

Values are computed in fp32 and rounded once, to the dtype of the input."""

from typing import Any

import torch
from torch import Tensor

from te_mx._ops.fused import act_quantize_2d
from te_mx.autograd.node import outputs, run_backward
from te_mx.dispatch.fused import Activation, ActStep, Target

_NO_CODES = Target("", "", "rceil")


class ActivationFunction(torch.autograd.Function):
    """a [rows, cols] of h [rows, cols], or [rows, 2 cols] where gated."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, act: Activation) -> tuple[Tensor, ...]:
        ctx.act, ctx.grad_targets = act, ()
        return outputs(ctx, (h,), _run(h, None, act))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx: a fused activation", ctx, *grads)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    (h,) = saved
    return _run(h, grad.to(h.dtype), ctx.act), None


def _run(h: Tensor, grad: Tensor | None, act: Activation) -> Tensor:
    out = act_quantize_2d(ActStep(h, grad, act, h.dtype, True, _NO_CODES)).out
    assert out is not None
    return out


def activation(h: Tensor, act: Activation) -> Tensor:
    """The activation of h, differentiable once."""
    if torch.is_grad_enabled() and h.requires_grad:
        return ActivationFunction.apply(h, act)[0]
    return _run(h, None, act)
