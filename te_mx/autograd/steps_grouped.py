"""The steps of grouped linear layers that read the recipe: in which forms tokens and weights are
quantized, and weights that stand still."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx import formats
from te_mx._ops import Forms, Made, Stack
from te_mx._ops.grouped_gemm import kept_stack
from te_mx._ops.grouped_quantize import quantize_weights
from te_mx.autograd.steps import at_rest, mode_of, needs_columns, packs, roles, same_weight
from te_mx.recipes.settings import Settings


class KeptWeights(NamedTuple):
    """Weights quantized once for several calls: rowwise, and columnwise where backward needs it."""

    settings: Settings
    row: Stack
    col: Stack | None
    made: Made

    def on_current_stream(self) -> KeptWeights:
        """These weights, once the current stream has waited for them."""
        stacks = (self.row, self.col) if self.col is not None else (self.row,)
        tensors = [t for stack in stacks for t in (stack.codes, stack.scales)]
        self.made.await_on_current_stream(self.row.codes.device, *tensors)
        return self

    def serves(self, settings: Settings, device: torch.device, need_col: bool) -> bool:
        """Whether a call with these settings on this device would quantize to the same."""
        asked = weight_forms(device, settings)
        return (
            (self.col is not None or not needs_columns(settings, need_col))
            and self.row.codes.device == device
            and same_weight(self.settings, settings)
            and self.row.spec == asked.row
            and (self.col is None or self.col.spec == asked.col)
        )


class GroupForms(NamedTuple):
    """Specs of the operands of one call: tokens x and g by groups, weights; and their rules."""

    x: Forms
    g: Forms
    w: Forms
    rule: str
    g_rule: str
    w_col_rule: str
    one_copy: bool  # dgrad starts from the rowwise codes of the weights

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, settings: Settings) -> GroupForms:
        """Raises ValueError for formats of tokens whose blocks may lie in several groups."""
        check_rows_of_tokens(settings)
        device = x.device
        if x.numel() and weight.numel():
            tokens = roles(device, settings, "gemm_rows")
            rules = settings.scale_rule, settings.gradient_rule, settings.weight_columns_rule
            weights = weight_forms(device, settings)
            return cls(tokens.x, tokens.g, weights, *rules, settings.one_copy)
        # The quantizers of groups pack nothing that is empty.
        return cls(
            Forms(at_rest(settings.x), f"{settings.x_columns}@grouped_cols"),
            Forms(at_rest(settings.g), f"{settings.g_columns}@grouped_cols"),
            Forms(at_rest(settings.w), f"{settings.w_columns}@cols"),
            settings.scale_rule,
            settings.gradient_rule,
            settings.weight_columns_rule,
            settings.one_copy,
        )


def check_rows_of_tokens(settings: Settings) -> None:
    """Raise ValueError unless inputs and output gradients have blocks of one row."""
    for role, name in (("x", settings.x), ("g", settings.g)):
        if formats.get(name).scaling.block[0] != 1:
            raise ValueError(
                f"te_mx: {role} cannot have format {name}: its blocks hold several rows, which may "
                "belong to several groups; use a format with blocks of one row in grouped layers"
            )


def weight_forms(device: torch.device, settings: Settings) -> Forms:
    """Specs of weights; those whose bytes are kept are packed when they are multiplied."""
    form = roles(device, settings).w
    if form.col == at_rest(settings.w_columns):  # plain columns of all lie as the weights do
        form = form._replace(col=f"{settings.w_columns}@cols")
    return form if packs(settings) else form._replace(row=at_rest(settings.w))


def kept_weights(weights: Sequence[Tensor], settings: Settings, need_col: bool) -> KeptWeights:
    """Quantize and pack weights that stand still."""
    # Made outside of inference_mode, because a training step may use it later.
    with torch.inference_mode(False), torch.no_grad():
        first = weights[0]
        form = GroupForms.of(first, first, settings).w
        row, col = quantize_weights(
            weights, form.row, form.col if needs_columns(settings, need_col) else "",
            rule=settings.scale_rule,
        )  # fmt: skip
        if not packs(settings):
            return KeptWeights(settings, row, None, Made.now(row.codes.device))
        mode, given = mode_of(settings), roles(first.device, settings, "gemm_rows")
        packed = None if col is None else kept_stack(col, mode, given.g.row)
        made = Made.now(row.codes.device)
        return KeptWeights(settings, kept_stack(row, mode, given.x.row), packed, made)
