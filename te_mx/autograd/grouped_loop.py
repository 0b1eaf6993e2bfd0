"""Grouped linear layers group by group: for recipes whose backward pass is not three products of
quantized operands, and in high precision where weight gradients have a place of their own.

Shapes and parts as in autograd/grouped.py, steps of one group as in autograd/linear_recipe.py. The
weight gradients of all groups are one function of where they go, as of the grouped function."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Operand, convert_2d, plain, quantize_2d, quantized
from te_mx.autograd import high_precision, linear_recipe, weight_parts
from te_mx.autograd.grad_target import INPUT, OUTPUT_GRADIENT, GroupedWgrad, WeightGradient, Wgrad
from te_mx.autograd.linear_recipe import DGRAD, WGRAD, QuantizedWeight
from te_mx.autograd.node import outputs, place, run_backward, tag_of
from te_mx.autograd.saved import NOTHING, SavedOperand, flatten, shaped, unflatten
from te_mx.dispatch.groups import host_bounds, readable
from te_mx.layouts import spec_of

_ARGUMENTS = 3  # of the autograd function before the parameters


class GroupedCall(NamedTuple):
    """What one call of a grouped layer fixes. `settings`: None runs in high precision; `kept`, a
    QuantizedWeight, stands in for quantizing the weights; `tag` and `save_x` are as for
    autograd.linear.Call; `grad_target` takes the weight gradients."""

    capacity: int
    settings: Any
    out_dtype: torch.dtype
    has_bias: bool
    kept: Any = None
    tag: int = -1
    save_x: bool = False
    grad_target: WeightGradient | None = None


def split_parts(
    parts: Sequence[Tensor], has_bias: bool
) -> tuple[list[Tensor] | Tensor, Tensor | None]:
    """(the weight of every group, or all in one [G, N, K]; biases [G, N] or None)."""
    if parts[0].dim() == 3:
        return parts[0], parts[1] if has_bias else None
    count = len(parts) // 2 if has_bias else len(parts)
    return list(parts[:count]), weight_parts.stack(parts[count:]) if has_bias else None


def gradients_of(
    grad: Tensor | None, needed: Sequence[bool], stacked: bool
) -> tuple[Tensor | None, ...]:
    """The gradient of all groups as those of the parameters that need one."""
    if grad is None or stacked:
        return tuple(grad if need else None for need in needed)
    return tuple(g if need else None for g, need in zip(grad.unbind(0), needed, strict=False))


def bounds_of(offs: Tensor, capacity: int, rows: int) -> list[tuple[int, int]]:
    """(start, end) of every group.

    Raises:
        NotImplementedError: only the device knows them, or code is being compiled.
    """
    if not readable(offs):
        raise NotImplementedError(
            "te_mx.GroupedLinear: this recipe's backward runs group by group, which needs m_splits "
            "as a list or on the CPU, and no torch.compile; got splits that the host does not know"
        )
    return list(zip(*host_bounds(offs, capacity, rows), strict=True))


class GroupedLoopFunction(torch.autograd.Function):
    """y of x [..., K]; gradients have the dtypes of what they belong to."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, call: GroupedCall, bounds: Sequence[tuple[int, int]], *parts: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = split_parts(parts, call.has_bias)
        count = len(parts) // 2 if call.has_bias else len(parts)
        need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_ARGUMENTS:]
        need_dw, x_RK = any(need[:count]), flatten(x)
        made, saved, beside = [], [], []
        for i, (start, end) in enumerate(bounds):
            bias = None if biases is None else biases[i]
            group = _fprop(x_RK[start:end], weights[i], bias, i, call, need_dx, need_dw)
            made.append(group[0])
            saved += [*group[1].tensors, *group[2].tensors]
            beside.append((group[1].beside, group[2].beside))
        ctx.call, ctx.kept, ctx.x_like = call, beside, (x.shape, x.dtype)
        ctx.bounds, ctx.grad_targets = bounds, (call.grad_target,)
        ctx.stacked, ctx.dtypes = parts[0].dim() == 3, [p.dtype for p in parts]
        return outputs(ctx, saved, unflatten(gathered(made, bounds, x_RK.shape[0]), x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_loop_backward, "te_mx.GroupedLinear", ctx, *grads)


def _fprop(
    x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, i: int, call: GroupedCall,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, SavedOperand, SavedOperand]:  # fmt: skip
    """y of one group, and what is kept of x and of w."""
    settings = call.settings
    if settings is None:
        y = torch.nn.functional.linear(x_MK, w_NK, bias)
        x_kept = SavedOperand.itself(x_MK) if need_dw else NOTHING
        return y, x_kept, SavedOperand.itself(w_NK) if need_dx else NOTHING
    plan = linear_recipe.plan_input(x_MK.device, settings, need_dw, call.save_x)
    kept = None
    if call.kept is not None:
        row, col = call.kept.row, call.kept.col
        row = plain(row) if call.kept.own else row
        kept = QuantizedWeight(settings, row.group(i), None if col is None else col.group(i))
    w_row, w_col = linear_recipe.weight_operands(kept, w_NK, settings, need_dx)
    q = quantized(x_MK, plan.target)
    assert q.row is not None
    y = linear_recipe.fprop(q.row, w_row, bias, settings, call.out_dtype, call.tag)
    w_kept = linear_recipe.kept_for_dgrad(w_row, w_col, w_NK, settings, need_dx)
    return y, plan.kept(q, x_MK, need_dw), w_kept


def gathered(made: list[Tensor], bounds: Sequence[tuple[int, int]], rows: int) -> Tensor:
    """The rows of all groups, and zeros for rows of no group."""
    parts, at = [], 0
    for part, (start, end) in zip(made, bounds, strict=True):
        parts += [part.new_zeros(start - at, part.shape[1]), part] if start > at else [part]
        at = end
    if at < rows:
        parts.append(parts[-1].new_zeros(rows - at, parts[-1].shape[1]))
    return torch.cat(parts)


def _loop_backward(
    ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    call, dtypes = ctx.call, ctx.dtypes
    need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_ARGUMENTS:]
    count = len(dtypes) // 2 if call.has_bias else len(dtypes)
    need_dw, need_db = any(need[:count]), any(need[count:])
    g_RN = flatten(grad)
    rounded = _rounded(g_RN, call) if need_dx else None
    dx_groups: list[Tensor] = []
    wgrads: list[Wgrad] = []
    sums: list[Tensor] = []
    sixes = (tensors[i : i + 6] for i in range(0, len(tensors), 6))
    for (start, end), (x_kept, w_kept), saved in zip(ctx.bounds, ctx.kept, sixes, strict=True):
        x_kept, w_kept = x_kept.with_tensors(saved[:3]), w_kept.with_tensors(saved[3:])
        g_MN = g_RN[start:end]
        dx_dtype = ctx.x_like[1]
        if call.settings is None:
            if need_dx:
                dx_groups.append(high_precision.dgrad(g_MN, saved[3], dx_dtype))
            reads = (INPUT, saved[0]), (OUTPUT_GRADIENT, g_MN)
            wgrads.append(Wgrad(partial(high_precision.wgrad, g_MN, saved[0]), reads))
            if need_db:
                sums.append(high_precision.bias_gradient(g_MN, dtypes[-1]))
            continue
        codes_here = need_dx and rounded is None
        gradient = linear_recipe.quantized_gradient(
            g_MN, call.settings, codes_here, need_dw, need_db
        )
        if rounded is not None:
            row = rounded(start, end)
            gradient = gradient._replace(q=gradient.q._replace(row=row))
        if need_dx:
            tag = tag_of(call.tag, DGRAD)
            made = linear_recipe.dgrad(gradient, w_kept, call.settings, dx_dtype, tag)
            dx_groups.append(made.out)
        if need_dw:
            tag = tag_of(call.tag, WGRAD)
            wgrads.append(linear_recipe.wgrad(gradient, x_kept, call.settings, tag))
        if need_db:
            sums.append(gradient.q.col_sum)  # type: ignore[arg-type]

    dx = None
    if need_dx:
        dx = shaped(gathered(dx_groups, ctx.bounds, g_RN.shape[0]), ctx.x_like[0])
    dw = place(call.grad_target, _together(wgrads, ctx.stacked), dtypes[0]) if need_dw else None
    if dw is not None and not ctx.stacked:
        dw = dw.unflatten(0, (count, dw.shape[0] // count))
    db = torch.stack(sums).to(dtypes[-1]) if need_db else None
    weights = gradients_of(dw, need[:count], ctx.stacked)
    return dx, None, None, *weights, *gradients_of(db, need[count:], ctx.stacked)


def _rounded(g_RN: Tensor, call: GroupedCall) -> Callable[[int, int], Operand] | None:
    """Rowwise codes of the gradient of some tokens, (start, end), where they are rounded
    stochastically: all tokens share one draw, as they do where groups run together. Else None."""
    if call.settings is None:
        return None
    target, _ = linear_recipe.plan_gradient(g_RN.device, call.settings, True, False, False)
    if target.seed is None:
        return None
    fmt = spec_of(target.row).format.name
    row = quantize_2d(g_RN, f"{fmt}@rows", rule=target.rule, seed=target.seed).row
    assert row is not None

    def of(start: int, end: int) -> Operand:
        return convert_2d(row.group(start, end), target.row)

    return of


def _together(wgrads: Sequence[Wgrad], stacked: bool) -> GroupedWgrad:
    """The weight gradients of all groups: [G, N, K], or [G * N, K] for separate weights."""

    def run(out: "Tensor | None", dtype: torch.dtype, accumulate: bool) -> Tensor:
        if out is None:
            made = torch.stack([each(None, dtype, False) for each in wgrads])
            return made if stacked else made.flatten(0, 1)
        for each, place_of in zip(wgrads, out.view(len(wgrads), -1, out.shape[-1]), strict=True):
            each(place_of, dtype, accumulate)
        return out

    reads = tuple(read for each in wgrads for read in each.reads)
    return GroupedWgrad(
        run, reads, lambda i, out, accumulate: wgrads[i](out, out.dtype, accumulate)
    )


def one_by_one(x: Tensor, offs: Tensor, parts: Sequence[Tensor], call: GroupedCall) -> Tensor:
    """x [..., K] -> [..., N], differentiable, group by group: as grouped.grouped_linear."""
    bounds = bounds_of(offs, call.capacity, flatten(x).shape[0])
    return GroupedLoopFunction.apply(x, call, bounds, *parts)[0]
