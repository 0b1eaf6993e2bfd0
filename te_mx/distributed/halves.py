"""The halves of a gated fc1 (te_mx/weights/gated_halves.py) as one DTensor, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    empty,
)

from te_mx.weights.ranks import shard_of


def _places(parts: Sequence[Any]) -> list[Placement]:
    """Where the rows of all parts are in one DTensor: every rank has one run of them."""
    cut = [getattr(place, "dim", None) for place in parts[0].placements]
    return [Replicate() if dim is None else Shard(dim) for dim in cut]


@torch.no_grad()
def join(parts: Sequence[Any]) -> DTensor:
    """One DTensor of the rows of several, which are gathered for it, and freed."""
    whole = torch.cat([_whole(part) for part in parts])
    return distribute_tensor(whole, parts[0].device_mesh, _places(parts), src_data_rank=None)


def blank(parts: Sequence[Any]) -> DTensor:
    """The same without values, and without a word to other ranks."""
    first = parts[0]
    shape = sum(len(part) for part in parts), *first.shape[1:]
    made: Any = empty(
        shape, dtype=first.dtype, device_mesh=first.device_mesh, placements=_places(parts)
    )  # fmt: skip
    made._te_mx_blank = shard_of(made)._version
    return made


def is_blank(tensor: Any) -> bool:
    """Whether it is such a one that nobody has filled."""
    version = getattr(tensor, "_te_mx_blank", None)
    return version is not None and version == shard_of(tensor)._version


@torch.no_grad()
def cut(whole: Tensor, like: Sequence[Any]) -> list[Tensor]:
    """The rows of a tensor, which every rank has or of which it has its part, as DTensors like
    those of a module."""
    rows = [len(part) for part in like]
    return [
        distribute_tensor(
            part.to(own.device), own.device_mesh, own.placements, src_data_rank=None
        ) if isinstance(own, DTensor) else part
        for part, own in zip(_whole(whole).split(rows), like, strict=True)
    ]  # fmt: skip


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
