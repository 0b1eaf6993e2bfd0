"""convert_model(fuse=True) where layers stay where they are, in models of any making: blocks and
normalizations get a class in place, and no name changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from te_mx.fuse import Fusion
from te_mx.fuse_blocks import Block, fuse_blocks, plan_blocks, unfuse_blocks


class InPlace(NamedTuple):
    """What is to be fused once the linear layers are converted."""

    blocks: list[Block]


NOTHING = InPlace([])


def plan_in_place(
    model: nn.Module,
    why_not: Callable[[nn.Linear], str],
    keeps: Callable[[nn.Module, str], bool],
) -> tuple[list[Fusion], InPlace]:
    """The report and what `fuse_in_place` is to do; arguments as of fuse.plan_fusions."""
    found, blocks = plan_blocks(model, why_not, keeps)
    return found, InPlace(blocks)


def fuse_in_place(plan: InPlace) -> None:
    """Fuse what was planned."""
    fuse_blocks(plan.blocks)


def unfuse_in_place(model: nn.Module) -> list[Fusion]:
    """Give back the classes that modules had."""
    return unfuse_blocks(model)
