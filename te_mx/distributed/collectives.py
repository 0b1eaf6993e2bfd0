"""What layers that ranks share do between the ranks, with the gradient of each move: for DTensors
(tensor_parallel.py) and for process groups (groups.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a group."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def summed_here(x: Tensor, group: Any) -> Tensor:
    """The same in the memory of x, which is contiguous and nobody else has; not in a graph."""
    total = x.detach()
    dist.all_reduce(total, group=group)
    return total


def gathered(mine: Tensor, group: Any) -> Tensor:
    """[n, ..] of every rank of a group, one behind the other."""
    made = mine.new_empty(dist.get_world_size(group) * mine.shape[0], *mine.shape[1:])
    dist.all_gather_into_tensor(made, mine.contiguous(), group=group)
    return made


def scattered(partial: Tensor, group: Any) -> Tensor:
    """This rank's part along dimension 0 of the sum over a group."""
    made = partial.new_empty(partial.shape[0] // dist.get_world_size(group), *partial.shape[1:])
    dist.reduce_scatter_tensor(made, partial.contiguous(), group=group)
    return made


def _same(x: Tensor, group: Any) -> Tensor:
    return x.view_as(x)


_MOVES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "same": _same, "sum": summed, "sum here": summed_here, "gather": gathered, "scatter": scattered
}  # fmt: skip
# What is made of x, and of the gradient of that.
COPIED = "same", "sum"  # what every rank has, read by its part of a layer
SUMMED = "sum", "same"  # parts of a sum
SUMMED_HERE = "sum here", "same"
GATHERED = "gather", "scatter"  # tokens of all ranks
SCATTERED = "scatter", "gather"  # of a sum, the tokens of this rank


class Moved(torch.autograd.Function):
    """A tensor on its way between the ranks of a group, one of the pairs above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: str, back: str, group: Any) -> Tensor:
        ctx.back, ctx.group = back, group
        return _MOVES[there](x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _MOVES[ctx.back](grad, ctx.group), None, None, None


class OnOne(torch.autograd.Function):
    """What every rank has and one uses: zeros on those that do not (`uses`), such as a bias of a
    sum. Its gradient passes, or is zero where that of another rank counts (`counts`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, uses: bool, counts: bool) -> Tensor:
        ctx.counts = counts
        return x.view_as(x) if uses else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.counts else torch.zeros_like(grad), None, None


class Ranks(NamedTuple):
    """The ranks of a group, as autograd/sequence_parallel.py sees them."""

    group: Any
    ranks: int

    def gathered(self, mine: Tensor) -> Tensor:
        """[n, ..] of every rank, [ranks * n, ..]."""
        return gathered(mine, self.group)

    def scattered(self, partial: Tensor) -> Tensor:
        """This rank's part [n, ..] of the sum of [ranks * n, ..]."""
        return scattered(partial, self.group)
