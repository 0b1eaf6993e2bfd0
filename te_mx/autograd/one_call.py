"""te_mx.Linear as one native call each way, where the device has a kernel for it: the same kernels
on the same bytes as autograd/linear.py, in the same order; only the host does less.

The weight is quantized in the call, or was before (for micro-batches, or because it stands still).
Its gradient goes back to autograd or into main_grad in the same call. For every other place that a
WeightGradient knows (later, parameters of several ranks) it is a second call, on columns of the
output gradient that the first one leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx._ops.library import is_direct
from te_mx._ops.linear import (
    LATER,
    Into,
    LinearKernel,
    LinearPlan,
    LinearProblem,
    Weight,
    linear_kernel,
)
from te_mx._ops.linear import infer as infer_in_one_call
from te_mx.autograd import input_cache
from te_mx.autograd.backward import outputs, place, run_backward
from te_mx.autograd.dgrad_accumulation import entered, leaves_when_hooked, passed_on, total
from te_mx.autograd.lent import here
from te_mx.autograd.saved import NOTHING, Kept
from te_mx.autograd.steps import DGRAD, WGRAD, columns_now, in_one_call, quantized_columns
from te_mx.autograd.wgrad import Wgrad
from te_mx.dispatch.linear import Held, Part
from te_mx.runtime.ran import LAST_RUN

__all__ = ["OneCallLinear", "infer_in_one_call", "kernel_of"]


def kernel_of(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: Any
) -> LinearKernel | None:
    """The kernel that takes a call (of autograd/linear.py), or None."""
    settings = call.settings
    if (
        not in_one_call(settings)
        or not (x.requires_grad or weight_NK.requires_grad)
        or (bias_N is not None and bias_N.device != x.device)
        or not is_direct(x, weight_NK, bias_N)
    ):
        return None
    kernel = linear_kernel(x, weight_NK, settings)
    if kernel is None or call.kept is None:
        return kernel
    row, col = call.kept.row, call.kept.col
    if (col is None and x.requires_grad) or row.codes.device != x.device or row.packed is not None:
        return None
    n, k = weight_NK.shape
    plan = kernel.plan(LinearProblem(x.numel() // k, n, k, False, False, False, settings))
    fits = row.spec == plan.w_row and (col is None or col.spec == plan.w_row)
    return kernel if fits else None


@leaves_when_hooked
class OneCallLinear(torch.autograd.Function):
    """y = x @ w^T + bias, as LinearFunction."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: Any,
        kernel: LinearKernel,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        need_dx, need_dw = ctx.needs_input_grad[:2]
        ctx.lent, weight_NK = call.lent, here(weight_NK, call.lent)
        (n, k), settings, ready = weight_NK.shape, call.settings, call.kept
        w_kept = need_dx if ready is not None else columns_now(weight_NK, settings, need_dx)
        columns = need_dw and not call.save_x
        problem = LinearProblem(x.numel() // k, n, k, columns, need_dx, w_kept, settings)
        ctx.problem, ctx.plan, ctx.tag = problem, (plan := kernel.plan(problem)), call.tag
        given = _given(x, plan, settings.scale_rule, columns)
        weight = None if ready is None else _weight(ready)
        y, held = plan.forward(x, weight_NK, bias_N, call.out_dtype, given, weight)
        if given is None:
            input_cache.put_held(x, plan, settings.scale_rule, held)
        if call.tag >= 0:
            LAST_RUN[call.tag] = plan.kernel
        ctx.x_shape, ctx.sinks = x.shape, (call.sink,)
        ctx.dtypes = x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype
        ctx.siblings = input_cache.siblings_of(x, ctx) if need_dx else None
        ctx.kernel, ctx.saves_x = kernel, need_dw and call.save_x
        x_col = (None, None) if not columns or held.x_col is None else held.x_col
        if ctx.saves_x:
            x_col = x, None
        w: tuple[Tensor | None, Tensor | None] = (weight_NK, None) if need_dx else (None, None)
        if w_kept:
            w = (held.w_col, None) if weight is None else weight.col  # type: ignore[assignment]
        return outputs(ctx, (*x_col, *w), y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = run_backward(_backward, "te_mx.Linear", ctx, *grads)
        return made if ctx.lent is None else (made[0], ctx.lent.whole(made[1]), *made[2:])


def _weight(ready: Any) -> Weight:
    """The operands of a weight that was quantized before."""
    row, col = ready.row, ready.col
    return Weight((row.codes, row.scales), None if col is None else (col.codes, col.scales))


def _given(x: Tensor, plan: LinearPlan, rule: str, need_dw: bool) -> Held | None:
    """The operands of x, where a layer before made them."""
    col = plan.col if need_dw else ""
    entry = input_cache.entry_for(x, plan.row, col, rule)
    return None if entry is None else entry.for_one_call()


def _backward(ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    plan: LinearPlan = ctx.plan
    tag: int = ctx.tag
    (sink,) = ctx.sinks
    saved: Part | None = None if tensors[0] is None else (tensors[0], tensors[1])
    w_kept, x = ctx.problem.w_kept, None
    if ctx.saves_x:
        # Its columns are made now, in what the product takes.
        x, plan = tensors[0], ctx.kernel.plan(ctx.problem._replace(x_columns=True))
        made_of = quantized_columns(x, "x", ctx.problem.settings) if is_direct(x) else None
        saved = None if made_of is None or made_of.spec != plan.col else made_of[:2]
    x_col, w_col = plan.as_saved(saved, (tensors[2], tensors[3]) if w_kept else None)
    w: Any = w_col if w_kept else tensors[2]
    held = [t for t in (*(x_col or ()), *(w_col or ()), tensors[2]) if t is not None]
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    among = entered(ctx.siblings)
    ready = x is None or x_col is not None
    if ready and is_direct(grad, *held) and all(t.device == grad.device for t in held):
        dtypes = x_dtype, w_dtype, bias_dtype if ctx.needs_input_grad[2] else None
        node = ctx.next_functions[1][0] if ctx.lent is None else None  # of the weight
        direct = None if sink is None or x_col is None else sink.direct(node)
        into = LATER if sink is not None and x_col is not None else None
        if direct is not None:
            into = Into(direct.out, direct.accumulate)
        made = plan.backward(grad, x_col, w, ctx.x_shape, dtypes, total(among), into)
        if made is not None:
            dx, dw, db = made
            if tag >= 0:
                if dx is not None:
                    LAST_RUN[tag + DGRAD] = plan.kernel
                if dw is not None:
                    LAST_RUN[tag + WGRAD] = plan.kernel
            if direct is not None:
                dw = direct.done()
            elif into is LATER:
                assert dw is not None and x_col is not None
                dw = place(sink, _later(plan, dw, x_col), w_dtype, node)
            return passed_on(among, dx), dw, db, None, None
    # Step by step, through the ops, for somebody who watches them.
    from te_mx.autograd.linear import Backward, gradients  # which calls this module

    x_kept = w_of = NOTHING
    if x is not None:
        x_kept = Kept.itself(x)
    elif x_col is not None:
        operand = plan.quantized(Held(x_col, x_col)).col
        assert operand is not None
        x_kept = Kept.operand(operand)
    if w_col is not None:
        w_of = Kept.operand(plan.w_columns(w_col))
    elif w is not None:
        w_of = Kept.itself(w)
    how = Backward(ctx.problem.settings, tag, ctx.x_shape, ctx.dtypes, sink, among)
    return *gradients(how, (x_kept, w_of), grad, ctx.needs_input_grad), None, None


def _later(plan: LinearPlan, g_col: Tensor, x_col: Part) -> Wgrad:
    """The product of a weight gradient, whose operands are there."""

    def run(out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
        return plan.wgrad(g_col, x_col, out, dtype, accumulate)

    return Wgrad(run, ())
