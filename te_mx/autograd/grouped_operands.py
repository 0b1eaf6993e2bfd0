"""Operands of grouped linear layers: which rows belong to which group, how operands lie on the
device of a call, weights that stand still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.autograd import joining
from te_mx.autograd.operands import form_of, packed_alike, plain_rows
from te_mx.backends import reference_grouped
from te_mx.backends.grouped import StackedOperand, device_bounds, host_bounds, known_to_host
from te_mx.backends.sm90_grouped import offs_on_device
from te_mx.ops import PLAIN, Made, Operand, QuantizedParts
from te_mx.ops.grouped_gemm import standing_weights
from te_mx.ops.grouped_weights import quantize_weights
from te_mx.ops.library import is_direct
from te_mx.recipe import Settings


class Groups(NamedTuple):
    """Which rows belong to which group: end offsets int [G], and the capacity of a group or 0."""

    offs: Tensor
    capacity: int = 0


class StandingWeights(NamedTuple):
    """Weights quantized once for several calls: rowwise, and columnwise where backward needs it."""

    settings: Settings
    row: StackedOperand
    col: StackedOperand | None
    made: Made

    def on_current_stream(self) -> StandingWeights:
        """These weights, once the current stream has waited for them."""
        stacks = (self.row, self.col) if self.col is not None else (self.row,)
        tensors = [t for stack in stacks for t in (stack.codes, stack.scales)]
        self.made.await_on_current_stream(self.row.codes.device, *tensors)
        return self

    def serves(self, settings: Settings, device: torch.device, need_col: bool) -> bool:
        """Whether a call with these settings on this device would quantize to the same."""
        need_col = need_col and settings.backward is None and not settings.one_copy
        return (
            (self.col is not None or not need_col)
            and self.settings.one_copy == settings.one_copy
            and self.row.codes.device == device
            and self.settings.fwd_fmt == settings.fwd_fmt
            and self.settings.scale_rule == settings.scale_rule
            and (self.row.order == "sm90") == (standing_spread(device, settings) >= 0)
            # Operands that are plain serve every precision.
            and (self.row.order != "sm90" or packed_alike(self.settings, settings))
        )


def standing_spread(device: torch.device, settings: Settings) -> int:
    """How weights are packed that stand still: PLAIN, or the spread."""
    return PLAIN if plain_rows(settings) else form_of(device, settings).spread


def standing(weights: Sequence[Tensor], settings: Settings, need_col: bool) -> StandingWeights:
    """Quantize and pack weights that stand still."""
    need_col = need_col and settings.backward is None and not settings.one_copy
    # Made outside of inference_mode, because a training step may use it later.
    with torch.inference_mode(False), torch.no_grad():
        first = weights[0]
        spread = standing_spread(first.device, settings) if first.numel() else PLAIN
        row, col = quantize_weights(
            weights, settings.fwd_fmt, columnwise=need_col, scale_rule=settings.scale_rule,
            spread=spread,
        )  # fmt: skip
        if plain_rows(settings):
            return StandingWeights(settings, row, None, Made.now(row.codes.device))
        packed = None if col is None else standing_weights(col)
        made = Made.now(row.codes.device)
        return StandingWeights(settings, standing_weights(row), packed, made)


class Packing(NamedTuple):
    """How the operands of one call lie: packed with a spread, or plain. `offs` is where they are
    read."""

    spread: int
    offs: Tensor

    @classmethod
    def of(cls, x: Tensor, offs: Tensor, weight: Tensor, settings: Settings) -> Packing:
        spread = PLAIN
        if x.numel() and weight.numel():  # the quantizer of groups packs nothing that is empty
            spread = form_of(x.device, settings).spread
        if spread >= 0 and x.is_cuda and is_direct(x):
            offs = offs_on_device(offs, x.device)  # once for all ops
        return cls(spread, offs)

    def of_weights(self, settings: Settings) -> int:
        """The spread to quantize weights with; plain ones are packed when they are multiplied."""
        return PLAIN if plain_rows(settings) else self.spread

    def serves(self, kept: StandingWeights) -> bool:
        """Whether kept weights fit."""
        return kept.row.order != "sm90" or self.spread >= 0

    def rows(self, q: QuantizedParts, fmt: str) -> Operand:
        """The rowwise part of quantized tokens."""
        order = "sm90_rows" if self.spread >= 0 else "k_last"
        return Operand(q.row_codes, q.row_scales, fmt, order)  # type: ignore[arg-type]

    def columns(self, q: QuantizedParts, fmt: str) -> Operand:
        """The columnwise part."""
        order = "sm90_k" if self.spread >= 0 else "k_first"
        return Operand(q.col_codes, q.col_scales, fmt, order)  # type: ignore[arg-type]


def split_parts(
    parts: Sequence[Tensor], has_bias: bool
) -> tuple[list[Tensor] | Tensor, Tensor | None]:
    """(the weight of every group, or all in one [G, N, K]; biases [G, N] or None)."""
    if parts[0].dim() == 3:
        return parts[0], parts[1] if has_bias else None
    count = len(parts) // 2 if has_bias else len(parts)
    return list(parts[:count]), joining.stack(parts[count:]) if has_bias else None


def gradients_of(
    grad: Tensor | None, needed: Sequence[bool], stacked: bool
) -> tuple[Tensor | None, ...]:
    """The gradient of all groups as those of the parameters that need one."""
    if grad is None or stacked:
        return tuple(grad if need else None for need in needed)
    return tuple(g if need else None for g, need in zip(grad.unbind(0), needed, strict=False))


def other_backward(settings: Settings) -> bool:
    """Whether the recipe asks for a backward pass that is not three MXFP8 GEMMs on operands that
    were quantized from what they are made of."""
    return settings.backward is not None or settings.wgrad_hp


def col_sums(x: Tensor, groups: Groups) -> Tensor:
    """Sums over the rows of each group, fp32 [G, cols]; each is x[start:end].sum(0)."""
    offs, capacity = groups
    if not known_to_host(offs) or torch.compiler.is_compiling():
        return reference_grouped.col_sums(x, *device_bounds(offs, capacity, len(x)))
    bounds = zip(*host_bounds(offs, capacity, len(x)), strict=True)
    return torch.stack([x[start:end].sum(0, dtype=torch.float32) for start, end in bounds])
