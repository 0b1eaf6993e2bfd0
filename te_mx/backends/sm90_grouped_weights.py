"""Plain weights of groups on Hopper, which are packed when they are multiplied: weights frozen
without masters, and those of which a recipe keeps one copy.
"""

from __future__ import annotations

from torch import Tensor

from te_mx.backends import sm90
from te_mx.backends.base import FORMATS, SCALE_RULES
from te_mx.backends.grouped import StackedOperand
from te_mx.backends.sm90_grouped import _addresses, _empty, _expect, _groups, weights_shapes


def pack_weights(
    weights: StackedOperand, offs: Tensor, capacity: int, rows: int, spread: int
) -> StackedOperand:
    """Contiguous plain weights (either order) as operands of order "sm90", for a product with
    groups of `rows` rows. The operands of groups without rows are left uninitialized: nobody reads
    them, and a few tokens then need a few experts only. offs is on the device.
    """
    made = _empty(weights_shapes(weights.groups, weights.rows, weights.k), weights.codes.device)
    index = offs.device.index
    status = sm90.native().pack_stacked(  # type: ignore[union-attr]
        _plain(weights), weights.rows, weights.k, _groups(offs, capacity, rows), spread,
        _addresses(made), sm90.stream(index), index,
    )  # fmt: skip
    _expect(status, f"{weights.groups} plain weights of {(weights.rows, weights.k)}")
    return StackedOperand(made[0][:, :, : weights.k], made[1], weights.fmt, "sm90")


def columns_of_weights(
    codes: Tensor, scales: Tensor, fmt: str, rule: str, spread: int
) -> tuple[Tensor, Tensor]:
    """As te_mx::columns_of_weights with a spread, for contiguous weights that are not empty."""
    groups, rows, cols = codes.shape
    made = _empty(weights_shapes(groups, cols, rows), codes.device)
    index = codes.device.index
    status = sm90.native().columns_of_stacked(  # type: ignore[union-attr]
        _plain(StackedOperand(codes, scales, fmt, "k_last")), rows, cols, groups,
        SCALE_RULES[rule], spread, _addresses(made), sm90.stream(index), index,
    )  # fmt: skip
    _expect(status, f"the columns of {groups} plain weights of {(rows, cols)}")
    return made[0][:, :, :rows], made[1]


def _plain(weights: StackedOperand) -> tuple[int, int, int, bool]:
    codes, scales, fmt, order, _ = weights
    return codes.data_ptr(), scales.data_ptr(), FORMATS[fmt].native_id, order == "k_first"
