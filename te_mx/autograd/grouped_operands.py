"""Operands of grouped linear layers: in which forms they are quantized, weights that stand still,
and what the parameters of all groups are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.autograd import joining
from te_mx.autograd.operands import needs_columns, packs, same_weight
from te_mx.autograd.steps import at_rest, mode_of, roles
from te_mx.dispatch.grouped_calls import Groups
from te_mx.dispatch.groups import col_sums_on_device, device_bounds, host_bounds, known_to_host
from te_mx.ops import Forms, Made, Stack
from te_mx.ops.grouped_gemm import kept_stack
from te_mx.ops.grouped_quantize import quantize_weights
from te_mx.recipes.settings import Settings

__all__ = ["GroupForms", "Groups", "KeptWeights"]


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
    """Specs of the operands of one call: tokens x and g by groups, weights."""

    x: Forms
    g: Forms
    w: Forms

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, settings: Settings) -> GroupForms:
        device = x.device
        if x.numel() and weight.numel():
            tokens = roles(device, settings, "gemm_rows")
            return cls(tokens.x, tokens.g, weight_forms(device, settings))
        # The quantizers of groups pack nothing that is empty.
        x_fmt, g_fmt, w_fmt = settings.x, settings.g, settings.w
        return cls(
            Forms(at_rest(x_fmt), f"{x_fmt}@grouped_cols"),
            Forms(at_rest(g_fmt), f"{g_fmt}@grouped_cols"),
            Forms(at_rest(w_fmt), f"{w_fmt}@cols"),
        )


def weight_forms(device: torch.device, settings: Settings) -> Forms:
    """Specs of weights; those whose bytes are kept are packed when they are multiplied."""
    form = roles(device, settings).w
    if form.col == at_rest(settings.w):  # plain columns of all weights lie as the weights do
        form = form._replace(col=f"{settings.w}@cols")
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
    """Whether the recipe asks for a backward pass that is not three GEMMs on operands that were
    quantized from what they are made of."""
    return settings.backward is not None or settings.wgrad_hp


def col_sums(x: Tensor, groups: Groups) -> Tensor:
    """Sums over the rows of each group, fp32 [G, cols]; each is x[start:end].sum(0)."""
    offs, capacity = groups
    if not known_to_host(offs) or torch.compiler.is_compiling():
        return col_sums_on_device(x, *device_bounds(offs, capacity, len(x)))
    bounds = zip(*host_bounds(offs, capacity, len(x)), strict=True)
    return torch.stack([x[start:end].sum(0, dtype=torch.float32) for start, end in bounds])
