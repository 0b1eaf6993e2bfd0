"""The autograd function behind te_mx.GroupedLinear and te_mx.grouped_linear.

Shapes: R rows (tokens of all groups), G groups, K in_features, N out_features. Group g owns rows
[start_g, end_g); rows of no group are 0 in y and dx and touch nothing else.

    fprop  y[R, N]     = x[start:end]   @ w_g[N, K]^T + bias_g    groups of rows
    dgrad  dx[R, K]    = g[start:end]   @ w_g[N, K]               groups of rows
    wgrad  dw_g[N, K]  = g[start:end]^T @ x[start:end]            groups of k

Bit for bit what te_mx.Linear makes of each group. Everything is read once, for all groups: one
quantize call for the tokens, one for the weights. Offsets travel as a tensor and are not looked at
here, so nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.autograd.backward import place, run_backward, tag_of
from te_mx.autograd.grouped_loop import Call, GroupedLoopFunction, bounds_of
from te_mx.autograd.linear import DGRAD, WGRAD, flatten, mode_of, unflatten
from te_mx.autograd.operands import plain_rows
from te_mx.autograd.wgrad import GroupedWgrad
from te_mx.backends import reference_grouped
from te_mx.backends.grouped import (
    StackedOperand,
    device_bounds,
    host_bounds,
    k_of,
    known_to_host,
)
from te_mx.ops import Made, Operand, gemm_2d
from te_mx.ops.grouped_gemm import gemm_rows, standing_weights
from te_mx.ops.grouped_quantize import quantize_grouped, quantize_weights
from te_mx.ops.grouped_wgrad import gemm_k
from te_mx.recipe import Settings

_PARTS = 10  # arguments of the autograd function before the parameters


class Groups(NamedTuple):
    """Which rows belong to which group: end offsets int [G], and the capacity of a group or 0."""

    offs: Tensor
    capacity: int = 0


class StandingWeights(NamedTuple):
    """Weights quantized once for several calls: rowwise, and columnwise where backward needs it."""

    settings: Settings
    row: StackedOperand
    col: StackedOperand | None
    made: Made

    def on_current_stream(self) -> StandingWeights:
        """These weights, once the current stream has waited for them."""
        stacks = (self.row, self.col) if self.col is not None else (self.row,)
        tensors = [t for stack in stacks for t in (stack.codes, stack.scales)]
        self.made.await_on_current_stream(self.row.codes.device, *tensors)
        return self

    def serves(self, settings: Settings, device: torch.device, need_col: bool) -> bool:
        """Whether a call with these settings on this device would quantize to the same."""
        need_col = need_col and settings.backward is None and not settings.one_copy
        return (
            (self.col is not None or not need_col)
            and self.settings.one_copy == settings.one_copy
            and self.row.codes.device == device
            and self.settings.fwd_fmt == settings.fwd_fmt
            and self.settings.scale_rule == settings.scale_rule
        )


def standing(weights: Sequence[Tensor], settings: Settings, need_col: bool) -> StandingWeights:
    """Quantize and pack weights that stand still."""
    # Made outside of inference_mode, because a training step may use it later.
    need_col = need_col and settings.backward is None and not settings.one_copy
    with torch.inference_mode(False), torch.no_grad():
        row, col = quantize_weights(
            weights, settings.fwd_fmt, columnwise=need_col, scale_rule=settings.scale_rule
        )
        if plain_rows(settings):
            return StandingWeights(settings, row, None, Made.now(row.codes.device))
        packed = None if col is None else standing_weights(col)
        made = Made.now(row.codes.device)
        return StandingWeights(settings, standing_weights(row), packed, made)


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
    ) -> Tensor:
        weights, bias = split_parts(parts, has_bias)
        count = len(parts) // 2 if has_bias else len(parts)
        need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_PARTS:]
        need_dw = any(need[:count])
        fmt, rule = settings.fwd_fmt, settings.scale_rule
        q = quantize_grouped(
            flatten(x), offs, fmt, rowwise=True, columnwise=need_dw and not save_x, scale_rule=rule,
            capacity=capacity,
        )  # fmt: skip
        if kept is None:
            w_row, w_col = quantize_weights(weights, fmt, columnwise=need_dx, scale_rule=rule)
        else:
            w_row, w_col = kept.row, kept.col
        tokens = Operand(q.row_codes, q.row_scales, fmt, "k_last")  # type: ignore[arg-type]
        y_RN = gemm_rows(
            w_row, tokens, offs, bias=bias, out_dtype=out_dtype, capacity=capacity, tag=tag,
            mode=mode_of(settings),
        )  # fmt: skip

        w_col = w_col if need_dx else None
        w_saved = (None, None, None) if w_col is None else (w_col[0], w_col[1], w_col.packed)
        x_saved = (x if need_dw else None, None) if save_x else (q.col_codes, q.col_scales)
        ctx.save_for_backward(offs, *x_saved, *w_saved)
        ctx.settings, ctx.tag, ctx.capacity, ctx.x_shape = settings, tag, capacity, x.shape
        ctx.count, ctx.stacked, ctx.sink = count, parts[0].dim() == 3, sink
        ctx.dtypes = x.dtype, parts[0].dtype, parts[-1].dtype
        return unflatten(y_RN, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.GroupedLinear", ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need = ctx.needs_input_grad[0], ctx.needs_input_grad[_PARTS:]
    count = ctx.count
    need_dw, need_db = need[:count], need[count:]
    offs, *saved = ctx.saved_tensors
    settings, tag, capacity = ctx.settings, ctx.tag, ctx.capacity
    fmt, rule, mode = settings.bwd_fmt, settings.scale_rule, mode_of(settings)
    x_dtype, w_dtype, b_dtype = ctx.dtypes
    g_RN = flatten(grad)
    dx = dw = db = None
    if not (need_dx or any(need_dw)):
        db = col_sums(g_RN, Groups(offs, capacity)).to(b_dtype)
        return (None,) * _PARTS + _spread(ctx, None, need_dw) + _spread(ctx, db, need_db)

    q = quantize_grouped(
        g_RN, offs, fmt, rowwise=need_dx, columnwise=any(need_dw), scale_rule=rule,
        col_sum=any(need_db), capacity=capacity,
    )  # fmt: skip
    if need_dx:
        w_col = StackedOperand(saved[2], saved[3], settings.fwd_fmt, "k_first", saved[4])
        g_row = Operand(q.row_codes, q.row_scales, fmt, "k_last")  # type: ignore[arg-type]
        dx = gemm_rows(
            w_col, g_row, offs, out_dtype=x_dtype, capacity=capacity,
            tag=tag_of(tag, DGRAD), mode=mode,
        ).view(ctx.x_shape)  # fmt: skip
    if any(need_dw):
        g_col = Operand(q.col_codes, q.col_scales, fmt, "k_first")  # type: ignore[arg-type]
        # A function of where the result goes, because a sink may run it later or into main_grad.
        wgrad = _wgrad(saved[:2], g_col, offs, capacity, settings, tag, ctx.stacked)
        dw = place(ctx.sink, wgrad, w_dtype)
        if dw is not None and not ctx.stacked:
            dw = dw.unflatten(0, (count, dw.shape[0] // count))
    if q.col_sum is not None:
        db = q.col_sum.to(b_dtype)
    return (dx,) + (None,) * (_PARTS - 1) + _spread(ctx, dw, need_dw) + _spread(ctx, db, need_db)


def _wgrad(
    saved: Sequence[Tensor], g_col: Operand, offs: Tensor, capacity: int, settings: Settings,
    tag: int, stacked: bool,
) -> GroupedWgrad:  # fmt: skip
    """dw [G, N, K], or [G * N, K] for separate weights: what they are when concatenated."""
    mode = mode_of(settings)

    def columns() -> Operand:
        codes, scales = saved
        if scales is None:  # x itself was saved
            q = quantize_grouped(
                flatten(codes), offs, settings.fwd_fmt, rowwise=False, columnwise=True,
                scale_rule=settings.scale_rule, capacity=capacity,
            )  # fmt: skip
            codes, scales = q.col_codes, q.col_scales
        return Operand(codes, scales, settings.fwd_fmt, "k_first")

    def together(out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
        x_col = columns()
        shape = (len(offs), g_col.rows, x_col.rows)
        dw = gemm_k(
            x_col, g_col, offs, out=None if out is None else out.view(shape), out_dtype=dtype,
            accumulate=accumulate, capacity=capacity, tag=tag_of(tag, WGRAD), mode=mode,
        )  # fmt: skip
        return dw if stacked else dw.flatten(0, 1)

    # On the CPU groups gain less from one call than a sum of all gradients beside main_grad costs.
    if not offs.is_cpu or not g_col.codes.is_cpu:
        return GroupedWgrad(together, None)
    made: list[Operand] = []

    def one(i: int, out: Tensor, accumulate: bool) -> None:
        if not made:
            made.append(columns())
        bounds = host_bounds(offs, capacity, g_col.k)
        parts = [k_of(o, bounds.starts[i], bounds.ends[i], i) for o in (made[0], g_col)]
        gemm_2d(
            *parts, out=out, out_dtype=out.dtype, accumulate=accumulate,
            tag=tag_of(tag, WGRAD), mode=mode,
        )  # fmt: skip

    return GroupedWgrad(together, one)


def _spread(ctx: Any, grad: Tensor | None, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradient of all groups as those of the parameters that need one."""
    if grad is None or ctx.stacked:
        return tuple(grad if need else None for need in needed)
    return tuple(g if need else None for g, need in zip(grad.unbind(0), needed, strict=False))


def split_parts(parts: Sequence[Tensor], has_bias: bool) -> tuple[list[Tensor], Tensor | None]:
    """(the weight of every group, biases [G, N] or None)."""
    if parts[0].dim() == 3:
        return list(parts[0].unbind(0)), parts[1] if has_bias else None
    count = len(parts) // 2 if has_bias else len(parts)
    return list(parts[:count]), torch.stack(list(parts[count:])) if has_bias else None


def other_backward(settings: Settings) -> bool:
    """Whether the recipe asks for a backward pass that is not three MXFP8 GEMMs on operands that
    were quantized from what they are made of."""
    return any(getattr(settings, name, None) for name in ("backward", "wgrad_hp", "one_copy"))


def col_sums(x: Tensor, groups: Groups) -> Tensor:
    """Sums over the rows of each group, fp32 [G, cols]; each is x[start:end].sum(0)."""
    offs, capacity = groups
    if not known_to_host(offs) or torch.compiler.is_compiling():
        return reference_grouped.col_sums(x, *device_bounds(offs, capacity, len(x)))
    bounds = zip(*host_bounds(offs, capacity, len(x)), strict=True)
    return torch.stack([x[start:end].sum(0, dtype=torch.float32) for start, end in bounds])


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
            return GroupedLoopFunction.apply(x, call, *parts)
        return GroupedLinearFunction.apply(
            x, *groups, kept, settings, out_dtype, tag, save_x, sink, has_bias, *parts
        )
    weights, bias = split_parts(parts, has_bias)
    row = kept.row if kept else quantize_weights(
        weights, settings.fwd_fmt, columnwise=False, scale_rule=settings.scale_rule
    )[0]  # fmt: skip
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
    q = quantize_grouped(
        flatten(x), offs, fmt, rowwise=True, columnwise=False, scale_rule=rule, capacity=capacity
    )
    tokens = Operand(q.row_codes, q.row_scales, fmt, "k_last")  # type: ignore[arg-type]
    y_RN = gemm_rows(
        w_row, tokens, offs, bias=bias_GN, out_dtype=out_dtype, capacity=capacity, tag=tag,
        mode=mode_of(settings),
    )  # fmt: skip
    return unflatten(y_RN, x)
