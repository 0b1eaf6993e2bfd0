"""The autograd function behind te_mx.Linear.

Shapes: M tokens (all leading dimensions flattened), K in_features, N out_features.

    fprop  y[M, N]  = x[M, K]   @ w[N, K]^T + bias     TN: A = w rowwise,    B = x rowwise
    dgrad  dx[M, K] = g[M, N]   @ w[N, K]              NN: A = w columnwise, B = g rowwise
    wgrad  dw[N, K] = g[M, N]^T @ x[M, K]              NT: A = x columnwise, B = g columnwise

Every tensor is read once: one quantize call makes all the directions that the call needs, and that
of g also sums the bias gradient. Saved for backward are columnwise codes and scales only: 1.03
bytes an element of x and of w. Recipes and arguments that change this are listed at LinearFunction.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_mx.autograd import high_precision, linear_one_call
from te_mx.autograd.backward import (
    operand_of,
    outputs,
    place,
    run_backward,
    tag_of,
    tensors_of,
    values_of,
)
from te_mx.autograd.operands import (
    StandingWeight,
    col_operand,
    columnwise_of,
    flatten,
    form_of,
    mode_of,
    plain_rows,
    quantize_weight,
    row_operand,
    shaped,
    unflatten,
    weight_call,
    weight_operands,
)
from te_mx.autograd.wgrad import INPUT, OUTPUT_GRADIENT, Reads, WeightGradient, Wgrad
from te_mx.engine.explain import LAST_RUN
from te_mx.ops import (
    PLAIN,
    GemmForm,
    Operand,
    Quantize,
    gemm_2d,
    quantize_2d,
    quantize_two_2d,
)
from te_mx.recipe import Settings

FPROP, DGRAD, WGRAD = 0, 1, 2
GEMMS = ("fprop", "dgrad", "wgrad")


def record(tag: int) -> None:
    """Note for te_mx.audit that a GEMM ran in high precision."""
    if tag >= 0:
        LAST_RUN[tag] = high_precision.HIGH_PRECISION


class LinearFunction(torch.autograd.Function):
    """y = x @ w^T + bias in MXFP8; gradients have the dtypes of what they belong to.

    What is saved of x and of w, and so how wgrad and dgrad run:

    ==================  =====================  ===========================================
    saved               its GEMM runs on       when
    ==================  =====================  ===========================================
    columnwise codes    these codes            by default
    rowwise codes       columnwise codes made  w: one_copy_weights
                        of what they decode to
    rowwise codes       what they decode to    backward_override "dequantized"
    the tensor itself   columnwise codes of it x: save_original_input
    the tensor itself   the tensor itself      "high_precision"; x: wgrad_with_hp
    ==================  =====================  ===========================================
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        standing: StandingWeight | None,
        settings: Settings,
        out_dtype: torch.dtype,
        tag: int,
        save_x: bool,
        sink: WeightGradient | None,
    ) -> tuple[Tensor, ...]:
        need_dx, need_dw = ctx.needs_input_grad[:2]
        fmt, rule = settings.fwd_fmt, settings.scale_rule
        override = settings.backward
        form = form_of(x.device, settings)
        if override == "dequantized":
            form = form._replace(spread=PLAIN)  # packed codes do not decode to the same values
        save_x = override == "high_precision" or (
            override is None and (save_x or settings.wgrad_hp)
        )
        x_columns = need_dw and not save_x and override is None
        x_call = Quantize(
            flatten(x), fmt, True, form.columnwise if x_columns else None, rule, spread=form.spread
        )
        if standing is not None:
            w_row, w_col = standing.row, standing.col
            q = quantize_2d(**x_call._asdict())
        else:
            w_call, w_form = weight_call(weight_NK, settings, need_dx)
            w, q = quantize_two_2d(w_call, x_call)
            w_row, w_col = weight_operands(w, settings, w_form)
        x_row = row_operand(q, fmt, form)
        y_MN = gemm_2d(
            w_row, x_row, bias=bias_N, out_dtype=out_dtype, tag=tag, mode=mode_of(settings)
        ).out

        saved_x: tuple[Tensor | None, ...] = _NOTHING
        saved_w: tuple[Tensor | None, ...] = _NOTHING
        ctx.x_order = ctx.w_order = None  # of saved codes; None where a tensor itself is saved
        if need_dw:
            if save_x:
                saved_x = x, None, None
            else:
                x_saved = col_operand(q, fmt, form) if x_columns else x_row
                saved_x, ctx.x_order = tensors_of(x_saved), x_saved.order
        if need_dx:
            if override == "high_precision":
                saved_w = weight_NK, None, None
            else:
                w_saved = w_row if plain_rows(settings) else w_col
                assert w_saved is not None
                saved_w, ctx.w_order = tensors_of(w_saved), w_saved.order
        ctx.settings, ctx.tag, ctx.x_shape, ctx.sinks = settings, tag, x.shape, (sink,)
        ctx.dtypes = x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype
        return outputs(ctx, (*saved_x, *saved_w), unflatten(y_MN, x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.Linear", ctx, *grads)


_NOTHING = (None, None, None)
_NO_GRADS = (None,) * 6  # of the arguments that are no tensors


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    settings, tag = ctx.settings, ctx.tag
    fmt, rule, override = settings.bwd_fmt, settings.scale_rule, settings.backward
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    g_MN = flatten(grad)
    dx = dw_NK = db_N = q = None
    form, mode = form_of(grad.device, settings), mode_of(settings)
    rows = need_dx and override is None
    columns = need_dw and override is None and not settings.wgrad_hp
    if rows or columns:
        q = quantize_2d(
            g_MN, fmt, rowwise=rows, columnwise=form.columnwise if columns else None,
            scale_rule=rule, col_sum=need_db, sum_dtype=bias_dtype or torch.float32,
            spread=form.spread,
        )  # fmt: skip
    if need_db:
        db_N = g_MN.sum(0, dtype=torch.float32).to(bias_dtype) if q is None else q.col_sum

    if need_dx:
        tag_dx = tag_of(tag, DGRAD)
        if rows:
            w_col = operand_of(saved[3:], settings.fwd_fmt, ctx.w_order)
            if settings.one_copy:
                w_col = columnwise_of(w_col, settings)
            assert q is not None
            g_row = row_operand(q, fmt, form)
            dx_MK = gemm_2d(w_col, g_row, out_dtype=x_dtype, tag=tag_dx, mode=mode).out
        else:
            w_NK = values_of(saved[3:], settings.fwd_fmt, ctx.w_order, g_MN.dtype)
            dx_MK = high_precision.dgrad(g_MN, w_NK, x_dtype)
            record(tag_dx)
        dx = shaped(dx_MK, ctx.x_shape)
    if need_dw:
        tag_dw = tag_of(tag, WGRAD)
        what = saved[:3], ctx.x_order, settings, tag_dw
        reads: Reads = ((INPUT, saved[0]),) if ctx.x_order is None else ()
        # A function of where the result goes, because a sink may run it later or into main_grad.
        if columns:
            assert q is not None
            wgrad = Wgrad(partial(_wgrad, *what, col_operand(q, fmt, form), form), reads)
        else:
            reads = (*reads, (OUTPUT_GRADIENT, g_MN))
            wgrad = Wgrad(partial(_wgrad_high_precision, *what, g_MN), reads)
        dw_NK = place(ctx.sinks[0], wgrad, w_dtype)
    return dx, dw_NK, db_N, *_NO_GRADS


def _wgrad(
    saved: tuple[Tensor, ...], order: str | None, settings: Settings, tag: int, g_col: Operand,
    form: GemmForm, out: Tensor | None, dtype: torch.dtype, accumulate: bool,
) -> Tensor:  # fmt: skip
    fmt, rule = settings.fwd_fmt, settings.scale_rule
    if order is not None:
        x_col = operand_of(saved, fmt, order)
    else:  # x itself was saved
        q = quantize_2d(
            flatten(saved[0]), fmt, rowwise=False, columnwise=form.columnwise, scale_rule=rule,
            spread=form.spread,
        )  # fmt: skip
        x_col = col_operand(q, fmt, form)
    return gemm_2d(
        x_col, g_col, out=out, out_dtype=dtype, accumulate=accumulate, tag=tag,
        mode=mode_of(settings),
    ).out  # fmt: skip


def _wgrad_high_precision(
    saved: tuple[Tensor, ...], order: str | None, settings: Settings, tag: int, g_MN: Tensor,
    out: Tensor | None, dtype: torch.dtype, accumulate: bool,
) -> Tensor:  # fmt: skip
    record(tag)
    x_MK = flatten(values_of(saved, settings.fwd_fmt, order, g_MN.dtype))
    return high_precision.wgrad(g_MN, x_MK, out, dtype, accumulate)


def linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    standing: StandingWeight | None,
    settings: Settings,
    out_dtype: torch.dtype,
    tag: int = -1,
    save_x: bool = False,
    sink: WeightGradient | None = None,
) -> Tensor:
    """x [..., K] -> [..., N] in MXFP8, differentiable.

    `standing` stands in for quantizing the weight. `save_x` saves x for backward instead of its
    columnwise codes, with the same result. `sink` says where the weight gradient goes.

    With a `tag` the kernels that run are recorded in te_mx.engine.explain.LAST_RUN at tag, tag + 1
    and tag + 2: fprop, dgrad and wgrad. Without anything to differentiate, rowwise operands are all
    that is made.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad or weight_NK.requires_grad or (bias_N is not None and bias_N.requires_grad)
    ):
        if (
            standing is None
            and sink is None
            and not save_x
            and linear_one_call.serves(x, weight_NK, settings, bias_N)
        ):
            call = linear_one_call.Call(settings, out_dtype, tag, _backward)
            return linear_one_call.OneCallLinear.apply(x, weight_NK, bias_N, call)[0]
        return LinearFunction.apply(
            x, weight_NK, bias_N, standing, settings, out_dtype, tag, save_x, sink
        )[0]
    row = standing.row if standing else quantize_weight(weight_NK, settings, False)[0]
    return infer(x, row, bias_N, settings, out_dtype, tag)


def infer(
    x: Tensor,
    w_row: Operand,
    bias_N: Tensor | None,
    settings: Settings,
    out_dtype: torch.dtype,
    tag: int = -1,
) -> Tensor:
    """x [..., K] -> [..., N] on a quantized weight, without autograd."""
    fmt, rule = settings.fwd_fmt, settings.scale_rule
    form = form_of(x.device, settings)
    q = quantize_2d(
        flatten(x), fmt, rowwise=True, columnwise=None, scale_rule=rule, spread=form.spread
    )
    y_MN = gemm_2d(
        w_row, row_operand(q, fmt, form), bias=bias_N, out_dtype=out_dtype, tag=tag,
        mode=mode_of(settings),
    ).out  # fmt: skip
    return unflatten(y_MN, x)
