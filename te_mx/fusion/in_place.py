"""convert_model(fuse=True) where layers stay where they are, in models of any making: blocks,
normalizations and attentions get a class in place, and no name changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch import nn

from te_mx.fusion import (
    fused_mlp,
    fused_norm,
)
from te_mx.fusion import (
    tables as stored_tables,
)
from te_mx.fusion.blocks import Block, plan_blocks
from te_mx.fusion.class_swap import give, take_back
from te_mx.fusion.losses import give_losses, plan_losses, take_losses
from te_mx.fusion.norms import FoundNorm, plan_norms
from te_mx.fusion.outputs import plan_outputs, save_inputs
from te_mx.fusion.sequences import Fusion
from te_mx.fusion.tables import Tables, plan_tables
from te_mx.nn.guards import RAN
from te_mx.nn.linear import Linear


class InPlace(NamedTuple):
    """What is to be fused once the linear layers are converted."""

    blocks: list[Block]
    norms: list[FoundNorm]
    outputs: list[nn.Module]
    tables: list[Tables]
    losses: list[nn.Module]


NOTHING = InPlace([], [], [], [], [])
# Classes that blocks, norms and tables get, the attribute that holds the plan of a module,
# and those that it gets in use.
_CLASSES: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (fused_mlp.FusedBlock, fused_mlp.ATTRIBUTE, (RAN,)),
    (fused_norm.FusedNorm, fused_norm.ATTRIBUTE, (RAN, fused_norm.READ)),
    (stored_tables.StoredTables, stored_tables.ATTRIBUTE, ()),
)


def plan_in_place(
    model: nn.Module,
    why_not: Callable[[nn.Linear], str],
    keeps: Callable[[nn.Module, str], bool],
    unlike: Callable[[Sequence[str]], str],
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
    found, blocks = plan_blocks(model, converts, why_not, unlike)
    modules = {block.module for block in blocks}
    normalizations, norms = plan_norms(model, converts, modules)
    attentions, outputs = plan_outputs(model, converts)
    rotary, tables = plan_tables(model, converts)
    losses, models = plan_losses(model) if converts else ([], [])
    plan = InPlace(blocks, norms, outputs, tables, models)
    return found + normalizations + attentions + rotary + losses, plan


def fuse_in_place(plan: InPlace) -> None:
    """Fuse what was planned."""
    save_inputs(plan.outputs)
    give_losses(plan.losses)
    all_found: tuple[list[Any], ...] = plan.blocks, plan.norms, plan.tables
    for found, (mixin, attribute, _) in zip(all_found, _CLASSES, strict=True):
        for module, its_plan in found:
            module.__dict__[attribute] = its_plan
            give(module, mixin)


def unfuse_in_place(model: nn.Module) -> list[Fusion]:
    """Give back the classes that modules had."""
    found = take_losses(model)
    for mixin, attribute, others in _CLASSES:
        for name, module in model.named_modules():
            if isinstance(module, mixin):
                reason = take_back(module, attribute, *others)
                found.append(Fusion(name or "(root)", "", type(module).__name__, reason))
    return found
