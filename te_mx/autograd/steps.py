"""The linear steps inside longer autograd functions: what is quantized and saved for them, and
their GEMMs.

Shapes and meaning as in autograd/linear.py: x [M, K], w [N, K], g [M, N]. What is saved of x and w
is three tensors and an order: codes, scales and packed form of an operand, or the tensor itself,
None, None with order None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.autograd import high_precision
from te_mx.autograd.backward import operand_of, tensors_of, values_of
from te_mx.autograd.linear import record
from te_mx.autograd.operands import (
    StandingWeight,
    col_operand,
    columnwise_of,
    form_of,
    mode_of,
    plain_rows,
    quantize_weight,
    row_operand,
)
from te_mx.autograd.wgrad import INPUT, OUTPUT_GRADIENT, Reads, Wgrad
from te_mx.backends.fused import Wanted
from te_mx.ops import PLAIN, GemmForm, GemmParts, Operand, QuantizedParts, gemm_2d
from te_mx.ops.fused_run import quantized
from te_mx.recipe import Settings

Saved = tuple[tuple[Tensor | None, Tensor | None, Tensor | None], str | None]
NOTHING: Saved = ((None, None, None), None)


class Input(NamedTuple):
    """How the input of one linear step is quantized. `keep`: wgrad needs the input itself."""

    wanted: Wanted
    form: GemmForm
    keep: bool

    def row(self, q: QuantizedParts) -> Operand:
        return row_operand(q, self.wanted.fmt, self.form)

    def saved(self, q: QuantizedParts, x_MK: Tensor | None, need_dw: bool) -> Saved:
        """What wgrad needs; x_MK is the input itself, if kept."""
        if not need_dw:
            return NOTHING
        if self.keep:
            return (x_MK, None, None), None
        columns = self.wanted.columnwise is not None
        operand = col_operand(q, self.wanted.fmt, self.form) if columns else self.row(q)
        return tensors_of(operand), operand.order


def plan_input(device: torch.device, settings: Settings, need_dw: bool) -> Input:
    """The input of a linear step: rowwise for fprop, and what wgrad will need."""
    override = settings.backward
    form = form_of(device, settings)
    if override == "dequantized":
        form = form._replace(spread=PLAIN)  # packed codes do not decode to the same values
    keep = need_dw and (override == "high_precision" or (override is None and settings.wgrad_hp))
    columns = need_dw and not keep and override is None
    wanted = Wanted(
        settings.fwd_fmt, True, form.columnwise if columns else None, settings.scale_rule,
        form.spread,
    )  # fmt: skip
    return Input(wanted, form, keep)


def saved_weight(
    row: Operand, col: Operand | None, weight_NK: Tensor, settings: Settings, need_dx: bool
) -> Saved:
    """What dgrad needs of a weight."""
    if not need_dx:
        return NOTHING
    if settings.backward == "high_precision":
        return (weight_NK, None, None), None
    operand = row if plain_rows(settings) else col
    assert operand is not None
    return tensors_of(operand), operand.order


def fprop(
    w: Operand, x: Operand, bias_N: Tensor | None, settings: Settings, dtype: torch.dtype, tag: int
) -> Tensor:
    """y [M, N] = x @ w^T + bias."""
    return gemm_2d(w, x, bias=bias_N, out_dtype=dtype, tag=tag, mode=mode_of(settings)).out


class Gradient(NamedTuple):
    """The output gradient of a linear step: itself and quantized as `wanted`, for some of its
    GEMMs."""

    g_MN: Tensor | None
    q: QuantizedParts
    wanted: Wanted


def plan_gradient(
    device: torch.device, settings: Settings, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Wanted, bool]:
    """What to quantize an output gradient to, and whether it is needed itself too."""
    form = form_of(device, settings)
    rows = need_dx and settings.backward is None
    columns = need_dw and settings.backward is None and not settings.wgrad_hp
    wanted = Wanted(
        settings.bwd_fmt, rows, form.columnwise if columns else None, settings.scale_rule,
        form.spread, need_db,
    )  # fmt: skip
    return wanted, rows != need_dx or columns != need_dw


def quantized_gradient(
    g_MN: Tensor, settings: Settings, need_dx: bool, need_dw: bool, need_db: bool
) -> Gradient:
    """The output gradient that backward starts with."""
    wanted, _ = plan_gradient(g_MN.device, settings, need_dx, need_dw, need_db)
    return Gradient(g_MN, quantized(g_MN, wanted), wanted)


def dgrad(
    gradient: Gradient, tensors: tuple[Tensor, ...], order: str | None, settings: Settings,
    dtype: torch.dtype, tag: int, *, gelu: str | None = None, gelu_in: Tensor | None = None,
    bias_grad: bool = False,
) -> GemmParts:  # fmt: skip
    """dx [M, K] = g @ w; with gelu_in, times the derivative of GELU there, and perhaps its sums
    over M as the bias gradient. In high precision gelu_in is not taken."""
    if not gradient.wanted.rowwise:
        assert gradient.g_MN is not None and gelu_in is None
        w_NK = values_of(tensors, settings.fwd_fmt, order, gradient.g_MN.dtype)
        record(tag)
        return GemmParts(high_precision.dgrad(gradient.g_MN, w_NK, dtype), None, None)
    assert order is not None
    w = operand_of(tensors, settings.fwd_fmt, order)
    if settings.one_copy:
        w = columnwise_of(w, settings)
    form = form_of(gradient.q.row_codes.device, settings)  # type: ignore[union-attr]
    g_row = row_operand(gradient.q, gradient.wanted.fmt, form)
    return gemm_2d(
        w, g_row, gelu=gelu, gelu_in=gelu_in,
        bias_grad="result" if bias_grad else None, out_dtype=dtype, tag=tag, mode=mode_of(settings),
    )  # fmt: skip


def wgrad(
    gradient: Gradient, tensors: tuple[Tensor, ...], order: str | None, settings: Settings, tag: int
) -> Wgrad:
    """The GEMM dw [N, K] = g^T @ x, to be run now or later."""
    reads: Reads = ((INPUT, tensors[0]),) if order is None else ()
    if gradient.wanted.columnwise is None:
        g_MN = gradient.g_MN
        assert g_MN is not None

        def in_high_precision(out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
            record(tag)
            x_MK = values_of(tensors, settings.fwd_fmt, order, g_MN.dtype)
            return high_precision.wgrad(g_MN, x_MK, out, dtype, accumulate)

        return Wgrad(in_high_precision, (*reads, (OUTPUT_GRADIENT, g_MN)))

    form = form_of(tensors[0].device, settings)
    g_col = col_operand(gradient.q, gradient.wanted.fmt, form)

    def gemm(out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
        x = _columns(tensors, order, settings, form)
        return gemm_2d(
            x, g_col, out=out, out_dtype=dtype, accumulate=accumulate, tag=tag,
            mode=mode_of(settings),
        ).out  # fmt: skip

    return Wgrad(gemm, reads)


def _columns(
    tensors: tuple[Tensor, ...], order: str | None, settings: Settings, form: GemmForm
) -> Operand:
    """The columnwise operand that was saved, or that of the input that was."""
    if order is not None:
        return operand_of(tensors, settings.fwd_fmt, order)
    wanted = Wanted(
        settings.fwd_fmt, False, form.columnwise, settings.scale_rule, form.spread
    )  # fmt: skip
    return col_operand(quantized(tensors[0], wanted), settings.fwd_fmt, form)


def weight_operands(
    standing: StandingWeight | None, weight_NK: Tensor | None, settings: Settings, need_dx: bool
) -> tuple[Operand, Operand | None]:
    """The operands of a weight for fprop and dgrad: kept ones, or made now. A weight that is kept
    without its master is None."""
    if standing is not None:
        return standing.row, standing.col
    assert weight_NK is not None
    return quantize_weight(weight_NK, settings, need_dx)
