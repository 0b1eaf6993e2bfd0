"""convert_model(fuse=True) where layers stay where they are, in models of any making: blocks,
normalizations and attentions get a class in place, and no name changes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from torch import nn

from te_mx.fusion.blocks import Block, fuse_blocks, plan_blocks, unfuse_blocks
from te_mx.fusion.norms import FoundNorm, fuse_norms, plan_norms, unfuse_norms
from te_mx.fusion.outputs import plan_outputs, save_inputs
from te_mx.fusion.readers import Readers, join_readers, part_readers, plan_readers
from te_mx.fusion.sequences import Fusion
from te_mx.nn.linear import Linear


class InPlace(NamedTuple):
    """What is to be fused once the linear layers are converted."""

    blocks: list[Block]
    norms: list[FoundNorm]
    outputs: list[nn.Module]
    readers: list[Readers]


NOTHING = InPlace([], [], [], [])


def plan_in_place(
    model: nn.Module,
    why_not: Callable[[nn.Linear], str],
    keeps: Callable[[nn.Module, str], bool],
    taken: Collection[nn.Module],
) -> tuple[list[Fusion], InPlace]:
    """The report and what `fuse_in_place` is to do; arguments as of fuse.plan_fusions. taken:
    layers that become part of another module."""
    stays: dict[nn.Linear, bool] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            other = module in taken or keeps(module, name)
            other = other or (type(module) is not Linear and bool(why_not(module)))
            stays[module] = stays.get(module, False) or other
    converts = {module for module, other in stays.items() if not other}
    found, blocks = plan_blocks(model, converts, why_not)
    modules = {block.module for block in blocks}
    normalizations, norms = plan_norms(model, converts, modules)
    attentions, outputs = plan_outputs(model, converts)
    joined, readers = plan_readers(model, converts)
    plan = InPlace(blocks, norms, outputs, readers)
    return found + normalizations + attentions + joined, plan


def fuse_in_place(plan: InPlace) -> None:
    """Fuse what was planned."""
    fuse_blocks(plan.blocks)
    fuse_norms(plan.norms)
    save_inputs(plan.outputs)
    join_readers(plan.readers)


def unfuse_in_place(model: nn.Module) -> list[Fusion]:
    """Give back the classes that modules had."""
    return unfuse_blocks(model) + unfuse_norms(model) + part_readers(model)
