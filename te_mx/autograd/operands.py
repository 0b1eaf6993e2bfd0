"""Shapes and weights that stand still: what the autograd functions of all families share beside
the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.ops import Made, Operand, forms
from te_mx.recipes.settings import Settings


class KeptWeight(NamedTuple):
    """A weight quantized once for several calls: rowwise, and columnwise where backward needs
    it."""

    settings: Settings
    row: Operand
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
        fmt, mode = settings.w, (settings.precision, settings.spread)
        row = forms(device, fmt, settings.x, *mode).row
        col = forms(device, fmt, settings.g, *mode).col
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


def needs_columns(settings: Settings, need_dx: bool) -> bool:
    """Whether dgrad starts from a columnwise copy made in forward."""
    return need_dx and settings.backward is None and not settings.one_copy


def same_weight(one: Settings, other: Settings) -> bool:
    """Whether a weight gets the same codes."""
    return (one.w, one.scale_rule, one.one_copy) == (other.w, other.scale_rule, other.one_copy)


def packs(settings: Settings) -> bool:
    """Whether a weight's rowwise copy may be packed: backward starts from plain codes otherwise,
    because packed ones do not decode to the same values."""
    return not settings.one_copy and settings.backward != "dequantized"


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
