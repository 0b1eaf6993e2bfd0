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

from te_mx._ops import Operand, Target
from te_mx._ops.library import is_direct
from te_mx.autograd import (
    linear_recipe,
    norm,
    sequence_parallel,
)
from te_mx.autograd.grad_target import WeightGradient
from te_mx.autograd.linear import Gradients, backward_of, given_weight, kernel_for
from te_mx.autograd.linear_recipe import DGRAD, WGRAD, KeptWeight
from te_mx.autograd.node import (
    needs_gradient,
    outputs,
    place,
    run_backward,
    tag_of,
)
from te_mx.autograd.norm import NormStep
from te_mx.autograd.saved import NOTHING, Kept, flatten, shaped
from te_mx.autograd.sequence_parallel import Tokens
from te_mx.dispatch.fused import NormParts
from te_mx.dispatch.linear import Held, LinearKernel, LinearProblem, Part
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


class OneCallLayerNormLinear(torch.autograd.Function):
    """The same, where the device has a kernel for the linear step: one native call each way beside
    that of the normalization, see autograd/linear.py."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
        weight_NK: Tensor, bias_N: Tensor | None, ready: KeptWeight | None,
        sink: WeightGradient | None, call: Call, kernel: LinearKernel,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        need_x, need_weight, need_bias, need_dw = ctx.needs_input_grad[:4]
        step, settings, return_z, tag, _ = call
        need_dz, (n, k) = need_x or need_weight or need_bias, weight_NK.shape
        w_kept = need_dz
        if ready is None:
            w_kept = linear_recipe.columns_now(weight_NK, settings, need_dz)
        problem = LinearProblem(x.numel() // k, n, k, need_dw, need_dz, w_kept, settings)
        plan = kernel.plan(problem)
        target = Target(plan.row, plan.col if need_dw else "", settings.scale_rule)
        made = step.forward(flatten(x), norm_weight, norm_bias, return_z, target)
        row, col, _ = made.quantized
        assert row is not None
        z_col = None if col is None else (col.codes, col.scales)
        weight = None if ready is None else given_weight(ready)
        given = Held((row.codes, row.scales), z_col)
        y, held = plan.forward(x, weight_NK, bias_N, step.dtype, given, weight, tag=tag)
        norms = step.saved(x, norm_weight, made) if need_dz else norm.NOTHING
        w: tuple[Tensor | None, Tensor | None] = (weight_NK, None) if need_dz else (None, None)
        if w_kept:
            w = (held.w_col, None) if weight is None else weight.col  # type: ignore[assignment]
        ctx.call, ctx.sinks, ctx.x_like, ctx.plan = call, (sink,), (x.shape, x.dtype), plan
        ctx.w_kept, ctx.w_edge = w_kept, 1 + (norm_weight is not None) + (norm_bias is not None)
        ctx.dtypes = (
            None if norm_bias is None else norm_bias.dtype, weight_NK.dtype,
            None if bias_N is None else bias_N.dtype,
        )  # fmt: skip
        z = (shaped(made.z, x.shape),) if return_z else ()  # type: ignore[arg-type]
        return outputs(ctx, (*norms, *(z_col or (None, None)), *w), y, *z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward_in_one_call, "te_mx.LayerNormLinear", ctx, *grads)


def _backward_in_one_call(
    ctx: Any, saved: tuple[Tensor, ...], g: Tensor, g_z: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    need, plan, (step, _, _, tag, _) = ctx.needs_input_grad, ctx.plan, ctx.call
    norm_bias_dtype, w_dtype, bias_dtype = ctx.dtypes
    need_db, (x_shape, _) = need[4], ctx.x_like
    held: Part | None = None if saved[4] is None else (saved[4], saved[5])
    z_col, w_col = plan.as_saved(held, (saved[6], saved[7]) if ctx.w_kept else None)
    w: Any = w_col if ctx.w_kept else saved[6]
    read, device = (*(z_col or ()), *(w_col or ()), saved[6]), g.device
    direct = is_direct(g, *read)
    for tensor in read:
        if tensor is not None and tensor.device != device:
            direct = False
    made = None
    if direct:
        shape = torch.Size((x_shape[:-1].numel(), x_shape[-1]))
        dtypes = step.dtype, w_dtype, bias_dtype if need_db else None
        node = ctx.next_functions[ctx.w_edge][0]
        made = backward_of(plan, g, (z_col, w), shape, dtypes, None, ctx.sinks[0], node, tag)
    if made is None:  # step by step, for somebody who watches the ops
        z_kept = w_kept = NOTHING
        if z_col is not None:
            operand = plan.quantized(Held(z_col, z_col)).col
            z_kept = Kept.operand(operand)
        if w is not None:
            w_kept = Kept.operand(plan.w_columns(w_col)) if ctx.w_kept else Kept.itself(w)
        made = _gradients(ctx, g, z_kept, w_kept)
    dz, dw_NK, db_N = made
    dx = d_weight = d_bias = None
    if dz is not None:
        dx, d_weight, d_bias = step.backward(dz, g_z, saved[:4], ctx.x_like, need, norm_bias_dtype)
    return dx, d_weight, d_bias, dw_NK, db_N, None, None, None, None


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
    need, (z_beside, w_beside) = ctx.needs_input_grad, ctx.kept
    step, tokens = ctx.call.step, ctx.call.tokens
    z_kept = sequence_parallel.kept_of_all(z_beside.with_tensors(saved[4:7]), tokens)
    dz, dw_NK, db_N = _gradients(ctx, g, z_kept, w_beside.with_tensors(saved[7:]))
    dx = d_weight = d_bias = None
    if dz is not None:
        dz = sequence_parallel.sum_of_mine(dz, tokens)
        dx, d_weight, d_bias = step.backward(dz, g_z, saved[:4], ctx.x_like, need, ctx.dtypes[0])
    return dx, d_weight, d_bias, dw_NK, db_N, None, None, None


def _gradients(ctx: Any, g: Tensor, z_kept: Kept, w_kept: Kept) -> Gradients:
    """dz, dw and db, step by step."""
    need: tuple[bool, ...] = ctx.needs_input_grad
    need_dz, need_dw, need_db = any(need[:3]), need[3], need[4]
    step, settings, _, tag, _ = ctx.call
    _, w_dtype, bias_dtype = ctx.dtypes
    gradient = linear_recipe.quantized_gradient(flatten(g), settings, need_dz, need_dw, need_db)
    dz = dw_NK = db_N = None
    if need_dz:
        dz = linear_recipe.dgrad(
            gradient, w_kept, settings, step.dtype, tag_of(tag, DGRAD)
        ).out  # fmt: skip
    if need_dw:
        wgrad = linear_recipe.wgrad(gradient, z_kept, settings, tag_of(tag, WGRAD))
        dw_NK = place(ctx.sinks[0], wgrad, w_dtype)
    if need_db:
        db_N = gradient.q.col_sum.to(bias_dtype)  # type: ignore[union-attr]
    return dz, dw_NK, db_N


def _kernel(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight_NK: Tensor | None,
    bias_N: Tensor | None, kept: KeptWeight | None, call: Call,
) -> LinearKernel | None:  # fmt: skip
    """The kernel that runs the linear step in one call, or None."""
    if (
        call.tokens is not None
        or weight_NK is None
        or not is_direct(x, norm_weight, norm_bias, weight_NK, bias_N)
    ):
        return None
    need_dz = x.requires_grad
    for tensor in (norm_weight, norm_bias):
        need_dz = need_dz or (tensor is not None and tensor.requires_grad)
    if not (need_dz or weight_NK.requires_grad):
        return None
    return kernel_for(x, call.step.dtype, weight_NK, call.settings, kept, need_dz)


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
        kernel = _kernel(x, norm_weight, norm_bias, weight_NK, bias_N, kept, call)
        if kernel is None:
            made = LayerNormLinearFunction.apply(*tensors, kept, sink, call)
        else:
            made = OneCallLayerNormLinear.apply(*tensors, kept, sink, call, kernel)
        return made[0], made[1] if call.return_z else None
    plan = sequence_parallel.plan_input(x, call.settings, False, False, call.tokens)
    w_row, _ = linear_recipe.weight_operands(kept, weight_NK, call.settings, False)
    y, parts = _run(x, norm_weight, norm_bias, w_row, bias_N, plan, call)
    return y, None if parts.z is None else shaped(parts.z, x.shape)
