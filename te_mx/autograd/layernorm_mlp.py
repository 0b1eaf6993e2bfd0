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

from te_mx.autograd import normalization, steps
from te_mx.autograd.backward import outputs, place, run_backward, tag_of
from te_mx.autograd.linear import DGRAD, WGRAD
from te_mx.autograd.normalization import NormStep
from te_mx.autograd.operands import StandingWeight, flatten, mode_of, shaped, unflatten
from te_mx.autograd.wgrad import WeightGradient
from te_mx.backends.fused import Activation
from te_mx.ops import Operand, QuantizedParts, gemm_2d
from te_mx.ops.fused import act_quantize_2d, dact_quantize_2d
from te_mx.ops.fused_run import quantized
from te_mx.recipe import Settings


class Call(NamedTuple):
    """What one call of the module fixes: `return_z` returns z beside y; with tags the kernels of
    fc1 and fc2 are recorded, as by autograd.linear.linear."""

    step: NormStep
    act: Activation
    settings: Settings
    return_z: bool
    tags: tuple[int, int] = (-1, -1)


class Weights(NamedTuple):
    """For fc1 and fc2: weights that stand still and where the gradients go."""

    standing: tuple[StandingWeight | None, StandingWeight | None] = (None, None)
    sinks: tuple[WeightGradient | None, WeightGradient | None] = (None, None)


def _fc1(
    w: Operand, z: Operand, bias: Tensor | None, call: Call, plan: steps.Input, need_h: bool
) -> tuple[Tensor | None, Tensor | None, QuantizedParts]:
    """h (with GELU only if it is needed), a if the plan keeps it, and a quantized."""
    step, act, settings, _, tags = call
    if act.gelu_form:
        made = gemm_2d(
            w, z, bias=bias, gelu=act.gelu_form, out_dtype=step.dtype, want_aux=need_h,
            tag=tags[0], mode=mode_of(settings),
        )  # fmt: skip
        return made.aux, made.out, quantized(made.out, plan.wanted)
    h = steps.fprop(w, z, bias, settings, step.dtype, tags[0])
    made_a = act_quantize_2d(h, act, step.dtype, want_out=plan.keep, wanted=plan.wanted)
    return h, made_a.out, made_a.quantized


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
        plan_z = steps.plan_input(device, settings, need_dw1)
        plan_a = steps.plan_input(device, settings, need_dw2)
        w1_row, w1_col = steps.weight_operands(weights.standing[0], w1, settings, need_dz)
        w2_row, w2_col = steps.weight_operands(weights.standing[1], w2, settings, need_dh)
        made = call.step.forward(
            flatten(x), norm_weight, norm_bias, call.return_z or plan_z.keep, plan_z.wanted
        )
        h, a, qa = _fc1(w1_row, plan_z.row(made.quantized), b1, call, plan_a, need_dh)
        y_MH = steps.fprop(w2_row, plan_a.row(qa), b2, settings, call.step.dtype, call.tags[1])

        norms = call.step.saved(x, norm_weight, made) if need_dz else normalization.NOTHING
        saved_z, z_order = plan_z.saved(made.quantized, made.z, need_dw1)
        saved_a, a_order = plan_a.saved(qa, a, need_dw2)
        saved_w1, w1_order = steps.saved_weight(w1_row, w1_col, w1, settings, need_dz)
        saved_w2, w2_order = steps.saved_weight(w2_row, w2_col, w2, settings, need_dh)
        ctx.orders = z_order, w1_order, a_order, w2_order
        ctx.call, ctx.sinks, ctx.x_like = call, weights.sinks, (x.shape, x.dtype)
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, w1, b1, w2, b2)]
        y = unflatten(y_MH, x)
        z = (shaped(made.z, x.shape),) if call.return_z else ()  # type: ignore[arg-type]
        saved_h = h if need_dh else None
        saved = *norms, saved_h, *saved_z, *saved_w1, *saved_a, *saved_w2
        return outputs(ctx, saved, y, *z)

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
    saved_z, saved_w1, saved_a, saved_w2 = (saved[i : i + 3] for i in (5, 8, 11, 14))
    z_order, w1_order, a_order, w2_order = ctx.orders
    settings, (tag1, tag2) = ctx.call.settings, ctx.call.tags
    bias_dtype, w1_dtype, b1_dtype, w2_dtype, b2_dtype = ctx.dtypes
    dx = d_weight = d_bias = dw1 = db1 = dw2 = db2 = None

    gradient = steps.quantized_gradient(flatten(g), settings, need_dh, need_dw2, need_db2)
    if need_dh:
        inner, sums = _through_activation(
            ctx.call, gradient, saved_w2, w2_order, h, (need_dz, need_dw1, need_db1)
        )
    if need_dw2:
        wgrad = steps.wgrad(gradient, saved_a, a_order, settings, tag_of(tag2, WGRAD))
        dw2 = place(ctx.sinks[1], wgrad, w2_dtype)
    if need_db2:
        db2 = gradient.q.col_sum.to(b2_dtype)  # type: ignore[union-attr]
    if need_dz:
        step = ctx.call.step
        tag = tag_of(tag1, DGRAD)
        dz = steps.dgrad(inner, saved_w1, w1_order, settings, step.dtype, tag).out
        dx, d_weight, d_bias = step.backward(dz, g_z, norms, ctx.x_like, need, bias_dtype)
    if need_dw1:
        wgrad = steps.wgrad(inner, saved_z, z_order, settings, tag_of(tag1, WGRAD))
        dw1 = place(ctx.sinks[0], wgrad, w1_dtype)
    if need_db1:
        db1 = sums.to(b1_dtype)
    return dx, d_weight, d_bias, dw1, db1, dw2, db2, None, None


def _through_activation(
    call: Call, gradient: steps.Gradient, saved_w2: Any, w2_order: str | None, h: Tensor,
    need: tuple[bool, bool, bool],
) -> tuple[steps.Gradient, Tensor]:  # fmt: skip
    """dh, quantized for the GEMMs of fc1 as `need` (dz, dw1, db1) says, and its sums over the
    tokens."""
    step, act, settings, _, tags = call
    wanted, itself = steps.plan_gradient(h.device, settings, *need)
    tag = tag_of(tags[1], DGRAD)
    if act.gelu_form and gradient.wanted.rowwise:
        made = steps.dgrad(
            gradient,
            saved_w2,
            w2_order,
            settings,
            h.dtype,
            tag,
            gelu=act.gelu_form,
            gelu_in=h,
            bias_grad=need[2],
        )
        wanted = wanted._replace(col_sum=False)
        return steps.Gradient(made.out, quantized(made.out, wanted), wanted), made.bias_grad  # type: ignore[return-value]
    da = steps.dgrad(gradient, saved_w2, w2_order, settings, step.dtype, tag).out
    parts = dact_quantize_2d(da, h, act, h.dtype, want_out=itself, wanted=wanted)
    inner = steps.Gradient(parts.out, parts.quantized, wanted)
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
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        made = LayerNormMLPFunction.apply(*tensors, weights, call)
        return made[0], made[1] if call.return_z else None
    settings = call.settings
    plan = steps.plan_input(x.device, settings, False)
    w1_row, _ = steps.weight_operands(weights.standing[0], w1, settings, False)
    w2_row, _ = steps.weight_operands(weights.standing[1], w2, settings, False)
    parts = call.step.forward(flatten(x), norm_weight, norm_bias, call.return_z, plan.wanted)
    _, _, qa = _fc1(w1_row, plan.row(parts.quantized), b1, call, plan, False)
    y_MH = steps.fprop(w2_row, plan.row(qa), b2, settings, call.step.dtype, call.tags[1])
    return unflatten(y_MH, x), None if parts.z is None else shaped(parts.z, x.shape)
