"""Quantized operands of linear layers: what the quantizer is asked for, weights that stand still.

Shared by the autograd functions of every module family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.ops import (
    PLAIN,
    GemmForm,
    Made,
    Mode,
    Operand,
    Quantize,
    QuantizedParts,
    capturing,
    dequantize_2d,
    gemm_form,
    quantize_2d,
    standing_2d,
)
from te_mx.recipe import Settings

__all__ = [
    "StandingWeight",
    "capturing",
    "col_operand",
    "columnwise_of",
    "flatten",
    "form_of",
    "mode_of",
    "packed_alike",
    "plain_rows",
    "quantize_weight",
    "row_operand",
    "shaped",
    "standing_weight",
    "unflatten",
    "weight_call",
    "weight_operands",
]


class StandingWeight(NamedTuple):
    """A weight quantized once for several calls: rowwise, and columnwise where backward needs
    it."""

    settings: Settings
    row: Operand
    col: Operand | None
    made: Made = Made(0, None)

    def on_current_stream(self) -> StandingWeight:
        """This weight, once the current stream has waited for it."""
        operands = (self.row, self.col) if self.col is not None else (self.row,)
        tensors = [t for o in operands for t in (o.codes, o.scales)]
        self.made.await_on_current_stream(self.row.codes.device, *tensors)
        return self

    def serves(self, settings: Settings, device: torch.device, need_dx: bool) -> bool:
        """Whether a call with these settings on this device would quantize to the same."""
        need_col = need_dx and settings.backward is None and not settings.one_copy
        mine = self.settings
        return (
            (self.col is not None or not need_col)
            and self.row.codes.device == device
            and mine.fwd_fmt == settings.fwd_fmt
            and mine.scale_rule == settings.scale_rule
            and mine.one_copy == settings.one_copy
            # Operands that are plain serve every precision.
            and (
                self.row.order != "sm90"
                or (packed_alike(mine, settings) and not plain_rows(settings))
            )
        )


def flatten(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]; sizes of 0 included."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def shaped(t_MN: Tensor, shape: Sequence[int]) -> Tensor:
    """[M, N] -> [..., N], no view: autograd lets nobody change the view that a Function returns in
    place. It shares its version with t_MN, so that a change after t_MN was saved is noticed."""
    return t_MN if len(shape) == 2 else t_MN.view(shape).detach()


def unflatten(y_MN: Tensor, x: Tensor) -> Tensor:
    """[M, N] -> [..., N] with the leading dimensions of x [..., K]."""
    return y_MN if x.dim() == 2 else shaped(y_MN, (*x.shape[:-1], y_MN.shape[1]))


def mode_of(settings: Settings) -> Mode:
    """How the GEMMs multiply on GPUs."""
    return Mode(settings.precision, settings.spread, settings.split_k)


def packed_alike(one: Settings, other: Settings) -> bool:
    """Whether operands are packed the same way for both."""
    return (one.precision, one.spread) == (other.precision, other.spread)


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


def plain_rows(settings: Settings) -> bool:
    """Whether backward starts from the rowwise codes of the weight, which then stay plain: packed
    codes do not decode to the same values."""
    return settings.one_copy or settings.backward == "dequantized"


def quantize_weight(
    weight_NK: Tensor, settings: Settings, need_dx: bool, packed: bool = True
) -> tuple[Operand, Operand | None]:
    """One read of the weight: its operand for fprop, and the one for dgrad if `need_dx` and the
    settings ask for it.

    packed=False gives plain codes and scales on every device.
    """
    what, form = weight_call(weight_NK, settings, need_dx, packed)
    return weight_operands(quantize_2d(**what._asdict()), settings, form)


def weight_call(
    weight_NK: Tensor, settings: Settings, need_dx: bool, packed: bool = True
) -> tuple[Quantize, GemmForm]:
    """What to ask the quantizer for a weight, and the form of what it makes."""
    form = form_of(weight_NK.device, settings)
    if not packed or plain_rows(settings):
        form = form._replace(spread=PLAIN)
    need_col = need_dx and settings.backward is None and not settings.one_copy
    col = form.columnwise if need_col else None
    return Quantize(
        weight_NK, settings.fwd_fmt, True, col, settings.scale_rule, spread=form.spread
    ), form


def weight_operands(
    q: QuantizedParts, settings: Settings, form: GemmForm
) -> tuple[Operand, Operand | None]:
    """The rowwise operand of a quantized weight, and the columnwise one where it was asked for."""
    fmt = settings.fwd_fmt
    col = None if q.col_codes is None else col_operand(q, fmt, form)
    return row_operand(q, fmt, form), col


def columnwise_of(row: Operand, settings: Settings) -> Operand:
    """The columnwise operand of a weight of which only plain rowwise codes are left: what they
    decode to (in bf16, exact above 2^-133), quantized again."""
    values_NK = dequantize_2d(row.codes, row.scales, row.fmt, row.order, torch.bfloat16)
    form = form_of(row.codes.device, settings)
    q = quantize_2d(
        values_NK, row.fmt, rowwise=False, columnwise=form.columnwise,
        scale_rule=settings.scale_rule, spread=form.spread,
    )  # fmt: skip
    return col_operand(q, row.fmt, form)


def standing_weight(weight_NK: Tensor, settings: Settings, need_dx: bool) -> StandingWeight:
    """Quantize a weight that stands still, and pack it unless its plain codes are what is kept."""
    # Made outside of inference_mode, because a training step may use it later.
    with torch.inference_mode(False), torch.no_grad():
        row, col = quantize_weight(weight_NK, settings, need_dx)
        if plain_rows(settings):
            return StandingWeight(settings, row, None, Made.now(row.codes.device))
        row = standing_2d(row, "a", mode_of(settings))
        if col is not None:
            col = standing_2d(col, "a", mode_of(settings))
    return StandingWeight(settings, row, col, Made.now(row.codes.device))
