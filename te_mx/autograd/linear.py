"""The autograd functions behind te_mx.Linear: the steps of autograd/linear_recipe.py once forward
and once back, or, where the device has a kernel for it, one native call each way.

x and g are read once: one quantize call makes all the directions that the call needs, and that of g
also sums the bias gradient. Saved for backward are the columnwise codes and scales of x, 1.03 bytes
an element in MXFP8, and w itself, which backward quantizes again; or what the recipe says instead.

The one call runs the same kernels on the same bytes in the same order as the steps; only the host
does less. The weight is quantized in the call, or was before (for micro-batches, or because it
stands still). Its gradient goes back to autograd or into main_grad in the same call. For every
other place that a WeightGradient knows (later, parameters of several ranks) it is a second call, on
columns of the output gradient that the first one leaves. Of a weight of which only plain rowwise
codes are left, the values of the codes stand for the weight.

A parameter of which this rank has a part is given as such (`Lent`): the function reads what is
here, and makes of the gradient of that one of the parameter."""

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from te_mx._ops import Operand, dequantize_2d
from te_mx._ops.library import are_direct, facts_of, has_memory, is_direct, is_watched
from te_mx._ops.linear import infer as infer_in_one_call
from te_mx._ops.linear import linear_kernel_of
from te_mx.autograd import input_cache, layer, linear_recipe, sequence_parallel
from te_mx.autograd.grad_target import WeightGradient, Wgrad
from te_mx.autograd.input_cache import Pass, entered, passed_on, total
from te_mx.autograd.linear_recipe import (
    DGRAD,
    WGRAD,
    QuantizedWeight,
    by_steps,
    columns_now,
    in_one_call,
    on_codes,
    quantized_columns,
)
from te_mx.autograd.node import NO_LINK, apply_below, linked, outputs, place, run_backward, tag_of
from te_mx.autograd.norm import NormStep
from te_mx.autograd.saved import NOTHING, SavedOperand, flatten, shaped
from te_mx.autograd.sequence_parallel import Tokens
from te_mx.dispatch.kernels import derive, derived
from te_mx.dispatch.linear import LATER, Dtypes, Held, LinearPlan, LinearProblem, Part
from te_mx.recipes.settings import Settings

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Lent(Protocol):
    """A parameter; te_mx.distributed knows what kind of one."""

    @property
    def parameter(self) -> Any:
        """Itself."""

    @property
    def local(self) -> Tensor:
        """What is here, a plain tensor without history."""

    def whole(self, grad: Tensor | None) -> Any:
        """The gradient of the parameter, of that of `local`."""


def here(parameter: Any, lent: Lent | None) -> Any:
    """What steps read of a parameter."""
    return parameter if lent is None else lent.local


_known = derived()
NO_WEIGHTS = layer.Weights()


def _steps_of(call: "Call") -> layer.Call:
    """A call as layers know it."""
    # By the identity of the settings, which lives as long as the entry: a hash costs more.
    key = "steps", id(call.settings), call.out_dtype, call.tag
    found = _known.get(key)
    if found is None:
        step = NormStep(None, False, call.out_dtype)
        found = derive(key, layer.Call(step, None, call.settings, tags=(call.tag, -1)))
    made: layer.Call = found
    return made


def plan_of(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: "Call", facts: Any = None
) -> LinearPlan | None:
    """The plan that runs a call each way, or None; found at once where it ran one like it. facts:
    what stands for those of the three tensors, if known."""
    settings, out_dtype, _, ready, save_x, _, tokens, lent = call
    need_dx, need_dw = x.requires_grad, weight_NK.requires_grad
    if lent is not None:
        weight_NK, facts = lent.local, None
    if not (need_dx or need_dw) or tokens is not None or is_watched():
        return None
    columns, w_kept, specs = need_dw and not save_x, need_dx, None
    if ready is not None:
        row, col = ready.row, ready.col
        specs = row.spec, row.codes.device, None if col is None else col.spec
    elif need_dx and (settings.keep_columns or not weight_NK.is_leaf):
        w_kept = columns_now(weight_NK, settings, True)
    else:
        w_kept = False
    # By the identity of the settings, which lives as long as the entry: a hash costs more.
    key = (
        "one call", id(settings), out_dtype, columns, w_kept, specs,
        facts or facts_of(x, weight_NK, bias_N),
    )  # fmt: skip
    found = _known.get(key)
    if found is None:
        plan = None
        (n, k), size = weight_NK.shape, x.numel()
        if are_direct(x, weight_NK, bias_N) and n and size:
            dtypes = Dtypes(
                x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype, out_dtype
            )
            need_db = bias_N is not None and bias_N.requires_grad
            problem = LinearProblem(
                size // k, n, k, columns, need_dx, w_kept, settings, dtypes, x.shape, need_db
            )
            plan = plan_for(problem, x.device, specs)
        found = derive(key, (plan, settings))
    plan = found[0]
    return plan


def plan_for(problem: LinearProblem, device: torch.device, ready: Any = None) -> LinearPlan | None:
    """The plan of layers of one size. ready: specs of the operands of a
    weight that was quantized before, of which the second may be None, around their device."""
    m, n, k, _, need_dx, _, settings, dtypes, *_ = problem
    if not in_one_call(settings):
        return None
    kernel = linear_kernel_of((m, n, k), device, dtypes.x, settings)
    if kernel is None:
        return None
    plan: LinearPlan = kernel.plan(problem)
    if ready is not None:
        row, there, col = ready
        fits = col == plan.w_col or (col is None and not need_dx)
        if row != plan.w_row or there != device or not fits:
            return None
    return plan


class OneCallLinear(torch.autograd.Function):
    """y = x @ w^T + bias, as LinearFunction."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: "Call",
        plan: LinearPlan,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        settings, _, tag, ready, save_x, grad_target, _, lent = call
        if lent is not None:
            weight_NK = lent.local
        _, _, _, columns, need_dx, w_kept, *_ = plan.problem
        shared, given = input_cache.is_open(), None
        if shared:
            given = _given(x, plan, settings.scale_rule, columns)
        row = None if ready is None else ready.row
        y, x_row, x_col, w_col = plan.forward(x, weight_NK, bias_N, given, row, shared, tag)
        if shared and given is None:
            input_cache.put_held(x, plan, settings.scale_rule, Held(x_row, x_col))
        ctx.siblings = input_cache.siblings_of(x, ctx) if shared and need_dx else None
        ctx.how, ctx.grad_targets = (call, plan), (grad_target,)
        first = scales = w = None
        if columns:
            assert x_col is not None
            first, scales = x_col
        elif save_x and ctx.needs_input_grad[1]:
            first = x
        if not w_kept:
            w = weight_NK if need_dx else None
        elif ready is None:
            w = w_col
        return linked(ctx, (first, scales, w), NO_LINK.detach(), y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = run_backward(_fused_backward, "te_mx.Linear", ctx, *grads)
        lent = ctx.how[0].lent
        return made if lent is None else (made[0], lent.whole(made[1]), *made[2:])


_run = apply_below(OneCallLinear)


def _given(x: Tensor, plan: LinearPlan, rule: str, need_dw: bool) -> Held | None:
    """The operands of x, where a layer before made them."""
    col = plan.col if need_dw else ""
    entry = input_cache.entry_for(x, plan.row, col, rule)
    return None if entry is None else entry.for_one_call()


def _fused_backward(
    ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    plan: LinearPlan
    (call, plan), (first, scales, w) = ctx.how, tensors
    p, ready, x = plan.problem, call.kept, None
    x_col: Part | None = (first, scales) if p.x_columns else None
    w_col: Part | None = None
    if first is not None and x_col is None:
        # Its columns are made now, in what the product takes.
        x = first
        made_of = quantized_columns(x, "x", p.settings) if is_direct(x) else None
        plan = plan.kernel.plan(p._replace(x_columns=True))
        x_col = None if made_of is None or made_of.spec != plan.col else made_of[:2]
    if p.w_kept and ready is not None:
        (x_col, _), w_col = plan.as_saved(x_col, None), ready.col[:2]
    else:
        x_col, w_col = plan.as_saved(x_col, (w, None) if p.w_kept else None)
    among = None if ctx.siblings is None else entered(ctx.siblings)
    if (x is None or x_col is not None) and are_direct(grad, *tensors):
        before = None if among is None else among.total
        used: Any = w if w_col is None else w_col
        if call.grad_target is None:
            made = plan.backward(grad, x_col, used, before, None, call.tag)
        else:
            made = _backward_into(ctx, plan, grad, x_col, used, before)
        if made is not None:
            dx, dw, db = made
            return dx if among is None else passed_on(among, dx), dw, db, None, None
    # Step by step, through the ops, for somebody who watches them.
    x_kept = w_of = NOTHING
    if x is not None:
        x_kept = SavedOperand.itself(x)
    elif x_col is not None:
        operand = plan.quantized(Held(x_col, x_col)).col
        assert operand is not None
        x_kept = SavedOperand.operand(operand)
    if w_col is not None:
        w_of = SavedOperand.operand(plan.w_columns(w_col))
    elif w is not None:
        w_of = SavedOperand.itself(w)
    how = Backward(p.settings, call.tag, p.x_shape, p.dtypes[:3], call.grad_target, among)
    return *gradients(how, (x_kept, w_of), grad, ctx.needs_input_grad), None, None


def _backward_into(
    ctx: Any, plan: LinearPlan, grad: Tensor, x_col: Part | None, w: Any, before: Tensor | None
) -> Gradients | None:
    """`LinearPlan.backward`, dw where its grad_target says; None where the steps have to run."""
    call, direct, into = ctx.how[0], None, None
    grad_target, tag = call.grad_target, call.tag
    node = ctx.next_functions[1][0] if call.lent is None else None  # of the weight in the graph
    if x_col is not None:
        direct = grad_target.direct(node)
        into = LATER if direct is None else direct[0]
    made = plan.backward(grad, x_col, w, before, into, tag)
    if made is None:
        return None
    dx, dw, db = made
    if direct is not None:
        dw = grad_target.done(*direct)
    elif dw is not None and x_col is not None:
        wgrad = Wgrad(partial(plan.wgrad, dw, x_col, tag=tag), ())  # whose operands are there
        dw = grad_target.take(wgrad, plan.problem.dtypes.w, node)
    return dx, dw, db


def gradients_on_codes(
    how: Any, kept: tuple[SavedOperand, SavedOperand], grad: Tensor, need: tuple[bool, ...]
) -> Gradients | None:
    """As `autograd.linear.gradients` (how: its Backward); None where that has to run."""
    settings, (x_kept, w_kept) = how.settings, kept
    if not (settings.one_copy and w_kept.spec and need[0]) or how.grad_target is not None:
        return None
    if not (by_steps(settings) and settings.is_uniform) or not is_direct(grad, *_tensors(kept)):
        return None
    row = w_kept.as_operand()
    if row.format.is_square or settings.weight_columns_rule != settings.scale_rule:
        return None
    n, k = row.rows, row.k
    m, device, x_dtype = grad.numel() // n if n else 0, grad.device, how.dtypes[0]
    if row.codes.device != device:
        return None
    kernel = linear_kernel_of((m, n, k), device, x_dtype, settings)
    if kernel is None:
        return None
    _, w_dtype, bias_dtype = how.dtypes
    dtypes = Dtypes(x_dtype, w_dtype if need[1] else x_dtype, bias_dtype, x_dtype)
    plan = kernel.plan(
        LinearProblem(m, n, k, need[1], True, False, settings, dtypes, how.x_shape, need[2])
    )
    x_col = _columns(x_kept, plan, settings) if need[1] else None
    if need[1] and x_col is None:
        return None
    w_NK = dequantize_2d(row, row.format.exact_dtype)
    made = plan.backward(grad, x_col, w_NK, total(how.among), tag=how.tag)
    if made is None:
        return None
    return passed_on(how.among, made[0]), *made[1:]


def _tensors(kept: tuple[SavedOperand, SavedOperand]) -> list[Tensor]:
    return [t for one in kept for t in one.tensors if t is not None]


def _columns(kept: SavedOperand, plan: LinearPlan, settings: Any) -> Part | None:
    """The columnwise operand of an input as a plan reads it; None where there is another one."""
    operand = kept.as_operand() if kept.spec else quantized_columns(kept.tensor, "x", settings)
    if operand.spec != plan.col:
        return None
    return plan.as_saved((operand.codes, operand.scales), None)[0]


class Call(NamedTuple):
    """What one call of the module fixes.

    `kept` stands in for quantizing the weight. `save_x` saves x for backward instead of its
    columnwise codes, with the same result. `grad_target` says where the weight gradient goes. With
    `tokens` x is what one rank has of the input, with `lent` a parameter of several of them is the
    weight. With a `tag` the kernels that run are recorded in LAST_RUN of runtime/kernel_log.py at
    tag, tag + 1 and tag + 2: fprop, dgrad and wgrad."""

    settings: Settings
    out_dtype: torch.dtype
    tag: int = -1
    kept: QuantizedWeight | None = None
    save_x: bool = False
    grad_target: WeightGradient | None = None
    tokens: Tokens | None = None
    lent: Lent | None = None


class LinearFunction(torch.autograd.Function):
    """y = x @ w^T + bias; gradients have the dtypes of what they belong to."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: Call
    ) -> tuple[Tensor, ...]:
        need_dx, need_dw = ctx.needs_input_grad[:2]
        settings, tokens = call.settings, call.tokens
        ctx.lent, weight_NK = call.lent, here(weight_NK, call.lent)
        plan = sequence_parallel.plan_input(x, settings, need_dw, call.save_x, tokens)
        q, w_row, w_col = linear_recipe.input_and_weight(
            x, plan, call.kept, weight_NK, settings, need_dx
        )
        x_row = sequence_parallel.rows_of_all(q.row, tokens)
        like = x if tokens is None else None
        y = linear_recipe.fprop(x_row, w_row, bias_N, settings, call.out_dtype, call.tag, like)
        x_kept = plan.kept(q, x, need_dw)
        w_kept = linear_recipe.kept_for_dgrad(w_row, w_col, weight_NK, settings, need_dx)
        ctx.settings, ctx.tag, ctx.tokens, ctx.grad_targets = (
            settings, call.tag, tokens, (call.grad_target,),
        )  # fmt: skip
        ctx.x_shape = sequence_parallel.shape_of_all(x, tokens)
        ctx.kept = x_kept.beside, w_kept.beside
        ctx.dtypes = x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype
        ctx.siblings = input_cache.siblings_of(x, ctx) if need_dx and tokens is None else None
        if tokens is not None:
            y = sequence_parallel.unflatten_all(y, x, tokens)
        return outputs(ctx, (*x_kept.tensors, *w_kept.tensors), y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = run_backward(_backward, "te_mx.Linear", ctx, *grads)
        return made if ctx.lent is None else (made[0], ctx.lent.whole(made[1]), *made[2:])


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    x_kept, w_kept = ctx.kept
    x_kept = sequence_parallel.kept_of_all(x_kept.with_tensors(saved[:3]), ctx.tokens)
    kept = x_kept, w_kept.with_tensors(saved[3:])
    how = Backward(
        ctx.settings, ctx.tag, ctx.x_shape, ctx.dtypes, ctx.grad_targets[0], entered(ctx.siblings)
    )
    need = ctx.needs_input_grad
    made = None if ctx.tokens is not None else gradients_on_codes(how, kept, grad, need)
    dx, *others = made or gradients(how, kept, grad, need)
    if dx is not None:
        dx = sequence_parallel.sum_of_mine(dx, ctx.tokens)
    return dx, *others, None


class Backward(NamedTuple):
    """What a backward pass knows beside tensors: dtypes are those of x, weight and bias; `among`:
    the layers that its dx adds up with."""

    settings: Settings
    tag: int
    x_shape: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    grad_target: WeightGradient | None = None
    among: Pass | None = None


def gradients(
    how: Backward, kept: tuple[SavedOperand, SavedOperand], grad: Tensor, need: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw and db, as far as they are needed, from what was kept of x and w."""
    need_dx, need_dw, need_db = need[:3]
    settings, tag = how.settings, how.tag
    x_dtype, w_dtype, bias_dtype = how.dtypes
    dx = dw_NK = db_N = None
    gradient = linear_recipe.quantized_gradient(
        flatten(grad), settings, need_dx, need_dw, need_db, bias_dtype or torch.float32
    )
    if need_db:
        assert gradient.q.col_sum is not None and bias_dtype is not None
        db_N = gradient.q.col_sum.to(bias_dtype)
    if need_dx:
        before = total(how.among)
        dx_MK = linear_recipe.dgrad(
            gradient, kept[1], settings, x_dtype, tag_of(tag, DGRAD),
            add_to=None if before is None else flatten(before),
        ).out  # fmt: skip
        dx = passed_on(how.among, shaped(dx_MK, how.x_shape))
    if need_dw:
        wgrad = linear_recipe.wgrad(gradient, kept[0], settings, tag_of(tag, WGRAD))
        dw_NK = place(how.grad_target, wgrad, w_dtype)
    return dx, dw_NK, db_N


def linear(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: Call, facts: Any = None
) -> Tensor:
    """x [..., K] -> [..., N], differentiable. Without anything to differentiate, rowwise operands
    are all that is made; a parameter that is lent needs that. facts: as of `plan_of`."""
    enabled, uniform = torch.is_grad_enabled(), call.settings.is_uniform
    if enabled and uniform:
        plan = plan_of(x, weight_NK, bias_N, call, facts)
        if plan is not None and has_memory(x):
            y: Tensor = _run(x, weight_NK, bias_N, call, plan)[0]
            return y
    if enabled and (
        x.requires_grad or weight_NK.requires_grad or (bias_N is not None and bias_N.requires_grad)
    ):
        usual = call.tokens is None and call.lent is None and not call.save_x
        if usual and not (uniform or input_cache.is_open()):
            kept, target = call.kept, call.grad_target
            weights = NO_WEIGHTS
            if kept is not None or target is not None:
                weights = layer.Weights((kept, None), (target, None))
            how = _steps_of(call)
            made = layer.linear_in_one_call(x, weight_NK, bias_N, weights, how, facts)
            if made is not None:
                return made
        return LinearFunction.apply(x, weight_NK, bias_N, call)[0]
    settings = call.settings
    if call.kept is None and call.tokens is None:
        made = infer_in_one_call(x, weight_NK, bias_N, settings, call.out_dtype, call.tag)
        if made is not None:
            return made
    row, _ = linear_recipe.weight_operands(call.kept, weight_NK, settings, False)
    return infer(x, row, bias_N, settings, call)


def linear_on_codes(x: Tensor, w_row: Operand, bias_N: Tensor | None, call: Call) -> Tensor:
    """x [..., K] -> [..., N] on a weight of which only plain rowwise codes are left, differentiable
    in x and the bias."""
    wanted = x.requires_grad or (bias_N is not None and bias_N.requires_grad)
    if not (torch.is_grad_enabled() and wanted):
        return infer(x, w_row, bias_N, call.settings, call)
    settings = on_codes(call.settings)
    kept = QuantizedWeight(settings, w_row, None)
    # The codes in the place of the weight have no gradient, and nothing reads them there.
    call = call._replace(settings=settings, kept=kept)
    return LinearFunction.apply(x, w_row.codes, bias_N, call)[0]


def infer(
    x: Tensor, w_row: Operand, bias_N: Tensor | None, settings: Settings, call: Call
) -> Tensor:
    """x [..., K] -> [..., N] on a quantized weight, without autograd."""
    plan = sequence_parallel.plan_input(x, settings, False, False, call.tokens)
    x_row = sequence_parallel.rows_of_all(linear_recipe.quantized_input(x, plan).row, call.tokens)
    y_MN = linear_recipe.fprop(x_row, w_row, bias_N, settings, call.out_dtype, call.tag)
    return sequence_parallel.unflatten_all(y_MN, x, call.tokens)
