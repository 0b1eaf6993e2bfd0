"""The autograd function behind te_mx.GroupedLinear and te_mx.grouped_linear.

Shapes: R rows (tokens of all groups), G groups, K in_features, N out_features. Group g owns rows
[start_g, end_g); rows of no group are 0 in y and dx and touch nothing else.

    fprop  y[R, N]     = x[start:end]   @ w_g[N, K]^T + bias_g    groups of rows
    dgrad  dx[R, K]    = g[start:end]   @ w_g[N, K]               groups of rows
    wgrad  dw_g[N, K]  = g[start:end]^T @ x[start:end]            groups of k

Bit for bit what te_mx.Linear makes of each group, but for gradients that are rounded
stochastically: they draw once for all groups. Everything is read once, for all groups: one
quantize call for the tokens, one for the weights. Offsets travel as a tensor and are not looked at
here, so nothing waits for a device. Operands are packed on the way out of the quantizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Epilogue, Made, Operand, Stack, gemm_2d
from te_mx._ops.grouped_gemm import gemm_k, gemm_k_into, gemm_rows, group_of_k, on_device
from te_mx._ops.grouped_quantize import (
    columns_of_weights,
    quantize_grouped,
    quantize_weights,
    weight_columns,
)
from te_mx.autograd.backward import outputs, place, run_backward, tag_of
from te_mx.autograd.grouped_loop import Call, GroupedLoopFunction, bounds_of
from te_mx.autograd.grouped_operands import (
    Groups,
    col_sums,
    gradients_of,
    split_parts,
)
from te_mx.autograd.saved import NOTHING, Kept
from te_mx.autograd.shapes import flatten, shaped, unflatten
from te_mx.autograd.steps import DGRAD, WGRAD, by_steps, columns_now, mode_of, new_seed
from te_mx.autograd.steps_grouped import GroupForms, KeptWeights
from te_mx.autograd.steps_kept import on_codes
from te_mx.autograd.wgrad import INPUT, GroupedWgrad, Reads, WeightGradient
from te_mx.dispatch.groups import host_bounds
from te_mx.recipes.settings import Settings

_PARTS = 3  # arguments of the autograd function before the parameters


class GroupedCall(NamedTuple):
    """What one call fixes. `kept` stands in for quantizing the weights; `tag` and `save_x` are as
    for autograd.linear.Call; `sink` takes the weight gradients."""

    capacity: int
    settings: Settings
    out_dtype: torch.dtype
    has_bias: bool
    kept: KeptWeights | None = None
    tag: int = -1
    save_x: bool = False
    sink: WeightGradient | None = None


class GroupedLinearFunction(torch.autograd.Function):
    """y = grouped x @ w_g^T + bias_g; gradients have the dtypes of what they belong to.

    `parts` are the weights and then the biases: G of each, or one stacked tensor of each.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offs: Tensor, call: GroupedCall, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        weights, bias = split_parts(parts, call.has_bias)
        count = len(parts) // 2 if call.has_bias else len(parts)
        need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_PARTS:]
        need_dw, settings = any(need[:count]), call.settings
        form = GroupForms.of(x, weights[0], settings)
        there = on_device(offs, form.x.row, x)  # once for all ops
        groups = Groups(there, call.capacity)
        columns = need_dw and not call.save_x
        q = quantize_grouped(
            flatten(x), groups, form.x.row, form.x.col if columns else "", rule=form.rule
        )
        w_row, w_col = _weights(weights, form, call, need_dx)
        assert q.row is not None
        y_RN = gemm_rows(
            q.row, w_row, groups, bias=bias, out_dtype=call.out_dtype, tag=call.tag,
            mode=mode_of(settings),
        )  # fmt: skip
        if form.one_copy:
            w_col = w_row  # its columns are made in backward
        ctx.weights, w_saved = _kept_for_dgrad(w_col, parts[:count], need_dx)
        x_kept = NOTHING
        if need_dw:
            x_kept = Kept.itself(x) if q.col is None else Kept.operand(q.col)
        ctx.x_kept, ctx.form, ctx.call, ctx.x_shape = x_kept.beside, form, call, x.shape
        ctx.count, ctx.stacked, ctx.sinks = count, parts[0].dim() == 3, (call.sink,)
        ctx.dtypes = x.dtype, parts[0].dtype, parts[-1].dtype
        saved = offs, there, *x_kept.tensors, *w_saved
        return outputs(ctx, saved, unflatten(y_RN, x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.GroupedLinear", ctx, *grads)


def _weights(
    weights: Sequence[Tensor] | Tensor, form: GroupForms, call: GroupedCall, need_dx: bool
) -> tuple[Stack, Stack | None]:
    """The operands of the weights: kept ones, or made now in one read."""
    kept, settings = call.kept, call.settings
    if kept is not None and (kept.row.layout.exact or not form.x.row.endswith("@rows")):
        return kept.row, kept.col
    first = weights if isinstance(weights, Tensor) else weights[0]
    col = form.w.col if columns_now(first, settings, need_dx) else ""
    return quantize_weights(weights, form.w.row, col, rule=form.rule)


def _kept_for_dgrad(
    operand: Stack | None, weights: Sequence[Tensor], need_dx: bool
) -> tuple[Stack | None, Sequence[Tensor | None]]:
    """What dgrad needs of the weights, without tensors, and the tensors: an operand's, or the
    weights themselves."""
    if not need_dx:
        return None, ()
    if operand is None:
        return None, weights
    codes, scales, packed = operand.codes, operand.scales, operand.packed
    return operand._replace(codes=None, scales=None, packed=None), (codes, scales, packed)  # type: ignore[arg-type]


def _for_dgrad(ctx: Any, saved: tuple[Tensor, ...]) -> Stack:
    """The columnwise operand of what was kept."""
    form = ctx.form
    if ctx.weights is None:
        weights = saved[0] if ctx.stacked else saved
        return weight_columns(weights, form.w.col, rule=form.w_col_rule)
    codes, scales, packed = saved
    kept = ctx.weights._replace(codes=codes, scales=scales, packed=packed)
    return columns_of_weights(kept, form.w.col, form.w_col_rule) if form.one_copy else kept


def _backward(ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_PARTS:]
    count, call, form = ctx.count, ctx.call, ctx.form
    need_dw, need_db = need[:count], need[count:]
    host_offs, offs = tensors[:2]
    tag, mode = call.tag, mode_of(call.settings)
    groups = Groups(offs.contiguous(), call.capacity)
    x_dtype, w_dtype, b_dtype = ctx.dtypes
    g_RN = flatten(grad)
    dx = dw = db = None
    if not (need_dx or any(need_dw)):
        db = col_sums(g_RN, Groups(host_offs, call.capacity)).to(b_dtype)
        grads = *gradients_of(None, need_dw, ctx.stacked), *gradients_of(db, need_db, ctx.stacked)
        return (None,) * _PARTS + grads

    q = quantize_grouped(
        g_RN, groups, form.g.row if need_dx else "", form.g.col if any(need_dw) else "",
        rule=form.g_rule, col_sum=any(need_db), seed=new_seed(g_RN.device, form.g_rule),
    )  # fmt: skip
    if need_dx:
        assert q.row is not None
        dx_RK = gemm_rows(
            q.row,
            _for_dgrad(ctx, tensors[5:]),
            groups,
            out_dtype=x_dtype,
            tag=tag_of(tag, DGRAD),
            mode=mode,
        )
        dx = shaped(dx_RK, ctx.x_shape)
    if any(need_dw):
        # A function of where the result goes, because a sink may run it later or into main_grad.
        assert q.col is not None
        x_kept = ctx.x_kept.with_tensors(tensors[2:5])
        wgrad = _wgrad(x_kept, q.col, groups, call, form, ctx.stacked)
        dw = place(ctx.sinks[0], wgrad, w_dtype)
        if dw is not None and not ctx.stacked:
            dw = dw.unflatten(0, (count, dw.shape[0] // count))
    if q.col_sum is not None:
        db = q.col_sum.to(b_dtype)
    grads = *gradients_of(dw, need_dw, ctx.stacked), *gradients_of(db, need_db, ctx.stacked)
    return (dx,) + (None,) * (_PARTS - 1) + grads


def _wgrad(
    x_kept: Kept, g_col: Operand, groups: Groups, call: GroupedCall, form: GroupForms, stacked: bool
) -> GroupedWgrad:
    """dw [G, N, K], or [G * N, K] for separate weights: what they are when concatenated."""
    mode, tag = mode_of(call.settings), tag_of(call.tag, WGRAD)
    made: list[Operand] = []
    reads: Reads = () if x_kept.spec else ((INPUT, x_kept.tensors[0]),)  # type: ignore[assignment]

    def columns() -> Operand:
        if not made:
            made.append(make_columns())
        return made[0]

    def make_columns() -> Operand:
        if x_kept.spec:
            return x_kept.as_operand()
        x = x_kept.tensors[0]  # x itself was saved
        assert x is not None
        q = quantize_grouped(flatten(x), groups, col=form.x.col, rule=form.rule)
        assert q.col is not None
        return q.col

    def together(out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
        x_col = columns()
        shape = (len(groups.offs), g_col.rows, x_col.rows)
        dw = gemm_k(
            g_col, x_col, groups, out=None if out is None else out.view(shape), out_dtype=dtype,
            accumulate=accumulate, tag=tag, mode=mode,
        )  # fmt: skip
        return dw if stacked else dw.flatten(0, 1)

    def into(outs: Sequence[Tensor], accumulate: bool) -> bool:
        return gemm_k_into(g_col, columns(), groups, outs, accumulate, tag=tag, mode=mode)

    # On the CPU groups gain less from one call than a sum of all gradients beside main_grad costs.
    if not (groups.offs.is_cpu and g_col.codes.is_cpu and g_col.layout.exact):
        return GroupedWgrad(together, reads, into=into)

    def one(i: int, out: Tensor, accumulate: bool) -> None:
        bounds = host_bounds(*groups, g_col.k)
        start, end = bounds.starts[i], bounds.ends[i]
        g_own, x_own = (group_of_k(o, start, end, i) for o in (g_col, columns()))
        gemm_2d(
            g_own, x_own, Epilogue(accumulate=accumulate), out=out, out_dtype=out.dtype, tag=tag,
            mode=mode,
        )  # fmt: skip

    return GroupedWgrad(together, reads, one)


def grouped_linear(x: Tensor, offs: Tensor, parts: Sequence[Tensor], call: GroupedCall) -> Tensor:
    """x [..., K] -> [..., N], differentiable; rows are those of x flattened.

    parts: the weights [N, K] of all groups and then the biases [N], or one stacked weight [G, N, K]
    and one bias [G, N]; offs: end offsets of the groups.
    """
    settings = call.settings
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parts)):
        if not by_steps(settings):
            bounds = bounds_of(offs, call.capacity, flatten(x).shape[0])
            still = None if call.kept is None else (call.kept.row, call.kept.col)
            loop = Call(
                bounds, still, settings, call.out_dtype, call.tag, call.save_x, call.sink,
                call.has_bias,
            )  # fmt: skip
            return GroupedLoopFunction.apply(x, loop, *parts)[0]
        return GroupedLinearFunction.apply(x, offs, call, *parts)[0]
    weights, bias = split_parts(parts, call.has_bias)
    form = GroupForms.of(x, weights[0], settings)
    row, _ = _weights(weights, form, call, False)
    return infer(x, offs, row, bias, call)


def grouped_on_codes(
    x: Tensor, offs: Tensor, w_row: Stack, bias_GN: Tensor | None, call: GroupedCall
) -> Tensor:
    """x [..., K] -> [..., N] on weights of which only plain rowwise codes are left, differentiable
    in x and the biases."""
    wanted = x.requires_grad or (bias_GN is not None and bias_GN.requires_grad)
    if not (torch.is_grad_enabled() and wanted):
        return infer(x, offs, w_row, bias_GN, call)
    settings = on_codes(call.settings)
    kept = KeptWeights(settings, w_row, None, Made(0, None))
    # The codes in the place of the weights have no gradient, and nothing reads them there.
    parts = (w_row.codes,) if bias_GN is None else (w_row.codes, bias_GN)
    return grouped_linear(x, offs, parts, call._replace(settings=settings, kept=kept))


def infer(
    x: Tensor, offs: Tensor, w_row: Stack, bias_GN: Tensor | None, call: GroupedCall
) -> Tensor:
    """x [..., K] -> [..., N] on quantized weights, without autograd."""
    settings = call.settings
    form = GroupForms.of(x, w_row.codes, settings)
    groups = Groups(on_device(offs, form.x.row, x), call.capacity)
    q = quantize_grouped(flatten(x), groups, form.x.row, rule=form.rule)
    assert q.row is not None
    y_RN = gemm_rows(
        q.row, w_row, groups, bias=bias_GN, out_dtype=call.out_dtype, tag=call.tag,
        mode=mode_of(settings),
    )  # fmt: skip
    return unflatten(y_RN, x)
