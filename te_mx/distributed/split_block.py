"""A fused MLP block (nn/fused_block.py) whose layers parallelize_module has split: its inner width
is on all ranks, in the first layers by rows and in the last one by columns. A rank runs its part of
the block as one step; DTensor moves the input and sums the result, as for the layers themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from te_mx.distributed.hooks import wanted_of, why_not_between, why_not_usual
from te_mx.distributed.inputs import local_of, placed
from te_mx.distributed.local_layer import check_whole_blocks
from te_mx.distributed.tensor_parallel import (
    COLUMN,
    ROW,
    WHOLE,
    cuts_of,
    kind_of,
    local_of_layer,
    result,
    way_of,
    whole,
)
from te_mx.nn.fused_block import ATTRIBUTE, run_as_step, why_not_these
from te_mx.nn.surroundings import FUSED, why_not_given



def run(block: Any, x: Any) -> tuple[Any, str]:
    """The result of a block, and "fused"; or None and why its layers run one by one: then they also
    say what is wrong with their tensors, if anything is."""
    layers, settings, reason = block.layers_of_step(why_not_usual)
    if settings is None or reason:
        return None, reason
    *first, last = layers
    act = block.__dict__[ATTRIBUTE].act
    if act.gated and len(first) == 1:
        return None, "its first layer makes gate and up, which ranks do not have half of each"
    if reason := why_not_between(first, last):
        return None, reason
    spread = [{k: p for k, p in one._parameters.items() if p is not None} for one in layers]
    if not all(isinstance(p, DTensor) for held in spread for p in held.values()):
        return None, "some of its parameters are DTensors, others are not"
    mesh = last.weight.device_mesh
    everything = [p for held in spread for p in held.values()] + [x] * isinstance(x, DTensor)
    if any(p.device_mesh != mesh for p in everything):
        return None, "its input and its parameters are on several meshes"
    dims = range(mesh.ndim)
    kinds = [
        [kind_of(one, one._label(), held, dim) for dim in dims]
        for one, held in zip(layers, spread, strict=True)
    ]
    pairs = {COLUMN: ROW, WHOLE: WHOLE}
    behind_rows = [pairs.get(kind) for kind in kinds[0]]
    if any(one != kinds[0] for one in kinds[:-1]) or kinds[-1] != behind_rows:
        return (
            None,
            "its layers are not split by rows in front of the activation and columns behind",
        )
    for one, its in zip(layers, kinds, strict=True):
        for name, size, ranks in cuts_of(one, its, mesh):
            check_whole_blocks(one._label(), settings, name, size, ranks)
    if reason := why_not_given(x._local_tensor if isinstance(x, DTensor) else x):
        return None, reason

    for hook in first[0]._forward_pre_hooks.values():
        x = hook(first[0], (x,))
    x = x[0] if isinstance(x, tuple) else x
    x = x if isinstance(x, DTensor) else whole(x, mesh)
    way = way_of(kinds[0], x.placements, x.ndim - 1)
    behind = way_of(kinds[-1], way.y, x.ndim - 1)
    if behind.x != way.y:
        return None, "what its first layers make is not what its last one reads"
    x = placed(x, mesh, way.x)
    local = [
        local_of_layer(one, mesh, held, way if one is not last else behind)
        for one, held in zip(layers, spread, strict=True)
    ]
    own = [one._owned for one in local if one._owned]
    local[0].__dict__["_owned"] = {k: v for one in own for k, v in one.items()} or None
    here = local_of(x, way.x_grad)
    if reason := why_not_these(here, local):
        return None, reason
    y = run_as_step(act, local, here, settings)
    shape = torch.Size((*x.shape[:-1], last.out_features))
    out: Any = result(y, mesh, behind.y, shape, wanted_of(last))
    for made in last._forward_hooks.values():
        out = made(last, (None,), out)
    return out, FUSED
