"""Leading dimensions: steps know matrices only."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


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
