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

The autograd function behind the MLP blocks of other libraries' models that are fused where they
stand (te_mx/fusion/fused_mlp.py): act(x @ w1^T) @ w2^T, where w1 is one parameter, or those of the
gate and of the up projection, one behind the other.

Shapes: M tokens, H in_features, F columns of the activation's result, F1 = 2F for gated
activations, else F, N out_features.

    fc1    h[M, F1] = x @ w1[F1, H]^T + b1          one GEMM, also where w1 is two parameters
    act    a[M, F]  = act(h)                        fp32, rounded to the output's dtype
    fc2    y[M, N]  = a @ w2[N, F]^T + b2
    back   da = g @ w2, dh = da * act'(h), dx = dh @ w1, dw2 = g^T @ a, dw1 = dh^T @ x

What is rounded where is as in autograd/mlp.py, whose steps these are. Saved for backward:
columnwise codes of x, as te_mx.Linear does; h in the output's dtype; of the weights what
steps.kept_for_dgrad says. Joined weights are never saved: backward reads the parameters again.
Codes that backward can make again to the byte are not saved either: those of a, of h
(`_makes_again`), and those of an x that a normalization just made, of what it was made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Epilogue, Operand, Quantized, Target, gemm_2d, quantized
from te_mx._ops.fused import act_quantize_2d
from te_mx.autograd import (
    input_cache,
    linear_recipe,
    norm,
    sequence_parallel,
)
from te_mx.autograd.grad_target import WeightGradient
from te_mx.autograd.linear import Lent
from te_mx.autograd.linear_recipe import (
    DGRAD,
    FPROP,
    WGRAD,
    KeptWeight,
    Sought,
)
from te_mx.autograd.node import (
    needs_gradient,
    outputs,
    place,
    run_backward,
    tag_of,
)
from te_mx.autograd.norm import NormStep, Source, source_of
from te_mx.autograd.saved import (
    Kept,
    flatten,
    shaped,
    surely,
    unflatten,
)
from te_mx.autograd.sequence_parallel import Tokens
from te_mx.autograd.weight_parts import (
    joined,
    kept_again,
    kept_of,
    of_codes,
    operands,
    split_gradients,
)
from te_mx.dispatch.fused import Activation, ActStep
from te_mx.recipes.settings import Settings
from te_mx.runtime.ran import LAST_RUN


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
    z: Operand, w: Operand | Sought, bias: Tensor | None, call: Call, plan: linear_recipe.Input,
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
            tag=tags[0], mode=linear_recipe.mode_of(settings),
        )  # fmt: skip
        return made.aux, made.out, quantized(made.out, plan.target)
    h = linear_recipe.fprop(z, w, bias, settings, step.dtype, tags[0])
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
        plan_z = sequence_parallel.plan_input(x, settings, need_dw1, False, call.tokens)
        plan_a = linear_recipe.plan_input(device, settings, need_dw2)
        w1_row, w1_col = linear_recipe.weight_operands(weights.kept[0], w1, settings, need_dz)
        w2_row, w2_col = linear_recipe.weight_operands(weights.kept[1], w2, settings, need_dh)
        made = call.step.forward(
            flatten(x), norm_weight, norm_bias, call.return_z or plan_z.keep, plan_z.target
        )
        z_row = sequence_parallel.rows_of_all(made.quantized.row, call.tokens)
        h, a, qa = activated(z_row, w1_row, b1, call, plan_a, need_dh)
        y_MH = linear_recipe.fprop(_row(qa), w2_row, b2, settings, call.step.dtype, call.tags[1])

        norms = call.step.saved(x, norm_weight, made) if need_dz else norm.NOTHING
        kept = (
            plan_z.kept(made.quantized, made.z, need_dw1),
            linear_recipe.kept_for_dgrad(w1_row, w1_col, w1, settings, need_dz),
            plan_a.kept(qa, a, need_dw2),
            linear_recipe.kept_for_dgrad(w2_row, w2_col, w2, settings, need_dh),
        )
        ctx.kept = [one.beside for one in kept]
        ctx.call, ctx.sinks, ctx.x_like = call, weights.sinks, (x.shape, x.dtype)
        ctx.dtypes = [None if t is None else t.dtype for t in (norm_bias, w1, b1, w2, b2)]
        y = sequence_parallel.unflatten_all(y_MH, x, call.tokens)
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
    kept_z = sequence_parallel.kept_of_all(kept_z, tokens)
    bias_dtype, w1_dtype, b1_dtype, w2_dtype, b2_dtype = ctx.dtypes
    dx = d_weight = d_bias = dw1 = db1 = dw2 = db2 = None

    gradient = linear_recipe.quantized_gradient(flatten(g), settings, need_dh, need_dw2, need_db2)
    if need_dh:
        inner, sums = through_activation(
            ctx.call, gradient, kept_w2, h, (need_dz, need_dw1, need_db1)
        )
    if need_dw2:
        wgrad = linear_recipe.wgrad(gradient, kept_a, settings, tag_of(tag2, WGRAD))
        dw2 = place(ctx.sinks[1], wgrad, w2_dtype)
    if need_db2:
        db2 = gradient.q.col_sum.to(b2_dtype)  # type: ignore[union-attr]
    if need_dz:
        step = ctx.call.step
        tag = tag_of(tag1, DGRAD)
        dz = linear_recipe.dgrad(inner, kept_w1, settings, step.dtype, tag).out
        dz = sequence_parallel.sum_of_mine(dz, tokens)
        dx, d_weight, d_bias = step.backward(dz, g_z, norms, ctx.x_like, need, bias_dtype)
    if need_dw1:
        wgrad = linear_recipe.wgrad(inner, kept_z, settings, tag_of(tag1, WGRAD))
        dw1 = place(ctx.sinks[0], wgrad, w1_dtype)
    if need_db1:
        db1 = sums.to(b1_dtype)
    return dx, d_weight, d_bias, dw1, db1, dw2, db2, None, None


def through_activation(
    call: Call,
    gradient: linear_recipe.Gradient,
    kept_w2: Kept,
    h: Tensor,
    need: tuple[bool, bool, bool],
) -> tuple[linear_recipe.Gradient, Tensor]:
    """dh, quantized for the GEMMs of fc1 as `need` (dz, dw1, db1) says, and its sums over the
    tokens."""
    step, act, settings, _, tags, _ = call
    target, itself = linear_recipe.plan_gradient(h.device, settings, *need)
    tag = tag_of(tags[1], DGRAD)
    if act.gelu_form and gradient.q.row is not None:
        made = linear_recipe.dgrad(
            gradient, kept_w2, settings, h.dtype, tag, gelu=act.gelu_form, gelu_in=h,
            bias_grad=need[2],
        )  # fmt: skip
        target = target._replace(col_sum=False)
        return linear_recipe.Gradient(made.out, quantized(made.out, target), target), made.bias_grad  # type: ignore[return-value]
    da = linear_recipe.dgrad(gradient, kept_w2, settings, step.dtype, tag).out
    parts = act_quantize_2d(ActStep(h, da, act, h.dtype, itself, target))
    inner = linear_recipe.Gradient(parts.out, parts.quantized, target)
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
    plan = linear_recipe.plan_input(x.device, settings, False)
    plan_z = sequence_parallel.plan_input(x, settings, False, False, call.tokens)
    w1_row, _ = linear_recipe.weight_operands(weights.kept[0], w1, settings, False)
    w2_row, _ = linear_recipe.weight_operands(weights.kept[1], w2, settings, False)
    parts = call.step.forward(flatten(x), norm_weight, norm_bias, call.return_z, plan_z.target)
    z_row = sequence_parallel.rows_of_all(parts.quantized.row, call.tokens)
    _, _, qa = activated(z_row, w1_row, b1, call, plan, False)
    y_MH = linear_recipe.fprop(_row(qa), w2_row, b2, settings, call.step.dtype, call.tags[1])
    y = sequence_parallel.unflatten_all(y_MH, x, call.tokens)
    return y, None if parts.z is None else shaped(parts.z, x.shape)


class BlockCall(NamedTuple):
    """What one call of a block fixes. tags: the first slots in LAST_RUN of the layers, fc2's last.
    sinks: where the gradients of w1 and w2 go. save_x: as of autograd.linear.Call. codes: stand in
    for quantizing the parts of w1 and w2. lent: these parts and w2 are parameters of several ranks.
    """

    act: Activation
    settings: Settings
    dtype: torch.dtype
    tags: tuple[int, ...]
    sinks: tuple[WeightGradient | None, WeightGradient | None] = (None, None)
    save_x: bool = False
    codes: tuple[KeptWeight, ...] = ()
    lent: tuple[Lent, ...] = ()

    def inner(self) -> Call:
        """The same, as the steps of layernorm_mlp take it."""
        step = NormStep(None, False, self.dtype)
        return Call(step, self.act, self.settings, False, (self.tags[0], self.tags[-1]))

    def record(self, gemm: int) -> None:
        """Note that the GEMM of the first layer was that of its siblings too."""
        first, *others = self.tags[:-1]
        ran = LAST_RUN.get(first + gemm) if first >= 0 else None
        for tag in others:
            if ran is not None and tag >= 0:
                LAST_RUN[tag + gemm] = ran


def _makes_again(call: BlockCall, plan_a: linear_recipe.Input) -> bool:
    """Whether backward makes the columnwise codes of a again, of h: one more read of h against
    1.03 bytes an element kept. Compiled code, which keeps less of everything else, keeps them: the
    read is 1 % of a step. GELU inside a GEMM reads the sums before they are rounded to h, so its
    codes cannot be made again."""
    if torch.compiler.is_compiling() or call.act.gelu_form is not None:
        return False
    return not plan_a.keep and bool(plan_a.target.col)


def _quantized(
    x: Tensor, parts: Sequence[Any], plan: linear_recipe.Input, settings: Settings, need_dx: bool,
    kept: KeptWeight | None = None,
) -> tuple[Quantized, Operand, Operand | None]:  # fmt: skip
    """x and w1; x perhaps by whoever made it, or by a sibling. Without columnwise codes where
    `source_of` has what to make them of."""
    q = input_cache.find(x, plan.target)
    if q is None and source_of(x) is not None:
        q = input_cache.find(x, plan.target._replace(col=""))
    if q is None and kept is None and len(parts) == 1:
        return linear_recipe.input_and_weight(x, plan, None, parts[0], settings, need_dx)
    q = q or linear_recipe.quantized_input(x, plan)
    return q, *operands(kept, parts, settings, need_dx)


class MLPBlockFunction(torch.autograd.Function):
    """y of x, w2, b2, the call, and weight and bias of every part of w1; gradients have the dtypes
    of what they belong to."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w2: Tensor, b2: Tensor | None, call: BlockCall, *first: Tensor | None
    ) -> tuple[Tensor, ...]:
        need = _needs(ctx)
        settings = call.settings
        parts: Sequence[Any] = first[::2]
        if call.lent:
            *parts, w2 = [one.local for one in call.lent]
        kept1, kept2 = of_codes(call.codes, settings)
        b1 = joined(first[1::2])
        plan_x = linear_recipe.plan_input(x.device, settings, need.dw1, call.save_x)
        plan_a = linear_recipe.plan_input(x.device, settings, need.dw2)
        again = _makes_again(call, plan_a)
        if again:
            plan_a = plan_a._replace(target=plan_a.target._replace(col=""))
        q, w1_row, w1_col = _quantized(x, parts, plan_x, settings, need.dx, kept1)
        w2_row, w2_col = linear_recipe.weight_operands(kept2, w2, settings, need.dh)
        assert q.row is not None
        inner = call.inner()
        h, a, qa = activated(q.row, w1_row, b1, inner, plan_a, need.dh or again)
        call.record(FPROP)
        assert qa.row is not None
        y_MN = linear_recipe.fprop(qa.row, w2_row, b2, settings, call.dtype, call.tags[-1])

        kept_w1, own = kept_of((w1_row, w1_col), parts, settings, need.dx, call.codes)
        kept_w2, (own_w2,) = kept_of((w2_row, w2_col), [w2], settings, need.dh)
        kept_a = plan_a.kept(qa, a, need.dw2 and not again)
        source = None
        if need.dw1 and plan_x.target.col and q.col is None:
            source = source_of(x)
            assert source is not None
        kept_x = plan_x.kept(q, x, need.dw1 and source is None)
        kept = kept_x, kept_w1, kept_a, kept_w2
        made_of = (None, None, None) if source is None else source.tensors
        ctx.norm = None if source is None else source.step
        ctx.kept, ctx.again = [one.beside for one in kept], again
        ctx.call, ctx.sinks = call, call.sinks
        ctx.like, ctx.rows = (x.shape, x.dtype), [part.shape[0] for part in parts]
        ctx.dtypes = parts[0].dtype, None if b1 is None else b1.dtype, w2.dtype
        ctx.b2_dtype = None if b2 is None else b2.dtype
        saved_h = h if need.dh or again else None
        tensors = [t for one in kept for t in one.tensors]
        return outputs(ctx, (saved_h, *tensors, *made_of, own_w2, *own), unflatten(y_MN, x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = run_backward(_block_backward, "te_mx: a fused MLP block", ctx, *grads)
        return _lent_gradients(ctx.call.lent, made) if ctx.call.lent else made


def _lent_gradients(
    lent: Sequence[Lent], made: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """What backward gives, for parameters of several ranks."""
    dx, dw2, db2, _, *first = made
    first[::2] = [one.whole(dw) for one, dw in zip(lent, first[::2], strict=False)]
    return dx, lent[-1].whole(dw2), db2, None, *first


class _Needs(NamedTuple):
    """Which gradients are asked for."""

    dx: bool
    dw1: bool
    db1: bool
    dw2: bool
    db2: bool

    @property
    def dh(self) -> bool:
        return self.dx or self.dw1 or self.db1


def _needs(ctx: Any) -> _Needs:
    x, w2, b2, _, *first = ctx.needs_input_grad
    return _Needs(x, any(first[::2]), any(first[1::2]), w2, b2)


def _block_backward(ctx: Any, saved: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor | None, ...]:
    need, call = _needs(ctx), ctx.call
    settings, inner = call.settings, call.inner()
    h, made_of, (own_w2, *own) = saved[0], saved[13:16], saved[16:]
    kept_x, kept_w1, kept_a, kept_w2 = (
        one.with_tensors(saved[i : i + 3]) for one, i in zip(ctx.kept, (1, 4, 7, 10), strict=True)
    )
    w1_dtype, b1_dtype, w2_dtype = ctx.dtypes
    dx = dw1 = db1 = dw2 = db2 = None

    gradient = linear_recipe.quantized_gradient(flatten(g), settings, need.dh, need.dw2, need.db2)
    if need.dw2:
        if ctx.again:
            kept_a = _made_again(call, h)
        wgrad = linear_recipe.wgrad(gradient, kept_a, settings, tag_of(call.tags[-1], WGRAD))
        dw2 = place(call.sinks[1], wgrad, w2_dtype)
    if need.db2:
        db2 = gradient.q.col_sum.to(ctx.b2_dtype)  # type: ignore[union-attr]
    if need.dh:
        if own_w2 is not None:
            kept_w2 = Kept.itself(own_w2)
        wanted = need.dx, need.dw1, need.db1
        dh, sums = through_activation(inner, gradient, kept_w2, h, wanted)
        del gradient, kept_a, kept_w2
        if need.db1:
            db1 = sums.to(b1_dtype)
    if need.dx:
        if own[0] is not None:
            kept_w1 = kept_again(own, call.codes, settings)
        tag = tag_of(call.tags[0], DGRAD)
        dx = shaped(linear_recipe.dgrad(dh, kept_w1, settings, ctx.like[1], tag).out, ctx.like[0])
        call.record(DGRAD)
        del kept_w1
    if need.dw1:
        if ctx.norm is not None:
            plan_x = linear_recipe.plan_input(h.device, settings, True)
            kept_x = Kept.operand(Source(made_of, ctx.norm).columns(plan_x.target))  # type: ignore[arg-type]
        wgrad = linear_recipe.wgrad(dh, kept_x, settings, tag_of(call.tags[0], WGRAD))
        dw1 = place(call.sinks[0], wgrad, w1_dtype)
        call.record(WGRAD)
    first = split_gradients(ctx.rows, dw1, db1, ctx.needs_input_grad[4:])
    return dx, dw2, db2, None, *first


def _made_again(call: BlockCall, h: Tensor) -> Kept:
    """The columnwise codes of a, as forward would have made them."""
    plan = linear_recipe.plan_input(h.device, call.settings, True)
    target = Target("", plan.target.col, plan.target.rule)
    made = act_quantize_2d(ActStep(h, None, call.act, call.dtype, False, target)).quantized.col
    assert made is not None
    return Kept.operand(made)


def mlp_block(
    x: Tensor, first: Sequence[Tensor | None], w2: Tensor, b2: Tensor | None, call: BlockCall
) -> Tensor:
    """y [..., N] of x [..., H] in MXFP8, differentiable; `first` has weight and bias of each part
    of w1."""
    tensors = (x, w2, b2, *first)
    if needs_gradient(*tensors):
        return MLPBlockFunction.apply(x, w2, b2, call, *first)[0]
    settings = call.settings
    plan = linear_recipe.plan_input(x.device, settings, False)
    parts: Any = first[::2]
    if len(parts) > 1 and not surely(x.numel() >= parts[0].numel()):
        qa = _activated_apart(x, parts, first[1::2], plan, call)
    else:
        kept1, _ = of_codes(call.codes, settings)
        q, w1_row, _ = _quantized(x, parts, plan, settings, False, kept1)
        assert q.row is not None
        _, _, qa = activated(q.row, w1_row, joined(first[1::2]), call.inner(), plan, False)
        call.record(FPROP)
    w2_row, _ = linear_recipe.weight_operands(
        call.codes[-1] if call.codes else None, w2, settings, False
    )
    assert qa.row is not None
    return unflatten(
        linear_recipe.fprop(qa.row, w2_row, b2, settings, call.dtype, call.tags[-1]), x
    )


def _activated_apart(
    x: Tensor, parts: Sequence[Tensor], biases: Sequence[Tensor | None], plan: linear_recipe.Input,
    call: BlockCall,
) -> Quantized:  # fmt: skip
    """a, quantized, of few tokens: weights that are larger than x are not joined, but what they
    make."""
    settings = call.settings
    q = linear_recipe.quantized_input(x, plan)
    assert q.row is not None
    made = []
    for i, (weight, bias) in enumerate(zip(parts, biases, strict=True)):
        kept = call.codes[i] if call.codes else None
        row, _ = linear_recipe.weight_operands(kept, weight, settings, False)
        made.append(linear_recipe.fprop(q.row, row, bias, settings, call.dtype, call.tags[i]))
    h = torch.cat(made, 1)
    step = ActStep(h, None, call.act, call.dtype, False, plan.target)
    return act_quantize_2d(step).quantized
