"""Inputs of which every rank has some tokens, in front of layers that multiply all of them
(sequence parallelism): codes are gathered instead of values.

    forward    x of this rank, quantized rowwise and columnwise in one read; rowwise codes of all
               ranks for fprop
    kept       the columnwise codes of this rank's tokens
    backward   columnwise codes of all ranks for wgrad; dx summed over the ranks, this rank's tokens

Blocks of rows lie in one token. Those of columns run along the tokens: where a rank's are no whole
blocks, x itself is kept and gathered for wgrad. So every code is that of the whole input."""

from typing import Protocol

import torch
from torch import Tensor

from te_mx import formats
from te_mx._ops import Operand
from te_mx.autograd import linear_recipe
from te_mx.autograd.saved import SavedOperand, flatten, shaped
from te_mx.recipes.settings import Settings


class Tokens(Protocol):
    """The ranks that have the tokens, along the first dimension; te_mx.distributed has one."""

    @property
    def ranks(self) -> int:
        """How many there are."""

    def gathered(self, mine: Tensor) -> Tensor:
        """[n, ..] of every rank, [ranks * n, ..]."""

    def scattered(self, partial: Tensor) -> Tensor:
        """What every rank has of a sum, [ranks * n, ..], to this rank's [n, ..] of it."""


def takes(settings: Settings) -> bool:
    """Whether codes of some tokens are those of all tokens."""
    row, col = formats.get(settings.x), formats.get(settings.x_columns)
    return row.scaling.block[0] == 1 and not (row.tensor_scaled or col.tensor_scaled)


def plan_input(
    x: Tensor, settings: Settings, need_dw: bool, save_x: bool, tokens: Tokens | None
) -> linear_recipe.Input:
    """steps.plan_input, in layouts that stand one behind the other."""
    if tokens is None:
        return linear_recipe.plan_input(x.device, settings, need_dw, save_x)
    block = formats.get(settings.x_columns).scaling.block[1]
    cut = (x.numel() // max(x.shape[-1], 1)) % block != 0
    plan = linear_recipe.plan_input(x.device, settings, need_dw, save_x or cut)
    col = f"{settings.x_columns}@cols" if plan.target.col else ""
    return plan._replace(
        target=plan.target._replace(row=linear_recipe.plain_spec(settings.x), col=col)
    )


def rows_of_all(row: Operand | None, tokens: Tokens | None) -> Operand:
    """The operand of all tokens."""
    assert row is not None
    return row if tokens is None else _gathered(row, tokens)


def kept_of_all(kept: SavedOperand, tokens: Tokens | None) -> SavedOperand:
    """What was kept of this rank's tokens, of all of them."""
    if tokens is None or kept.tensors[0] is None:
        return kept
    if not kept.spec:
        return SavedOperand.itself(tokens.gathered(flatten(kept.tensor)))
    return SavedOperand.operand(_gathered(kept.as_operand(), tokens))


def shape_of_all(x: Tensor, tokens: Tokens | None) -> torch.Size:
    """The shape of x with all tokens."""
    return x.shape if tokens is None else torch.Size((x.shape[0] * tokens.ranks, *x.shape[1:]))


def unflatten_all(y_MN: Tensor, x: Tensor, tokens: Tokens | None) -> Tensor:
    """shapes.unflatten, with all tokens."""
    return shaped(y_MN, (*shape_of_all(x, tokens)[:-1], y_MN.shape[1]))


def sum_of_mine(dx: Tensor, tokens: Tokens | None) -> Tensor:
    """The gradient of this rank's tokens, of what every rank has of the gradient of all."""
    return dx if tokens is None else tokens.scattered(dx)


def _gathered(mine: Operand, tokens: Tokens) -> Operand:
    codes, scales, spec, rows, k = mine[:5]
    along_k = mine.layout.k_first
    return Operand(
        tokens.gathered(codes), tokens.gathered(scales), spec,
        rows if along_k else rows * tokens.ranks, k * tokens.ranks if along_k else k,
    )  # fmt: skip
