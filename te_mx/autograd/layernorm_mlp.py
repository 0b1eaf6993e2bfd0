"""The autograd function behind te_mx.LayerNormMLP.

Shapes: M tokens, H hidden_size, F ffn_hidden_size, F1 = 2F for gated activations, else F.

    norm   z[M, H]  = norm(x)                       fp32, rounded to the output's dtype
    fc1    h[M, F1] = z @ w1[F1, H]^T + b1
    act    a[M, F]  = act(h)                        fp32, rounded to the output's dtype
    fc2    y[M, H]  = a @ w2[H, F]^T + b2
    back   da = g @ w2, dh = da * act'(h), dz = dh @ w1, dw2 = g^T @ a, dw1 = dh^T @ z

GELU runs inside the GEMMs: fc1's epilogue adds the bias, stores h (if there will be a backward
pass) and applies GELU to the fp32 sum;
the dgrad of fc2 multiplies its fp32 sum by GELU's derivative at h and sums the result for b1. For
other activations a and dh are quantized as they are computed, without being written, and b1's
gradient sums dh as rounded.

Saved for backward: x, with mean and rstd in fp32 (8 bytes a token); h; and for the GEMMs what
autograd/linear.py saves: columnwise codes of z, a, w1 and w2, 1.03 bytes an element, or what the
recipe says instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Epilogue, Operand, Quantized, gemm_2d, quantized
from te_mx._ops.fused import act_quantize_2d
from te_mx.autograd import normalization, other_tokens, steps
from te_mx.autograd.backward import needs_gradient, outputs, place, run_backward, tag_of
from te_mx.autograd.normalization import NormStep
from te_mx.autograd.other_tokens import Tokens
from te_mx.autograd.saved import Kept
from te_mx.autograd.shapes import flatten, shaped
from te_mx.autograd.sought import Sought
from te_mx.autograd.steps import DGRAD, WGRAD
from te_mx.autograd.steps_kept import KeptWeight
from te_mx.autograd.wgrad import WeightGradient
from te_mx.dispatch.fused import Activation, ActStep
from te_mx.recipes.settings import Settings


class Call(NamedTuple):
    """What one call of the module fixes: `return_z` returns z beside y; with tags the kernels of
    fc1 and fc2 are recorded, as by autograd.linear.linear; `tokens` as there."""

    step: NormStep
    act: Activation
    settings: Settings
    return_z: bool
    tags: tuple[int, int] = (-1, -1)
    tokens: Tokens | None = None


class Weights(NamedTuple):
    """For fc1 and fc2: weights that are kept, and where the gradients go."""

    kept: tuple[KeptWeight | None, KeptWeight | None] = (None, None)
    sinks: tuple[WeightGradient | None, WeightGradient | None] = (None, None)


def activated(
    z: Operand, w: Operand | Sought, bias: Tensor | None, call: Call, plan: steps.Input,
    need_h: bool,
) -> tuple[Tensor | None, Tensor | None, Quantized]:  # fmt: skip
    """h (with GELU only if it is needed), a if the plan keeps it, and a quantized."""
    step, act, settings, _, tags, _ = call
    if act.gelu_form:
        if isinstance(w, Sought):
            a = w.times(z, bias, act.gelu_form, step.dtype)
            return None, a, quantized(a, plan.target)
        made = gemm_2d(
            z, w, Epilogue(bias, act.gelu_form), out_dtype=step.dtype, want_aux=need_h,
            tag=tags[0], mode=steps.mode_of(settings),
        )  # fmt: skip
        return made.aux, made.out, quantized(made.out, plan.target)
    h = steps.fprop(z, w, bias, settings, step.dtype, tags[0])
    made_a = act_quantize_2d(ActStep(h, None, act, step.dtype, plan.keep, plan.target))
    return h, made_a.out, made_a.quantized


def _row(q: Quantized) -> Operand:
    assert q.row is not None
    return q.row


class LayerNormMLPFunction(torch.autograd.Function):
    """y, or (y, z); gradients have the dtypes of what they belong to."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        weights: Weights,
        call: Call,
    ) -> tuple[Tensor, ...]:
        need = ctx.needs_input_grad
        need_dz, need_dw1, need_dw2 = any(need[:3]), need[3], need[5]
        need_dh = need_dz or need_dw1 or need[4]
        settings, device = call.settings, x.device
        plan_z = other_tokens.plan_input(x, settings, need_dw1, False, call.tokens)
        plan_a = steps.plan_input(device, settings, need_dw2)
        w1_row, w1_col = steps.weight_operands(weights.kept[0], w1, settings, need_dz)
        w2_row, w2_col = steps.weight_operands(weights.kept[1], w2, settings, need_dh)
        made = call.step.forward(
            flatten(x), norm_weight, norm_bias, call.return_z or plan_z.keep, plan_z.target
        )
        z_row = other_tokens.rows_of_all(made.quantized.row, call.tokens)
        h, a, qa = activated(z_row, w1_row, b1, call, plan_a, need_dh)
        y_MH = steps.fprop(_row(qa), w2_row, b2, settings, call.step.dtype, call.tags[1])

        norms = call.step.saved(x, norm_weight, made) if need_dz else normalization.NOTHING
        kept = (
            plan_z.kept(made.quantized, made.z, need_dw1),
            steps.kept_for_dgrad(w1_row, w1_col, w1, settings, need_dz),
            plan_a.kept(qa, a, need_dw2),
            steps.kept_for_dgrad(w2_row, w2_col, w2, settings, need_dh),
        )
        ctx.kept = [one.beside for one in kept]
        ctx.call, ctx.sinks, ctx.x_like = call, weights.sinks, (x.shape, x.dtype)
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, w1, b1, w2, b2)]
        y = other_tokens.unflatten_all(y_MH, x, call.tokens)
        z = (shaped(made.z, x.shape),) if call.return_z else ()  # type: ignore[arg-type]
        saved_h = h if need_dh else None
        tensors = [t for one in kept for t in one.tensors]
        return outputs(ctx, (*norms, saved_h, *tensors), y, *z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.LayerNormMLP", ctx, *grads)


def _backward(
    ctx: Any, saved: tuple[Tensor, ...], g: Tensor, g_z: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad
    need_dz, need_dw1, need_db1 = any(need[:3]), need[3], need[4]
    need_dw2, need_db2 = need[5], need[6]
    need_dh = need_dz or need_dw1 or need_db1
    norms, h = saved[:4], saved[4]
    kept_z, kept_w1, kept_a, kept_w2 = (
        one.with_tensors(saved[i : i + 3]) for one, i in zip(ctx.kept, (5, 8, 11, 14), strict=True)
    )
    settings, (tag1, tag2), tokens = ctx.call.settings, ctx.call.tags, ctx.call.tokens
    kept_z = other_tokens.kept_of_all(kept_z, tokens)
    bias_dtype, w1_dtype, b1_dtype, w2_dtype, b2_dtype = ctx.dtypes
    dx = d_weight = d_bias = dw1 = db1 = dw2 = db2 = None

    gradient = steps.quantized_gradient(flatten(g), settings, need_dh, need_dw2, need_db2)
    if need_dh:
        inner, sums = through_activation(
            ctx.call, gradient, kept_w2, h, (need_dz, need_dw1, need_db1)
        )
    if need_dw2:
        wgrad = steps.wgrad(gradient, kept_a, settings, tag_of(tag2, WGRAD))
        dw2 = place(ctx.sinks[1], wgrad, w2_dtype)
    if need_db2:
        db2 = gradient.q.col_sum.to(b2_dtype)  # type: ignore[union-attr]
    if need_dz:
        step = ctx.call.step
        tag = tag_of(tag1, DGRAD)
        dz = steps.dgrad(inner, kept_w1, settings, step.dtype, tag).out
        dz = other_tokens.sum_of_mine(dz, tokens)
        dx, d_weight, d_bias = step.backward(dz, g_z, norms, ctx.x_like, need, bias_dtype)
    if need_dw1:
        wgrad = steps.wgrad(inner, kept_z, settings, tag_of(tag1, WGRAD))
        dw1 = place(ctx.sinks[0], wgrad, w1_dtype)
    if need_db1:
        db1 = sums.to(b1_dtype)
    return dx, d_weight, d_bias, dw1, db1, dw2, db2, None, None


def through_activation(
    call: Call, gradient: steps.Gradient, kept_w2: Kept, h: Tensor, need: tuple[bool, bool, bool]
) -> tuple[steps.Gradient, Tensor]:
    """dh, quantized for the GEMMs of fc1 as `need` (dz, dw1, db1) says, and its sums over the
    tokens."""
    step, act, settings, _, tags, _ = call
    target, itself = steps.plan_gradient(h.device, settings, *need)
    tag = tag_of(tags[1], DGRAD)
    if act.gelu_form and gradient.q.row is not None:
        made = steps.dgrad(
            gradient, kept_w2, settings, h.dtype, tag, gelu=act.gelu_form, gelu_in=h,
            bias_grad=need[2],
        )  # fmt: skip
        target = target._replace(col_sum=False)
        return steps.Gradient(made.out, quantized(made.out, target), target), made.bias_grad  # type: ignore[return-value]
    da = steps.dgrad(gradient, kept_w2, settings, step.dtype, tag).out
    parts = act_quantize_2d(ActStep(h, da, act, h.dtype, itself, target))
    inner = steps.Gradient(parts.out, parts.quantized, target)
    return inner, parts.quantized.col_sum  # type: ignore[return-value]


def layernorm_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    w1: Tensor | None,
    b1: Tensor | None,
    w2: Tensor | None,
    b2: Tensor | None,
    weights: Weights,
    call: Call,
) -> tuple[Tensor, Tensor | None]:
    """(y [..., H], z [..., H] or None) of x [..., H] in MXFP8, differentiable. A weight that stands
    still may be None where nothing is differentiated."""
    tensors = (x, norm_weight, norm_bias, w1, b1, w2, b2)
    if needs_gradient(*tensors):
        made = LayerNormMLPFunction.apply(*tensors, weights, call)
        return made[0], made[1] if call.return_z else None
    settings = call.settings
    plan = steps.plan_input(x.device, settings, False)
    plan_z = other_tokens.plan_input(x, settings, False, False, call.tokens)
    w1_row, _ = steps.weight_operands(weights.kept[0], w1, settings, False)
    w2_row, _ = steps.weight_operands(weights.kept[1], w2, settings, False)
    parts = call.step.forward(flatten(x), norm_weight, norm_bias, call.return_z, plan_z.target)
    z_row = other_tokens.rows_of_all(parts.quantized.row, call.tokens)
    _, _, qa = activated(z_row, w1_row, b1, call, plan, False)
    y_MH = steps.fprop(_row(qa), w2_row, b2, settings, call.step.dtype, call.tags[1])
    y = other_tokens.unflatten_all(y_MH, x, call.tokens)
    return y, None if parts.z is None else shaped(parts.z, x.shape)
