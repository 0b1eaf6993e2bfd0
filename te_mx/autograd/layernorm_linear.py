"""The autograd function behind te_mx.LayerNormLinear.

Shapes as in autograd/linear.py, z the normalized input: M tokens, K in_features, N out_features.

    norm   z[M, K]  = norm(x)[M, K]                    fp32, rounded to the output's dtype
    fprop  y[M, N]  = z @ w[N, K]^T + bias
    dgrad  dz[M, K] = g[M, N] @ w                      rounded to the dtype of z
    wgrad  dw[N, K] = g^T @ z
    norm   dx, dweight, dbias from dz, x, mean, rstd   fp32, rounded to the dtypes of what they
                                                       belong to

Bit for bit what a normalization and te_mx.Linear after it compute, but z is never written unless
somebody asks for it: x is read once, and z is quantized from the caches.

Saved for backward: x itself (2 bytes an element in bf16), its mean and rstd in fp32 (8 bytes a
token), and for the GEMMs what autograd/linear.py saves: columnwise codes of z and w, 1.03 bytes an
element, or what the recipe says instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.autograd import steps
from te_mx.autograd.backward import place, run_backward, tag_of
from te_mx.autograd.linear import DGRAD, WGRAD
from te_mx.autograd.normalization import NormStep
from te_mx.autograd.operands import StandingWeight, flatten, mode_of, unflatten
from te_mx.autograd.wgrad import WeightGradient
from te_mx.ops import gemm_2d
from te_mx.ops.fused_run import quantized
from te_mx.recipe import Settings


class Call(NamedTuple):
    """What one call of the module fixes: `return_z` returns z beside y; `tag` as for
    autograd.linear.linear."""

    step: NormStep
    settings: Settings
    return_z: bool
    tag: int = -1


class LayerNormLinearFunction(torch.autograd.Function):
    """y, or (y, z); gradients have the dtypes of what they belong to."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        standing: StandingWeight | None,
        sink: WeightGradient | None,
        call: Call,
    ) -> Any:
        need = ctx.needs_input_grad
        need_dz, need_dw = any(need[:3]), need[3]
        step, settings = call.step, call.settings
        x_MK = flatten(x)
        plan = steps.plan_input(x.device, settings, need_dw)
        made = step.forward(x_MK, norm_weight, norm_bias, call.return_z or plan.keep, plan.wanted)
        w_row, w_col = steps.weight_operands(standing, weight_NK, settings, need_dz)
        y_MN = gemm_2d(
            w_row, plan.row(made.quantized), bias=bias_N, out_dtype=step.dtype, tag=call.tag,
            mode=mode_of(settings),
        ).out  # fmt: skip

        saved_z, ctx.z_order = plan.saved(made.quantized, made.z, need_dw)
        saved_w, ctx.w_order = steps.saved_weight(w_row, w_col, weight_NK, settings, need_dz)
        norms = (x, norm_weight, made.mean, made.rstd) if need_dz else (None,) * 4
        ctx.save_for_backward(*norms, *saved_z, *saved_w)
        ctx.call, ctx.sink, ctx.w_dtype = call, sink, weight_NK.dtype
        ctx.bias_dtypes = [None if b is None else b.dtype for b in (norm_bias, bias_N)]
        y = unflatten(y_MN, x)
        return (y, made.z.view(x.shape)) if call.return_z else y  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.LayerNormLinear", ctx, *grads)


def _backward(ctx: Any, g: Tensor, g_z: Tensor | None = None) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad
    need_dz, need_dw, need_db = any(need[:3]), need[3], need[4]
    x, norm_weight, mean, rstd, *saved = ctx.saved_tensors
    step, settings, _, tag = ctx.call
    g_MN = flatten(g)
    wanted, _ = steps.plan_gradient(g.device, settings, need_dz, need_dw, need_db)
    q = quantized(g_MN, wanted)
    gradient = steps.Gradient(g_MN, q, wanted)

    dx = d_weight = d_bias = dw_NK = db_N = None
    if need_dz:
        tag_dz = tag_of(tag, DGRAD)
        dz = steps.dgrad(gradient, saved[3:], ctx.w_order, settings, step.dtype, tag_dz).out
        if g_z is not None:
            dz = dz + flatten(g_z)
        dx, d_weight, d_bias = step.backward(dz, flatten(x), norm_weight, mean, rstd)
        dx = dx.view(x.shape)
    if need_dw:
        wgrad = steps.wgrad(gradient, saved[:3], ctx.z_order, settings, tag_of(tag, WGRAD))
        dw_NK = place(ctx.sink, wgrad, ctx.w_dtype)
    if need_db:
        db_N = q.col_sum.to(ctx.bias_dtypes[1])  # type: ignore[union-attr]
    return (
        dx if need[0] else None,
        d_weight if need[1] else None,
        d_bias.to(ctx.bias_dtypes[0]) if need[2] and d_bias is not None else None,
        dw_NK, db_N, None, None, None,
    )  # fmt: skip


def layernorm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    standing: StandingWeight | None,
    sink: WeightGradient | None,
    call: Call,
) -> tuple[Tensor, Tensor | None]:
    """(y [..., N], z [..., K] or None) of x [..., K] in MXFP8, differentiable. `standing` stands in
    for quantizing the weight, `sink` says where its gradient goes."""
    tensors = (x, norm_weight, norm_bias, weight_NK, bias_N)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        made = LayerNormLinearFunction.apply(*tensors, standing, sink, call)
        return made if call.return_z else (made, None)
    step, settings = call.step, call.settings
    plan = steps.plan_input(x.device, settings, False)
    parts = step.forward(flatten(x), norm_weight, norm_bias, call.return_z, plan.wanted)
    w_row, _ = steps.weight_operands(standing, weight_NK, settings, False)
    y_MN = gemm_2d(
        w_row, plan.row(parts.quantized), bias=bias_N, out_dtype=step.dtype, tag=call.tag,
        mode=mode_of(settings),
    ).out  # fmt: skip
    z = None if parts.z is None else parts.z.view(x.shape)
    return unflatten(y_MN, x), z
