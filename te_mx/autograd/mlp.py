"""The autograd function behind the MLP blocks of other libraries' models that are fused where they
stand (te_mx/fusion/fused_mlp.py): act(x @ w1^T) @ w2^T, where w1 is one parameter, or those of the
gate and of the up projection, one behind the other.

Shapes: M tokens, H in_features, F columns of the activation's result, F1 = 2F for gated
activations, else F, N out_features.

    fc1    h[M, F1] = x @ w1[F1, H]^T + b1          one GEMM, also where w1 is two parameters
    act    a[M, F]  = act(h)                        fp32, rounded to the output's dtype
    fc2    y[M, N]  = a @ w2[N, F]^T + b2
    back   da = g @ w2, dh = da * act'(h), dx = dh @ w1, dw2 = g^T @ a, dw1 = dh^T @ x

What is rounded where is as in autograd/layer.py, whose steps these are. Saved for backward:
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

from te_mx._ops import Operand, Quantized, Target
from te_mx._ops.fused import act_quantize_2d
from te_mx.autograd import (
    input_cache,
    linear_recipe,
)
from te_mx.autograd.grad_target import WeightGradient
from te_mx.autograd.layer import Call, activated, through_activation
from te_mx.autograd.linear import Lent
from te_mx.autograd.linear_recipe import (
    DGRAD,
    FPROP,
    WGRAD,
    KeptWeight,
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
    """Whether backward makes the columnwise codes of a again, of h. GELU inside a GEMM reads the
    sums before they are rounded to h, so its codes cannot be made again."""
    again = call.act.gelu_form is None and linear_recipe.makes_again(call.settings)
    return again and not plan_a.keep and bool(plan_a.target.col)


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
