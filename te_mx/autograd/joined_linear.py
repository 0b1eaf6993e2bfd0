"""The autograd function behind linear layers that read one tensor and run as one, as q, k and v of
an attention do in compiled code (te_mx/nn/joined_layers.py).

Shapes: M tokens, K in_features, N_i out_features of a layer, N their sum.

    fprop  y[M, N]  = x[M, K] @ w[N, K]^T + b, with w the weights of all, one behind the other
    dgrad  dx[M, K] = g[M, N] @ w            one sum in fp32, rounded once
    wgrad  dw[N, K] = g^T @ x

y is handed out as what each layer makes, and g quantized of what comes back for each, where that
lies: compiled code would make a concatenation a part of the kernels before it, twice as slow.

y and dw have the bits of the layers one by one. What is kept is what te_mx.Linear keeps, of x once;
weights are read where they lie (autograd/weight_parts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import quantize_beside_2d
from te_mx._ops.joined import join_columns
from te_mx.autograd import steps
from te_mx.autograd.backward import outputs, run_backward
from te_mx.autograd.shapes import flatten, shaped, unflatten
from te_mx.autograd.weight_parts import joined, kept_again, kept_of, operands, split_gradients
from te_mx.recipes.settings import Settings


class Call(NamedTuple):
    """What one call fixes."""

    settings: Settings
    dtype: torch.dtype  # of y


class JoinedLinearFunction(torch.autograd.Function):
    """y [..., N_i] of every layer, of x [..., K], the call, and weight and bias of every layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *layers: Tensor | None) -> tuple[Tensor, ...]:
        settings, parts = call.settings, layers[::2]
        need_dx, need_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2::2])
        plan = steps.plan_input(x.device, settings, need_dw)
        q = steps.quantized_input(x, plan, parts[0])  # type: ignore[arg-type]
        row, col = operands(None, parts, settings, need_dx)
        assert q.row is not None
        bias = joined(layers[1::2])
        y_MN = steps.fprop(q.row, row, bias, settings, call.dtype, -1)
        x_kept = plan.kept(q, x, need_dw)
        w_kept, own = kept_of((row, col), parts, settings, need_dx)  # type: ignore[arg-type]
        ctx.call, ctx.kept, ctx.sinks = call, (x_kept.beside, w_kept.beside), ()
        ctx.like, ctx.rows = (x.shape, x.dtype), [part.shape[0] for part in parts]  # type: ignore[union-attr]
        ctx.dtypes = parts[0].dtype, None if bias is None else bias.dtype  # type: ignore[union-attr]
        made = unflatten(y_MN, x).split(ctx.rows, -1)
        return outputs(ctx, (*x_kept.tensors, *w_kept.tensors, *own), *made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.Linear", ctx, *grads)


def _backward(ctx: Any, saved: tuple[Tensor, ...], *gs: Tensor) -> tuple[Tensor | None, ...]:
    settings, need = ctx.call.settings, ctx.needs_input_grad
    need_dx, need_dw, need_db = need[0], any(need[2::2]), any(need[3::2])
    x_kept, w_kept = (
        one.with_tensors(saved[i : i + 3]) for one, i in zip(ctx.kept, (0, 3), strict=True)
    )
    w_dtype, b_dtype = ctx.dtypes
    dx = dw = db = None
    gradient = _joined_gradient(
        [flatten(g) for g in gs], settings, need_dx, need_dw, need_db, b_dtype
    )
    if need_db:
        db = gradient.q.col_sum.to(b_dtype)  # type: ignore[union-attr]
    if need_dx:
        own = saved[6:]
        if own[0] is not None:
            w_kept = kept_again(own, (), settings)
        dx = shaped(steps.dgrad(gradient, w_kept, settings, ctx.like[1], -1).out, ctx.like[0])
    if need_dw:
        dw = steps.wgrad(gradient, x_kept, settings, -1)(None, w_dtype, False)
    return dx, None, *split_gradients(ctx.rows, dw, db, need[2:])


def _joined_gradient(
    gs: list[Tensor], settings: Settings, need_dx: bool, need_dw: bool, need_db: bool,
    b_dtype: torch.dtype | None,
) -> steps.Gradient:  # fmt: skip
    """steps.quantized_gradient of the gradients of all layers, side by side, which only GEMMs in
    high precision join."""
    sum_dtype = b_dtype or torch.float32
    if not steps.by_steps(settings) or not (need_dx or need_dw):
        g_MN = join_columns(gs)
        return steps.quantized_gradient(g_MN, settings, need_dx, need_dw, need_db, sum_dtype)
    target, _ = steps.plan_gradient(gs[0].device, settings, need_dx, need_dw, need_db)
    row, col, rule, col_sum, seed = target
    q = quantize_beside_2d(gs, row, col, rule=rule, col_sum=col_sum, sum_dtype=sum_dtype, seed=seed)
    return steps.Gradient(None, q, target)


def joined_linear(x: Tensor, layers: Sequence[Tensor | None], call: Call) -> list[Tensor]:
    """What every layer makes of x [..., K]: views [..., N_i] of one tensor, differentiable. layers:
    weight and bias of each; all of them have a bias or none."""
    return list(JoinedLinearFunction.apply(x, call, *layers)[: len(layers) // 2])
