"""The steps of a weight that stands still: quantized once for several calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx import formats
from te_mx._ops import Made, Operand, kept_form, quantized
from te_mx.autograd.steps import (
    mode_of,
    needs_columns,
    packs,
    plan_weight,
    roles,
    same_weight,
)
from te_mx.recipes.settings import Settings

_WIDE = "mxfp8_e4m3"


class KeptWeight(NamedTuple):
    """A weight quantized once for several calls: rowwise, and columnwise where backward needs
    it."""

    settings: Settings
    row: Any  # an Operand; in compiled code perhaps a Sought
    col: Operand | None
    made: Made = Made(0, None)

    def on_current_stream(self) -> KeptWeight:
        """This weight, once the current stream has waited for it."""
        operands = (self.row, self.col) if self.col is not None else (self.row,)
        tensors = [t for o in operands for t in (o.codes, o.scales)]
        self.made.await_on_current_stream(self.row.codes.device, *tensors)
        return self

    def is_plain(self) -> bool:
        """Whether all operands give their bytes back."""
        return self.row.layout.exact and (self.col is None or self.col.layout.exact)

    def _is_as_asked(self, settings: Settings, device: torch.device) -> bool:
        """Whether a call would ask for operands that lie so."""
        row, col = roles(device, settings).w
        return self.row.spec == row and (self.col is None or self.col.spec == col)

    def serves(self, settings: Settings, device: torch.device, need_dx: bool) -> bool:
        """Whether a call with these settings on this device would quantize to the same."""
        mine = self.settings
        return (
            (self.col is not None or not needs_columns(settings, need_dx))
            and self.row.codes.device == device
            and same_weight(mine, settings)
            # Operands that give their bytes back serve every precision, and with every format.
            and (self.is_plain() or (packs(settings) and self._is_as_asked(settings, device)))
        )


def on_codes(settings: Settings) -> Settings:
    """The settings of a product with a weight of which only rowwise codes are left, for what
    follows its input back.

    dgrad starts from these codes, as under one_copy_weights. Where the recipe asks for the weight
    itself it gets the values of the codes, as in "dequantized". Columns of codes with fewer than 8
    bits are MXFP8, which holds the values of neighbouring rows as they are unless their scales lie
    more than 2^9 apart, while the codes' own format would round them once more.
    """
    backward = "dequantized" if settings.backward == "high_precision" else settings.backward
    w_col = settings.w_col
    if not w_col and formats.get(settings.w).element.bits < 8:
        w_col = _WIDE
    return settings._replace(one_copy=True, backward=backward, wgrad_hp=False, w_col=w_col)


def kept_weight(weight_NK: Tensor, settings: Settings, need_dx: bool) -> KeptWeight:
    """Quantize a weight that stands still, and pack it unless its plain codes are what is kept."""
    # Made outside of inference_mode, because a training step may use it later.
    with torch.inference_mode(False), torch.no_grad():
        device = weight_NK.device
        row, col, _ = quantized(
            weight_NK, plan_weight(device, settings, needs_columns(settings, need_dx))
        )
        assert row is not None
        if not packs(settings):
            return KeptWeight(settings, row, None, Made.now(device))
        mode, given = mode_of(settings), roles(device, settings)
        row = kept_form(row, "rhs", mode, given.x.row)
        if col is not None:
            col = kept_form(col, "rhs", mode, given.g.row)
    return KeptWeight(settings, row, col, Made.now(device))
