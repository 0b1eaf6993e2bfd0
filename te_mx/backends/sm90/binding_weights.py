"""Plain weights of groups on Hopper, which are packed when they are multiplied: weights frozen
without masters, and those of which a recipe keeps one copy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from te_mx.backends.base import FORMATS, LAYOUTS, SCALE_RULES, StackedOperand
from te_mx.backends.sm90 import binding as sm90
from te_mx.backends.sm90.binding_grouped import _empty, expect, groups_of, weights_shapes


def pack_weights(
    weights: StackedOperand, offs: Tensor, capacity: int, rows: int, spread: int
) -> StackedOperand:
    """Contiguous plain weights (either order) as operands of order "sm90", for a product with
    groups of `rows` rows. The operands of groups without rows are left uninitialized: nobody reads
    them, and a few tokens then need a few experts only. offs is on the device.
    """
    made = _empty(weights_shapes(weights.groups, weights.rows, weights.k), weights.codes.device)
    args = _pack_args(weights, made, spread)
    args.groups = groups_of(offs, capacity, rows)
    status = sm90.native().pack_stacked(args)  # type: ignore[union-attr]
    expect(status, f"{weights.groups} plain weights of {(weights.rows, weights.k)}")
    return StackedOperand(made[0][:, :, : weights.k], made[1], weights.fmt, "sm90")


def columns_of_weights(weights: StackedOperand, rule: str, spread: int) -> tuple[Tensor, Tensor]:
    """As te_mx::columns_of_weights with a spread, for contiguous weights that lie by rows and are
    not empty."""
    groups, rows, cols = weights.groups, weights.rows, weights.k
    made = _empty(weights_shapes(groups, cols, rows), weights.codes.device)
    args = _pack_args(weights, made, spread)
    args.groups_count, args.rule = groups, SCALE_RULES[rule]
    status = sm90.native().columns_of_stacked(args)  # type: ignore[union-attr]
    expect(status, f"the columns of {groups} plain weights of {(rows, cols)}")
    return made[0][:, :, :rows], made[1]


def _pack_args(weights: StackedOperand, made: tuple[Tensor, Tensor], spread: int) -> Any:
    """The native record of plain weights that are packed."""
    codes, scales, fmt, order = weights[:4]
    args = sm90.native().PackArgs()  # type: ignore[union-attr]
    args.codes, args.scales = codes.data_ptr(), scales.data_ptr()
    args.rows, args.k = weights.rows, weights.k
    args.element, args.layout = FORMATS[fmt], LAYOUTS[order]
    args.out_codes, args.out_scales = made[0].data_ptr(), made[1].data_ptr()
    args.out_layout, args.spread = LAYOUTS["sm90"], spread
    sm90.set_execution(args, codes.device.index)
    return args
