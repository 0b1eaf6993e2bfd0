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

from te_mx._ops import Operand
from te_mx.autograd import (
    linear_recipe,
    norm,
    sequence_parallel,
)
from te_mx.autograd.grad_target import WeightGradient
from te_mx.autograd.linear_recipe import DGRAD, WGRAD, KeptWeight
from te_mx.autograd.node import (
    needs_gradient,
    outputs,
    place,
    run_backward,
    tag_of,
)
from te_mx.autograd.norm import NormStep
from te_mx.autograd.saved import flatten, shaped
from te_mx.autograd.sequence_parallel import Tokens
from te_mx.dispatch.fused import NormParts
from te_mx.recipes.settings import Settings


class Call(NamedTuple):
    """What one call of the module fixes: `return_z` returns z beside y; `tag` and `tokens` as for
    autograd.linear.linear."""

    step: NormStep
    settings: Settings
    return_z: bool
    tag: int = -1
    tokens: Tokens | None = None


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
        kept: KeptWeight | None,
        sink: WeightGradient | None,
        call: Call,
    ) -> tuple[Tensor, ...]:
        need = ctx.needs_input_grad
        need_dz, need_dw = any(need[:3]), need[3]
        settings = call.settings
        plan = sequence_parallel.plan_input(x, settings, need_dw, False, call.tokens)
        w_row, w_col = linear_recipe.weight_operands(kept, weight_NK, settings, need_dz)
        y, made = _run(x, norm_weight, norm_bias, w_row, bias_N, plan, call)

        norms = call.step.saved(x, norm_weight, made) if need_dz else norm.NOTHING
        z_kept = plan.kept(made.quantized, made.z, need_dw)
        w_kept = linear_recipe.kept_for_dgrad(w_row, w_col, weight_NK, settings, need_dz)
        ctx.kept = z_kept.beside, w_kept.beside
        ctx.call, ctx.sinks, ctx.x_like = call, (sink,), (x.shape, x.dtype)
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, weight_NK, bias_N)]
        z = (shaped(made.z, x.shape),) if call.return_z else ()  # type: ignore[arg-type]
        return outputs(ctx, (*norms, *z_kept.tensors, *w_kept.tensors), y, *z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.LayerNormLinear", ctx, *grads)


def _run(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, w_row: Operand,
    bias_N: Tensor | None, plan: linear_recipe.Input, call: Call,
) -> tuple[Tensor, NormParts]:  # fmt: skip
    """y [..., N], and z as the plan and the call ask for it."""
    step = call.step
    want_z = call.return_z or plan.keep
    made = step.forward(flatten(x), norm_weight, norm_bias, want_z, plan.target)
    z_row = sequence_parallel.rows_of_all(made.quantized.row, call.tokens)
    y_MN = linear_recipe.fprop(z_row, w_row, bias_N, call.settings, step.dtype, call.tag)
    return sequence_parallel.unflatten_all(y_MN, x, call.tokens), made


def _backward(
    ctx: Any, saved: tuple[Tensor, ...], g: Tensor, g_z: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad
    need_dz, need_dw, need_db = any(need[:3]), need[3], need[4]
    norms, (z_beside, w_beside) = saved[:4], ctx.kept
    step, settings, _, tag, tokens = ctx.call
    z_kept = sequence_parallel.kept_of_all(z_beside.with_tensors(saved[4:7]), tokens)
    w_kept = w_beside.with_tensors(saved[7:])
    norm_bias_dtype, w_dtype, bias_dtype = ctx.dtypes
    gradient = linear_recipe.quantized_gradient(flatten(g), settings, need_dz, need_dw, need_db)

    dx = d_weight = d_bias = dw_NK = db_N = None
    if need_dz:
        tag_dz = tag_of(tag, DGRAD)
        dz = linear_recipe.dgrad(gradient, w_kept, settings, step.dtype, tag_dz).out
        dz = sequence_parallel.sum_of_mine(dz, tokens)
        dx, d_weight, d_bias = step.backward(dz, g_z, norms, ctx.x_like, need, norm_bias_dtype)
    if need_dw:
        wgrad = linear_recipe.wgrad(gradient, z_kept, settings, tag_of(tag, WGRAD))
        dw_NK = place(ctx.sinks[0], wgrad, w_dtype)
    if need_db:
        db_N = gradient.q.col_sum.to(bias_dtype)  # type: ignore[union-attr]
    return dx, d_weight, d_bias, dw_NK, db_N, None, None, None


def layernorm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight_NK: Tensor | None,
    bias_N: Tensor | None,
    kept: KeptWeight | None,
    sink: WeightGradient | None,
    call: Call,
) -> tuple[Tensor, Tensor | None]:
    """(y [..., N], z [..., K] or None) of x [..., K] in MXFP8, differentiable. `kept` stands in
    for quantizing the weight, which may then be None; `sink` says where its gradient goes."""
    tensors = (x, norm_weight, norm_bias, weight_NK, bias_N)
    if needs_gradient(*tensors):
        made = LayerNormLinearFunction.apply(*tensors, kept, sink, call)
        return made[0], made[1] if call.return_z else None
    plan = sequence_parallel.plan_input(x, call.settings, False, False, call.tokens)
    w_row, _ = linear_recipe.weight_operands(kept, weight_NK, call.settings, False)
    y, parts = _run(x, norm_weight, norm_bias, w_row, bias_N, plan, call)
    return y, None if parts.z is None else shaped(parts.z, x.shape)
