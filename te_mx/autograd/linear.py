"""The autograd function behind te_mx.Linear: the steps of autograd/steps.py, once forward and once
back.

x and g are read once: one quantize call makes all the directions that the call needs, and that of g
also sums the bias gradient. Saved for backward are the columnwise codes and scales of x, 1.03 bytes
an element in MXFP8, and w itself, which backward quantizes again; or what the recipe says instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Operand
from te_mx.autograd import (
    input_cache,
    one_call,
    one_call_codes,
    other_tokens,
    steps,
)
from te_mx.autograd.backward import outputs, place, run_backward, tag_of
from te_mx.autograd.dgrad_accumulation import Pass, entered, leaves_when_hooked, passed_on, total
from te_mx.autograd.lent import Lent, here
from te_mx.autograd.other_tokens import Tokens
from te_mx.autograd.saved import Kept
from te_mx.autograd.shapes import flatten, shaped
from te_mx.autograd.steps import DGRAD, WGRAD
from te_mx.autograd.steps_kept import KeptWeight, on_codes
from te_mx.autograd.wgrad import WeightGradient
from te_mx.recipes.settings import Settings
from te_mx.runtime.ran import LAST_RUN


class Call(NamedTuple):
    """What one call of the module fixes.

    `kept` stands in for quantizing the weight. `save_x` saves x for backward instead of its
    columnwise codes, with the same result. `sink` says where the weight gradient goes. With
    `tokens` x is what one rank has of the input, with `lent` a parameter of several of them is the
    weight. With a `tag` the kernels that run are recorded in te_mx.runtime.ran.LAST_RUN at tag,
    tag + 1 and tag + 2: fprop, dgrad and wgrad.
    """

    settings: Settings
    out_dtype: torch.dtype
    tag: int = -1
    kept: KeptWeight | None = None
    save_x: bool = False
    sink: WeightGradient | None = None
    tokens: Tokens | None = None
    lent: Lent | None = None


@leaves_when_hooked
class LinearFunction(torch.autograd.Function):
    """y = x @ w^T + bias; gradients have the dtypes of what they belong to."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: Call
    ) -> tuple[Tensor, ...]:
        need_dx, need_dw = ctx.needs_input_grad[:2]
        settings, tokens = call.settings, call.tokens
        ctx.lent, weight_NK = call.lent, here(weight_NK, call.lent)
        plan = other_tokens.plan_input(x, settings, need_dw, call.save_x, tokens)
        q, w_row, w_col = steps.input_and_weight(x, plan, call.kept, weight_NK, settings, need_dx)
        x_row = other_tokens.rows_of_all(q.row, tokens)
        like = x if tokens is None else None
        y = steps.fprop(x_row, w_row, bias_N, settings, call.out_dtype, call.tag, like)
        x_kept = plan.kept(q, x, need_dw)
        w_kept = steps.kept_for_dgrad(w_row, w_col, weight_NK, settings, need_dx)
        ctx.settings, ctx.tag, ctx.tokens, ctx.sinks = settings, call.tag, tokens, (call.sink,)
        ctx.x_shape = other_tokens.shape_of_all(x, tokens)
        ctx.kept = x_kept.beside, w_kept.beside
        ctx.dtypes = x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype
        ctx.siblings = input_cache.siblings_of(x, ctx) if need_dx and tokens is None else None
        if tokens is not None:
            y = other_tokens.unflatten_all(y, x, tokens)
        return outputs(ctx, (*x_kept.tensors, *w_kept.tensors), y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = run_backward(_backward, "te_mx.Linear", ctx, *grads)
        return made if ctx.lent is None else (made[0], ctx.lent.whole(made[1]), *made[2:])


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    x_kept, w_kept = ctx.kept
    x_kept = other_tokens.kept_of_all(x_kept.with_tensors(saved[:3]), ctx.tokens)
    kept = x_kept, w_kept.with_tensors(saved[3:])
    how = Backward(
        ctx.settings, ctx.tag, ctx.x_shape, ctx.dtypes, ctx.sinks[0], entered(ctx.siblings)
    )
    need = ctx.needs_input_grad
    made = None if ctx.tokens is not None else one_call_codes.gradients(how, kept, grad, need)
    dx, *others = made or gradients(how, kept, grad, need)
    if dx is not None:
        dx = other_tokens.sum_of_mine(dx, ctx.tokens)
    return dx, *others, None


class Backward(NamedTuple):
    """What a backward pass knows beside tensors: dtypes are those of x, weight and bias; `among`:
    the layers that its dx adds up with."""

    settings: Settings
    tag: int
    x_shape: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    sink: WeightGradient | None = None
    among: Pass | None = None


def gradients(
    how: Backward, kept: tuple[Kept, Kept], grad: Tensor, need: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw and db, as far as they are needed, from what was kept of x and w."""
    need_dx, need_dw, need_db = need[:3]
    settings, tag = how.settings, how.tag
    x_dtype, w_dtype, bias_dtype = how.dtypes
    dx = dw_NK = db_N = None
    gradient = steps.quantized_gradient(
        flatten(grad), settings, need_dx, need_dw, need_db, bias_dtype or torch.float32
    )
    if need_db:
        assert gradient.q.col_sum is not None and bias_dtype is not None
        db_N = gradient.q.col_sum.to(bias_dtype)
    if need_dx:
        before = total(how.among)
        dx_MK = steps.dgrad(
            gradient, kept[1], settings, x_dtype, tag_of(tag, DGRAD),
            add_to=None if before is None else flatten(before),
        ).out  # fmt: skip
        dx = passed_on(how.among, shaped(dx_MK, how.x_shape))
    if need_dw:
        wgrad = steps.wgrad(gradient, kept[0], settings, tag_of(tag, WGRAD))
        dw_NK = place(how.sink, wgrad, w_dtype)
    return dx, dw_NK, db_N


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: Call) -> Tensor:
    """x [..., K] -> [..., N], differentiable. Without anything to differentiate, rowwise operands
    are all that is made; a parameter that is lent needs that."""
    if torch.is_grad_enabled() and (
        x.requires_grad or weight_NK.requires_grad or (bias_N is not None and bias_N.requires_grad)
    ):
        kernel = None
        if call.tokens is None:
            kernel = one_call.kernel_of(x, here(weight_NK, call.lent), bias_N, call)
        if kernel is not None:
            return one_call.OneCallLinear.apply(x, weight_NK, bias_N, call, kernel)[0]
        return LinearFunction.apply(x, weight_NK, bias_N, call)[0]
    settings = call.settings
    if call.kept is None and call.tokens is None:
        made = one_call.infer_in_one_call(x, weight_NK, bias_N, settings, call.out_dtype)
        if made is not None:
            if call.tag >= 0:
                LAST_RUN[call.tag] = made[1]
            return made[0]
    row, _ = steps.weight_operands(call.kept, weight_NK, settings, False)
    return infer(x, row, bias_N, settings, call)


def linear_on_codes(x: Tensor, w_row: Operand, bias_N: Tensor | None, call: Call) -> Tensor:
    """x [..., K] -> [..., N] on a weight of which only plain rowwise codes are left, differentiable
    in x and the bias."""
    wanted = x.requires_grad or (bias_N is not None and bias_N.requires_grad)
    if not (torch.is_grad_enabled() and wanted):
        return infer(x, w_row, bias_N, call.settings, call)
    settings = on_codes(call.settings)
    kept = KeptWeight(settings, w_row, None)
    # The codes in the place of the weight have no gradient, and nothing reads them there.
    call = call._replace(settings=settings, kept=kept)
    return LinearFunction.apply(x, w_row.codes, bias_N, call)[0]


def infer(
    x: Tensor, w_row: Operand, bias_N: Tensor | None, settings: Settings, call: Call
) -> Tensor:
    """x [..., K] -> [..., N] on a quantized weight, without autograd."""
    plan = other_tokens.plan_input(x, settings, False, False, call.tokens)
    x_row = other_tokens.rows_of_all(steps.quantized_input(x, plan).row, call.tokens)
    y_MN = steps.fprop(x_row, w_row, bias_N, settings, call.out_dtype, call.tag)
    return other_tokens.unflatten_all(y_MN, x, call.tokens)
