"""te_mx.Linear on Hopper as two native calls, one in forward and one in backward.

The same kernels on the same bytes as autograd/linear.py, in the same order; only the host does
less. It serves the plain case: weights quantized in this call, gradients that go back to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.autograd.backward import outputs, run_backward
from te_mx.backends import sm90, sm90_linear
from te_mx.backends.base import FLOAT_DTYPES
from te_mx.engine.explain import LAST_RUN
from te_mx.ops.library import is_direct
from te_mx.recipe import Settings

_NOT_SAVED = (None, None, None)


class Call(NamedTuple):
    """What a forward is told besides its tensors. `step_by_step`: LinearFunction's backward."""

    settings: Settings
    out_dtype: torch.dtype
    tag: int
    step_by_step: Callable[[Any, Any, Tensor], tuple[Tensor | None, ...]]


def serves(x: Tensor, weight_NK: Tensor, settings: Settings, bias_N: Tensor | None = None) -> bool:
    """Whether a call that wants gradients can be one native call: plain CUDA tensors on Hopper, and
    no recipe that changes what is multiplied or how."""
    return (
        x.is_cuda
        and settings.precision == "adaptive"
        and settings.backward is None
        and not (settings.wgrad_hp or settings.one_copy or settings.split_k)
        and (x.requires_grad or weight_NK.requires_grad)
        and 0 < x.numel() <= sm90.MOST * weight_NK.shape[1]
        and weight_NK.numel() > 0
        and max(weight_NK.shape) <= sm90.MOST
        and weight_NK.device == x.device
        and (bias_N is None or bias_N.device == x.device)
        and is_direct(x, weight_NK, bias_N)
        and sm90.problem(x.device.index) is None
    )


class OneCallLinear(torch.autograd.Function):
    """y = x @ w^T + bias, as autograd/linear.py's LinearFunction."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: Call
    ) -> tuple[Tensor, ...]:
        need_dx, need_dw = ctx.needs_input_grad[:2]
        settings, out_dtype, tag, ctx.step_by_step = call
        (n, k), x_shape = weight_NK.shape, x.shape
        shape = sm90_linear.Shape(x.numel() // k, n, k, need_dw, need_dx)
        words = sm90_linear.format_words(
            settings.scale_rule, settings.spread, settings.fwd_fmt, settings.bwd_fmt
        )
        made = sm90_linear.linear_forward(x, weight_NK, bias_N, shape, words, out_dtype)
        if made is None:
            raise RuntimeError("te_mx internal error: a Hopper kernel did not start")
        y, saved = made
        if tag >= 0:
            LAST_RUN[tag] = sm90.ADAPTIVE
        ctx.settings, ctx.tag, ctx.x_shape, ctx.shape, ctx.words = (
            settings, tag, x_shape, shape, words
        )  # fmt: skip
        ctx.dtypes = x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype
        ctx.sinks = ()
        return outputs(ctx, (saved,), y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.Linear", ctx, *grads)


def _backward(ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    (saved,) = tensors
    if not saved.is_contiguous() or saved.data_ptr() % sm90_linear.ALIGNMENT:
        saved = saved.clone(memory_format=torch.contiguous_format)  # not as it was saved
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    if is_direct(grad, saved) and saved.device == grad.device and grad.dtype in FLOAT_DTYPES:
        dtypes = x_dtype, w_dtype, bias_dtype if ctx.needs_input_grad[2] else None
        made = sm90_linear.linear_backward(grad, saved, ctx.shape, ctx.words, ctx.x_shape, dtypes)
        if made is not None:
            tag = ctx.tag
            if tag >= 0:
                for i, part in enumerate(made[:2], 1):
                    if part is not None:
                        LAST_RUN[tag + i] = sm90.ADAPTIVE
            return *made, None
    return _step_by_step(ctx, grad, saved)


def _step_by_step(ctx: Any, grad: Tensor, saved: Tensor) -> tuple[Tensor | None, ...]:
    """Through the ops, for somebody who watches them."""
    x_col, w_col = sm90_linear.saved_operands(saved, ctx.shape)
    as_saved = SimpleNamespace(
        needs_input_grad=ctx.needs_input_grad, settings=ctx.settings, tag=ctx.tag, sinks=(None,),
        dtypes=ctx.dtypes, x_shape=ctx.x_shape, x_order="sm90", w_order="sm90",
    )  # fmt: skip
    tensors = *(x_col or _NOT_SAVED), *(w_col or _NOT_SAVED)
    return *ctx.step_by_step(as_saved, tensors, grad)[:3], None
