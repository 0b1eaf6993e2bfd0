"""The autograd function behind te_mx.GroupedLinear and te_mx.grouped_linear.

Shapes: R rows (tokens of all groups), G groups, K in_features, N out_features. Group g owns rows
[start_g, end_g); rows of no group are 0 in y and dx and touch nothing else.

    fprop  y[R, N]     = x[start:end]   @ w_g[N, K]^T + bias_g    groups of rows
    dgrad  dx[R, K]    = g[start:end]   @ w_g[N, K]               groups of rows
    wgrad  dw_g[N, K]  = g[start:end]^T @ x[start:end]            groups of k

Bit for bit what te_mx.Linear makes of each group. Everything is read once, for all groups: one
quantize call for the tokens, one for the weights. Offsets travel as a tensor and are not looked at
here, so nothing waits for a device. On Hopper, operands are packed on the way out of the quantizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx.autograd.backward import outputs, place, run_backward, tag_of
from te_mx.autograd.grouped_loop import Call, GroupedLoopFunction, bounds_of
from te_mx.autograd.grouped_operands import (
    Groups,
    Packing,
    StandingWeights,
    col_sums,
    gradients_of,
    other_backward,
    split_parts,
)
from te_mx.autograd.linear import DGRAD, WGRAD, flatten, mode_of, shaped, unflatten
from te_mx.autograd.wgrad import INPUT, GroupedWgrad, Reads
from te_mx.backends import sm90_grouped
from te_mx.backends.grouped import StackedOperand, host_bounds, k_of
from te_mx.ops import Operand, gemm_2d
from te_mx.ops.grouped_gemm import gemm_rows
from te_mx.ops.grouped_quantize import quantize_grouped
from te_mx.ops.grouped_weights import columns_of_weights, quantize_weights
from te_mx.ops.grouped_wgrad import gemm_k, gemm_k_into
from te_mx.recipe import Settings

_PARTS = 10  # arguments of the autograd function before the parameters


class GroupedLinearFunction(torch.autograd.Function):
    """y = grouped x @ w_g^T + bias_g in MXFP8; gradients have the dtypes of what they belong to.

    `parts` are the weights and then the biases: G of each, or one stacked tensor of each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        offs: Tensor,
        capacity: int,
        kept: StandingWeights | None,
        settings: Settings,
        out_dtype: torch.dtype,
        tag: int,
        save_x: bool,
        sink: Any,
        has_bias: bool,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:
        weights, bias = split_parts(parts, has_bias)
        count = len(parts) // 2 if has_bias else len(parts)
        need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_PARTS:]
        need_dw = any(need[:count])
        fmt, rule = settings.fwd_fmt, settings.scale_rule
        packing = Packing.of(x, offs, weights[0], settings)
        q = quantize_grouped(
            flatten(x), packing.offs, fmt, rowwise=True, columnwise=need_dw and not save_x,
            scale_rule=rule, capacity=capacity, spread=packing.spread,
        )  # fmt: skip
        if kept is None or not packing.serves(kept):
            w_row, w_col = quantize_weights(
                weights, fmt, columnwise=need_dx and not settings.one_copy, scale_rule=rule,
                spread=packing.of_weights(settings),
            )  # fmt: skip
        else:
            w_row, w_col = kept.row, kept.col
        y_RN = gemm_rows(
            w_row, packing.rows(q, fmt), packing.offs, bias=bias, out_dtype=out_dtype,
            capacity=capacity, tag=tag, mode=mode_of(settings),
        )  # fmt: skip

        if settings.one_copy:
            w_col = w_row  # its columns are made in backward
        w_col = w_col if need_dx else None
        w_saved = (None, None, None) if w_col is None else (w_col[0], w_col[1], w_col.packed)
        x_saved = (x if need_dw else None, None) if save_x else (q.col_codes, q.col_scales)
        ctx.spread, ctx.w_order = packing.spread, None if w_col is None else w_col.order
        ctx.settings, ctx.tag, ctx.capacity, ctx.x_shape = settings, tag, capacity, x.shape
        ctx.count, ctx.stacked, ctx.sinks = count, parts[0].dim() == 3, (sink,)
        ctx.dtypes = x.dtype, parts[0].dtype, parts[-1].dtype
        return outputs(ctx, (offs, packing.offs, *x_saved, *w_saved), unflatten(y_RN, x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.GroupedLinear", ctx, *grads)


def _backward(ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_PARTS:]
    count = ctx.count
    need_dw, need_db = need[:count], need[count:]
    host_offs, offs, *saved = tensors
    offs = offs.contiguous()
    packing = Packing(ctx.spread, offs)
    settings, tag, capacity = ctx.settings, ctx.tag, ctx.capacity
    fmt, rule, mode = settings.bwd_fmt, settings.scale_rule, mode_of(settings)
    x_dtype, w_dtype, b_dtype = ctx.dtypes
    g_RN = flatten(grad)
    dx = dw = db = None
    if not (need_dx or any(need_dw)):
        db = col_sums(g_RN, Groups(host_offs, capacity)).to(b_dtype)
        grads = *gradients_of(None, need_dw, ctx.stacked), *gradients_of(db, need_db, ctx.stacked)
        return (None,) * _PARTS + grads

    q = quantize_grouped(
        g_RN, offs, fmt, rowwise=need_dx, columnwise=any(need_dw), scale_rule=rule,
        col_sum=any(need_db), capacity=capacity, spread=packing.spread,
    )  # fmt: skip
    if need_dx:
        w_col = StackedOperand(saved[2], saved[3], settings.fwd_fmt, ctx.w_order, saved[4])
        if w_col.order == "sm90" and not torch.compiler.is_compiling():
            w_col = sm90_grouped.aligned(w_col)
        if settings.one_copy:
            w_col = columns_of_weights(w_col, rule, packing.spread)
        dx_RK = gemm_rows(
            w_col, packing.rows(q, fmt), offs, out_dtype=x_dtype, capacity=capacity,
            tag=tag_of(tag, DGRAD), mode=mode,
        )  # fmt: skip
        dx = shaped(dx_RK, ctx.x_shape)
    if any(need_dw):
        # A function of where the result goes, because a sink may run it later or into main_grad.
        wgrad = _wgrad(
            saved[:2], packing.columns(q, fmt), packing, capacity, len(g_RN), settings, tag,
            ctx.stacked,
        )  # fmt: skip
        dw = place(ctx.sinks[0], wgrad, w_dtype)
        if dw is not None and not ctx.stacked:
            dw = dw.unflatten(0, (count, dw.shape[0] // count))
    if q.col_sum is not None:
        db = q.col_sum.to(b_dtype)
    grads = *gradients_of(dw, need_dw, ctx.stacked), *gradients_of(db, need_db, ctx.stacked)
    return (dx,) + (None,) * (_PARTS - 1) + grads


def _wgrad(
    saved: Sequence[Tensor], g_col: Operand, packing: Packing, capacity: int, rows: int,
    settings: Settings, tag: int, stacked: bool,
) -> GroupedWgrad:  # fmt: skip
    """dw [G, N, K], or [G * N, K] for separate weights: what they are when concatenated."""
    fmt, offs, mode = settings.fwd_fmt, packing.offs, mode_of(settings)
    made: list[Operand] = []
    reads: Reads = ((INPUT, saved[0]),) if saved[1] is None else ()

    def columns() -> Operand:
        if not made:
            made.append(make_columns())
        return made[0]

    def make_columns() -> Operand:
        codes, scales = saved
        if scales is not None:
            return Operand(codes, scales, fmt, g_col.order)
        q = quantize_grouped(  # x itself was saved
            flatten(codes), offs, fmt, rowwise=False, columnwise=True,
            scale_rule=settings.scale_rule, capacity=capacity, spread=packing.spread,
        )  # fmt: skip
        return packing.columns(q, fmt)

    def together(out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
        x_col = columns()
        shape = (len(offs), g_col.rows, x_col.rows)
        dw = gemm_k(
            x_col, g_col, offs, out=None if out is None else out.view(shape), out_dtype=dtype,
            accumulate=accumulate, capacity=capacity, rows=rows, tag=tag_of(tag, WGRAD), mode=mode,
        )  # fmt: skip
        return dw if stacked else dw.flatten(0, 1)

    def into(outs: Sequence[Tensor], accumulate: bool) -> bool:
        return gemm_k_into(
            columns(), g_col, offs, outs, accumulate, capacity=capacity, rows=rows,
            tag=tag_of(tag, WGRAD),
        )  # fmt: skip

    # On the CPU groups gain less from one call than a sum of all gradients beside main_grad costs.
    if not (offs.is_cpu and g_col.codes.is_cpu and g_col.order == "k_first"):
        return GroupedWgrad(together, reads, into=into)

    def one(i: int, out: Tensor, accumulate: bool) -> None:
        bounds = host_bounds(offs, capacity, rows)
        parts = [k_of(o, bounds.starts[i], bounds.ends[i], i) for o in (columns(), g_col)]
        gemm_2d(
            *parts, out=out, out_dtype=out.dtype, accumulate=accumulate,
            tag=tag_of(tag, WGRAD), mode=mode,
        )  # fmt: skip

    return GroupedWgrad(together, reads, one)


def grouped_linear(
    x: Tensor,
    groups: Groups,
    parts: Sequence[Tensor],
    has_bias: bool,
    kept: StandingWeights | None,
    settings: Settings,
    out_dtype: torch.dtype,
    tag: int = -1,
    save_x: bool = False,
    sink: Any = None,
) -> Tensor:
    """x [..., K] -> [..., N] in MXFP8, differentiable; rows are those of x flattened.

    parts: the weights [N, K] of all groups and then the biases [N], or one stacked weight [G, N, K]
    and one bias [G, N]. `kept` stands in for quantizing the weights; `tag` is as for `linear`.
    `save_x` saves x for backward instead of its columnwise codes, with the same result. `sink`
    takes the weight gradients: ``sink.take(wgrad, dtype)`` runs ``wgrad(out, dtype, accumulate)``,
    now or later, and returns what backward returns.
    """
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parts)):
        if other_backward(settings):
            bounds = bounds_of(*groups, len(flatten(x)))
            still = None if kept is None else (kept.row, kept.col)
            call = Call(bounds, still, settings, out_dtype, tag, save_x, sink, has_bias)
            return GroupedLoopFunction.apply(x, call, *parts)[0]
        return GroupedLinearFunction.apply(
            x, *groups, kept, settings, out_dtype, tag, save_x, sink, has_bias, *parts
        )[0]
    weights, bias = split_parts(parts, has_bias)
    packing = Packing.of(x, groups.offs, weights[0], settings)
    if kept is not None and packing.serves(kept):
        row = kept.row
    else:
        row, _ = quantize_weights(
            weights, settings.fwd_fmt, columnwise=False, scale_rule=settings.scale_rule,
            spread=packing.spread,
        )  # fmt: skip
    return infer(x, groups, row, bias, settings, out_dtype, tag)


def infer(
    x: Tensor,
    groups: Groups,
    w_row: StackedOperand,
    bias_GN: Tensor | None,
    settings: Settings,
    out_dtype: torch.dtype,
    tag: int = -1,
) -> Tensor:
    """x [..., K] -> [..., N] on quantized weights, without autograd."""
    fmt, rule = settings.fwd_fmt, settings.scale_rule
    offs, capacity = groups
    packing = Packing.of(x, offs, w_row.codes, settings)
    q = quantize_grouped(
        flatten(x), packing.offs, fmt, rowwise=True, columnwise=False, scale_rule=rule,
        capacity=capacity, spread=packing.spread,
    )  # fmt: skip
    y_RN = gemm_rows(
        w_row, packing.rows(q, fmt), packing.offs, bias=bias_GN, out_dtype=out_dtype,
        capacity=capacity, tag=tag, mode=mode_of(settings),
    )  # fmt: skip
    return unflatten(y_RN, x)
