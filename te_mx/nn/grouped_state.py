"""state_dicts of a grouped layer: one stacked entry, or one a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.arguments import is_dense
from te_mx.autograd import joining
from te_mx.nn.frozen_state import SCALES


def part_names(whole: str, groups: int) -> list[str]:
    """The entries that a stacked one stands for: "weight0" ... of "weight", "weight0_scale" ... of
    "weight_scale"."""
    end = next((end for end in reversed(SCALES) if whole.endswith(end)), "")
    return [f"{whole.removesuffix(end)}{i}{end}" for i in range(groups)]


def convert_state_dict(
    state_dict: Any, whole: str, groups: int, stacked: bool, error_msgs: list[str]
) -> None:
    """Make an entry of a layer in state_dict what it holds, in place: ``whole`` [groups, ...] if
    `stacked`, else one for each group.

    What does not fit is left for load_state_dict to report, but a stack of another number of
    groups, or one of which parts are missing beside scales, is reported here.
    """
    parts = part_names(whole, groups)
    if not stacked:
        if whole in state_dict and not any(key in state_dict for key in parts):
            value = state_dict[whole]
            count = len(value) if isinstance(value, Tensor) and value.dim() else 0
            if count != groups:
                error_msgs.append(
                    f"{whole} holds {count} groups, got a layer of {groups}: shapes must agree"
                )
                return
            del state_dict[whole]
            state_dict.update(zip(parts, value.unbind(0), strict=True))
        return
    there = [key for key in parts if key in state_dict]
    if whole in state_dict or not there:
        return
    if len(there) < groups:
        if whole.endswith(SCALES):
            missing = [key for key in parts if key not in state_dict]
            error_msgs.append(f"{', '.join(missing)}: missing beside {there[0]}")
        return
    held = [state_dict[key] for key in parts]
    if not all(isinstance(part, Tensor) and is_dense(part) for part in held):
        error_msgs.append(f"{parts[0]} ... must be dense tensors, to be stacked")
        return
    for name, kinds in (
        ("shape", [tuple(t.shape) for t in held]),
        ("dtype", [t.dtype if t.element_size() == 1 else "high precision" for t in held]),
    ):
        if len(set(kinds)) > 1:
            error_msgs.append(f"{parts[0]} ... must have one {name} to be stacked, got {kinds}")
            return
    try:
        made = _stack(held)
    except (TypeError, ValueError, RuntimeError) as error:  # of dtypes, devices and subclasses
        error_msgs.append(f"{parts[0]} ... cannot be stacked: {error}")
        return
    for key in parts:
        del state_dict[key]
    state_dict[whole] = made


def _stack(parts: list[Tensor]) -> Tensor:
    """torch.stack, which does not know 8-bit floats everywhere."""
    if parts[0].element_size() > 1:
        return joining.stack(parts)
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
