"""The parameters of all groups and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_mx.autograd import joining
from te_mx.dispatch.grouped_calls import Groups
from te_mx.dispatch.groups import col_sums_on_device, device_bounds, host_bounds, readable

__all__ = ["Groups", "col_sums", "gradients_of", "split_parts"]


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


def col_sums(x: Tensor, groups: Groups) -> Tensor:
    """Sums over the rows of each group, fp32 [G, cols]; each is x[start:end].sum(0)."""
    offs, capacity = groups
    if not readable(offs):
        return col_sums_on_device(x, *device_bounds(offs, capacity, x.shape[0]))
    bounds = zip(*host_bounds(offs, capacity, x.shape[0]), strict=True)
    return torch.stack([x[start:end].sum(0, dtype=torch.float32) for start, end in bounds])
