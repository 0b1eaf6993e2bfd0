"""The frozen state of a grouped layer, and its state_dicts: one stacked entry, or one a group."""

from __future__ import annotations

from typing import Any

import torch

from te_mx.autograd.grouped_operands import StandingWeights
from te_mx.recipe import Settings


class GroupedFrozen:
    """How a layer is frozen: what quantized its weights, what trained, the quantized copy."""

    __slots__ = ("dropped", "settings", "trained", "weight")

    def __init__(self, settings: Settings, trained: dict[str, bool]) -> None:
        self.settings = settings
        self.trained = trained
        self.weight: StandingWeights | None = None
        self.dropped = False


def convert_state_dict(
    state_dict: Any, prefix: str, kind: str, groups: int, stacked: bool, error_msgs: list[str]
) -> None:
    """Make the entries `kind` ("weight" or "bias") of a layer in state_dict those that it holds,
    in place.

    ``weight`` [groups, ...] becomes ``weight0`` ..., or the other way round. What does not fit is
    left for load_state_dict to report, but a stack of another number of groups is reported here.
    """
    whole, parts = prefix + kind, [f"{prefix}{kind}{i}" for i in range(groups)]
    if stacked:
        if whole not in state_dict and all(key in state_dict for key in parts):
            held = [state_dict.pop(key) for key in parts]
            if len({tuple(t.shape) for t in held}) > 1:
                shapes = [tuple(t.shape) for t in held]
                error_msgs.append(f"{parts[0]} ... must have one shape to be stacked, got {shapes}")
                return
            state_dict[whole] = torch.stack(held)
    elif whole in state_dict and not any(key in state_dict for key in parts):
        value = state_dict.pop(whole)
        if len(value) != groups:
            error_msgs.append(
                f"{whole} holds {len(value)} groups, got a layer of {groups}: shapes must agree"
            )
            return
        state_dict.update(zip(parts, value.unbind(0), strict=True))
