"""A fused MLP (fusion/fused_mlp.py) whose layers parallelize_module has split: its inner width
is on all ranks, in the first layers by rows and in the last one by columns. A rank runs its part of
the block as one step; DTensor moves the input and sums the result, as for the layers themselves."""

import weakref
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from te_mx.distributed.collectives import local_of_input, placed
from te_mx.distributed.styles import hooks_of, same_objects, why_not_between, why_not_usual
from te_mx.distributed.tensor_parallel import (
    WHOLE,
    Plan,
    behind_hook,
    check_cuts,
    kind_of,
    local_of_layer,
    planned,
    result,
    way_of,
    whole,
)
from te_mx.fusion.fused_mlp import ATTRIBUTE, run_as_step, why_not_these
from te_mx.nn.guards import FUSED, why_not_given
from te_mx.nn.tensor_parallel import COLUMN, ROW
from te_mx.recipes.settings import Settings
from te_mx.weights.ranks import shard_of


class _Found(NamedTuple):
    """How a block ran: with which hooks, on an input placed so, and how its layers."""

    hooks: list[Any]
    plans: list[Plan]


_found: weakref.WeakKeyDictionary[Any, _Found] = weakref.WeakKeyDictionary()


def run_block(block: Any, x: Any) -> tuple[Any, str]:
    """The result of a block, and "fused"; or None and why its layers run one by one: then they also
    say what is wrong with their tensors, if anything is."""
    layers, settings, reason = block.layers_of_step(why_not_usual)
    if settings is None or reason:
        return None, reason
    act = block.__dict__[ATTRIBUTE].act
    if act.gated and len(layers) == 2:
        return None, "its first layer makes gate and up, which ranks do not have half of each"
    spread = [{k: p for k, p in one._parameters.items() if p is not None} for one in layers]
    if not all(isinstance(p, DTensor) for held in spread for p in held.values()):
        return None, "some of its parameters are DTensors, others are not"
    if reason := why_not_given(shard_of(x) if isinstance(x, DTensor) else x):
        return None, reason
    hooks = [hook for one in layers for hook in hooks_of(one)]
    for hook in layers[0]._forward_pre_hooks.values():
        x = hook(layers[0], (x,))
    x = x[0] if isinstance(x, tuple) else x
    mesh = layers[-1].weight.device_mesh
    x = x if isinstance(x, DTensor) else whole(x, mesh)
    plans, reason = _plans(block, layers, spread, hooks, settings, x)
    if reason:
        return None, reason
    *first, last = plans
    x = placed(x, mesh, first[0].way.x)
    local = [
        local_of_layer(one, plan, held)
        for one, plan, held in zip(layers, plans, spread, strict=True)
    ]
    own = [one._source.owned for one in local if one._source.owned]
    owned = {k: v for one in own for k, v in one.items()} or None
    local[0].__dict__["_source"] = local[0]._source.shared_by(local[0]._source.lent, owned)
    mine = local_of_input(x, first[0].way.x_grad)
    if reason := why_not_these(mine, local):
        return None, reason
    y = run_as_step(act, local, mine, settings)
    total = behind_hook(layers[-1], y, mesh, last.way.y)
    if total is not None:
        return total, FUSED
    shape = torch.Size((*x.shape[:-1], layers[-1].out_features))
    out: Any = result(layers[-1], y, mesh, last.way.y, shape)
    for made in layers[-1]._forward_hooks.values():
        out = made(layers[-1], (None,), out)
    return out, FUSED


def _plans(
    block: Any, layers: list[Any], spread: list[dict[str, Any]], hooks: list[Any],
    settings: Settings, x: DTensor,
) -> tuple[list[Plan], str]:  # fmt: skip
    """The plans of the layers, or why they do not run as one step: found once."""
    found = _found.get(block)
    if found is not None and same_objects(hooks, found.hooks):
        pairs = zip(found.plans, spread, strict=True)
        if all(plan.serves(held, settings, x) for plan, held in pairs):
            return found.plans, ""
    plans, reason = _made(layers, spread, settings, x)
    if not reason:
        _found[block] = _Found(hooks, plans)
    return plans, reason


def _made(
    layers: list[Any], spread: list[dict[str, Any]], settings: Settings, x: DTensor
) -> tuple[list[Plan], str]:
    *first, last = layers
    if reason := why_not_between(first, last):
        return [], reason
    mesh = last.weight.device_mesh
    everything = [p for held in spread for p in held.values()] + [x]
    if any(p.device_mesh != mesh for p in everything):
        return [], "its input and its parameters are on several meshes"
    dims = range(mesh.ndim)
    kinds = [
        [kind_of(one, one._label(), held, dim) for dim in dims]
        for one, held in zip(layers, spread, strict=True)
    ]
    pairs = {COLUMN: ROW, WHOLE: WHOLE}
    behind_rows = [pairs.get(kind) for kind in kinds[0]]
    if any(one != kinds[0] for one in kinds[:-1]) or kinds[-1] != behind_rows:
        return [], "its layers are not split by rows in front of the activation and columns behind"
    for one, its in zip(layers, kinds, strict=True):
        check_cuts(one, settings, its, mesh)
    way = way_of(kinds[0], x.placements, x.ndim - 1)
    behind = way_of(kinds[-1], way.y, x.ndim - 1)
    if behind.x != way.y:
        return [], "what its first layers make is not what its last one reads"
    ways = [way] * len(first) + [behind]
    return [
        planned(one, mesh, held, its, settings, x)
        for one, held, its in zip(layers, spread, ways, strict=True)
    ], ""
