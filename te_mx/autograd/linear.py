"""The autograd function behind te_mx.Linear.

Shapes: M tokens (all leading dimensions flattened), K in_features, N out_features.

    fprop  y[M, N]  = x[M, K]   @ w[N, K]^T + bias     TN: A = w rowwise,    B = x rowwise
    dgrad  dx[M, K] = g[M, N]   @ w[N, K]              NN: A = w columnwise, B = g rowwise
    wgrad  dw[N, K] = g[M, N]^T @ x[M, K]              NT: A = x columnwise, B = g columnwise

Every tensor is read once: one quantize call makes all the directions that the call needs, and that
of g also sums the bias gradient. Saved for backward are columnwise codes and scales only: 1.03
bytes an element of x and of w.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.ops import (
    PLAIN,
    GemmForm,
    Mode,
    Operand,
    QuantizedParts,
    branch,
    gemm_2d,
    gemm_form,
    quantize_2d,
    standing_2d,
)
from te_mx.recipe import Settings

FPROP, DGRAD, WGRAD = 0, 1, 2
GEMMS = ("fprop", "dgrad", "wgrad")

_DOUBLE_BACKWARD = (
    "te_mx.Linear: trying to differentiate twice through an MXFP8 linear layer, which has no "
    "second derivative (its backward quantizes the gradient). Run the layers that need a double "
    "backward in high precision: `with te_mx.autocast(enabled=False):` around their forward"
)


class StandingWeight(NamedTuple):
    """A weight quantized once for several calls: rowwise, and columnwise where backward needs
    it."""

    settings: Settings
    row: Operand
    col: Operand | None

    def serves(self, settings: Settings, device: torch.device, need_col: bool) -> bool:
        """Whether a call with these settings on this device would quantize to the same."""
        mine = self.settings
        return (
            (self.col is not None or not need_col)
            and self.row.codes.device == device
            and mine.fwd_fmt == settings.fwd_fmt
            and mine.scale_rule == settings.scale_rule
            # Operands that are plain serve every precision.
            and (self.row.order != "sm90" or mode_of(mine) == mode_of(settings))
        )


def mode_of(settings: Settings) -> Mode:
    """How the GEMMs multiply on GPUs."""
    return Mode(settings.precision, settings.spread)


def form_of(device: torch.device, settings: Settings) -> GemmForm:
    """What to ask the quantizer for."""
    return gemm_form(device, settings.precision, settings.spread)


def row_operand(q: QuantizedParts, fmt: str, form: GemmForm) -> Operand:
    """The rowwise part of a quantized tensor: its reduction runs over the columns."""
    order = "sm90" if form.spread >= 0 else "k_last"
    return Operand(q.row_codes, q.row_scales, fmt, order)  # type: ignore[arg-type]


def col_operand(q: QuantizedParts, fmt: str, form: GemmForm) -> Operand:
    """The columnwise part, whose reduction runs over the rows of what was quantized."""
    plain = "k_first" if form.columnwise == "plain" else "k_last"
    order = "sm90" if form.spread >= 0 else plain
    return Operand(q.col_codes, q.col_scales, fmt, order)  # type: ignore[arg-type]


def quantize_weight(
    weight_NK: Tensor, settings: Settings, need_col: bool, packed: bool = True
) -> tuple[Operand, Operand | None]:
    """One read of the weight: its operand for fprop, and the one for dgrad if `need_col`.

    packed=False gives plain codes and scales on every device.
    """
    fmt, rule = settings.fwd_fmt, settings.scale_rule
    form = form_of(weight_NK.device, settings)
    if not packed:
        form = form._replace(spread=PLAIN)
    col = form.columnwise if need_col else None
    q = quantize_2d(
        weight_NK, fmt, rowwise=True, columnwise=col, scale_rule=rule, spread=form.spread
    )
    return row_operand(q, fmt, form), col_operand(q, fmt, form) if need_col else None


def standing_weight(weight_NK: Tensor, settings: Settings, need_col: bool) -> StandingWeight:
    """Quantize and pack a weight that stands still."""
    # Made outside of inference_mode, because a training step may use it later.
    with torch.inference_mode(False), torch.no_grad():
        row, col = quantize_weight(weight_NK, settings, need_col)
        row = standing_2d(row, "a", mode_of(settings))
        if col is not None:
            col = standing_2d(col, "a", mode_of(settings))
    return StandingWeight(settings, row, col)


def flatten(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]; sizes of 0 included."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def unflatten(y_MN: Tensor, x: Tensor) -> Tensor:
    """[M, N] -> [..., N] with the leading dimensions of x [..., K]."""
    return y_MN if x.dim() == 2 else y_MN.view(*x.shape[:-1], y_MN.shape[1])


class LinearFunction(torch.autograd.Function):
    """y = x @ w^T + bias in MXFP8; gradients have the dtypes of what they belong to."""

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
    ) -> Tensor:
        need_dx, need_dw = ctx.needs_input_grad[:2]
        fmt, rule = settings.fwd_fmt, settings.scale_rule
        form = form_of(x.device, settings)
        columnwise = form.columnwise if need_dw else None
        side = None
        if standing is not None:
            w_row, w_col = standing.row, standing.col
        elif side := branch(x.device, max(x.numel(), weight_NK.numel())):
            with side:
                w_row, w_col = quantize_weight(weight_NK, settings, need_dx)
        else:
            w_row, w_col = quantize_weight(weight_NK, settings, need_dx)
        q = quantize_2d(
            flatten(x), fmt, rowwise=True, columnwise=columnwise, scale_rule=rule,
            spread=form.spread,
        )  # fmt: skip
        if side is not None:
            side.join()
        y_MN = gemm_2d(
            w_row, row_operand(q, fmt, form), bias=bias_N, out_dtype=out_dtype, tag=tag,
            mode=mode_of(settings),
        ).out  # fmt: skip

        x_col = col_operand(q, fmt, form) if need_dw else None
        w_col = w_col if need_dx else None
        ctx.save_for_backward(*_tensors(x_col), *_tensors(w_col))
        ctx.x_order = None if x_col is None else x_col.order
        ctx.w_order = None if w_col is None else w_col.order
        ctx.settings, ctx.tag, ctx.x_shape = settings, tag, x.shape
        ctx.dtypes = x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype
        return unflatten(y_MN, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            # create_graph=True: the gradients are right, but theirs must not be silently zero.
            with torch.no_grad():
                grads = _backward(ctx, grad)
            return tuple(_refuse_double_backward(grads))
        return _backward(ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    saved = ctx.saved_tensors
    settings, tag = ctx.settings, ctx.tag
    fmt, rule = settings.bwd_fmt, settings.scale_rule
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    g_MN = flatten(grad)
    dx = dw_NK = db_N = None
    if not (need_dx or need_dw):
        db_N = g_MN.sum(0, dtype=torch.float32).to(bias_dtype)
        return None, None, db_N, None, None, None, None

    form, mode = form_of(grad.device, settings), mode_of(settings)
    columnwise = form.columnwise if need_dw else None
    q = quantize_2d(
        g_MN, fmt, rowwise=need_dx, columnwise=columnwise, scale_rule=rule, col_sum=need_db,
        spread=form.spread,
    )  # fmt: skip
    side = None
    if need_dx:
        w_col = _operand(saved[3:], settings.fwd_fmt, ctx.w_order)
        tag_dx = tag + DGRAD if tag >= 0 else -1
        g_row = row_operand(q, fmt, form)
        side = branch(grad.device, max(g_MN.numel(), w_col.codes.numel())) if need_dw else None
        if side is None:
            dx_MK = gemm_2d(w_col, g_row, out_dtype=x_dtype, tag=tag_dx, mode=mode).out
        else:
            with side:
                dx_MK = gemm_2d(w_col, g_row, out_dtype=x_dtype, tag=tag_dx, mode=mode).out
        dx = dx_MK.view(ctx.x_shape)
    if need_dw:
        x_col = _operand(saved[:3], settings.fwd_fmt, ctx.x_order)
        tag_dw = tag + WGRAD if tag >= 0 else -1
        g_col = col_operand(q, fmt, form)
        dw_NK = gemm_2d(x_col, g_col, out_dtype=w_dtype, tag=tag_dw, mode=mode).out
    if side is not None:
        side.join()
    if q.col_sum is not None:
        db_N = q.col_sum.to(bias_dtype)
    return dx, dw_NK, db_N, None, None, None, None


def _tensors(operand: Operand | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What save_for_backward keeps of an operand."""
    return (None, None, None) if operand is None else (operand[0], operand[1], operand.packed)


def _operand(tensors: tuple[Tensor, Tensor, Tensor | None], fmt: str, order: str) -> Operand:
    return Operand(tensors[0], tensors[1], fmt, order, tensors[2])


def _refuse_double_backward(grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Give the gradients a grad_fn that raises, so that only a real double backward is an error."""
    real = [g.detach().requires_grad_() for g in grads if g is not None]
    functions: Any = torch._C._functions
    made = functions.DelayedError(_DOUBLE_BACKWARD, len(real))(*real)
    wrapped = iter([made] if isinstance(made, Tensor) else made)
    return [None if g is None else next(wrapped) for g in grads]


def linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    standing: StandingWeight | None,
    settings: Settings,
    out_dtype: torch.dtype,
    tag: int = -1,
) -> Tensor:
    """x [..., K] -> [..., N] in MXFP8, differentiable.

    `standing` stands in for quantizing the weight. With a `tag` the kernels that run are recorded
    in te_mx.engine.explain.LAST_RUN at tag, tag + 1 and tag + 2: fprop, dgrad and wgrad. Without
    anything to differentiate, rowwise operands are all that is made.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad or weight_NK.requires_grad or (bias_N is not None and bias_N.requires_grad)
    ):
        return LinearFunction.apply(x, weight_NK, bias_N, standing, settings, out_dtype, tag)
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
