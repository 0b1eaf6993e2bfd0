"""A fused MLP block (nn/fused_block.py) whose layers parallelize_module has split: its inner width
is on all ranks, in the first layers by rows and in the last one by columns. A rank runs its part of
the block as one step; DTensor moves the input and sums the result, as for the layers themselves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from te_mx.distributed import styles
from te_mx.distributed.inputs import local_of, placed
from te_mx.distributed.local_layer import check_whole_blocks
from te_mx.distributed.tensor_parallel import (
    COLUMN,
    ROW,
    WHOLE,
    contiguous,
    cuts_of,
    kind_of,
    local_of_layer,
    way_of,
    whole,
)
from te_mx.nn.fused_block import ATTRIBUTE, run_as_step, why_not_these
from te_mx.nn.surroundings import FUSED, why_not_given, why_not_usual

_MADE_BY = f"{distribute_module.__name__}.<locals>."
_INNER = (Shard(-1),)


def run(block: Any, x: Any) -> tuple[Any, str]:
    """The result of a block, and "fused"; or None and why its layers run one by one: then they also
    say what is wrong with their tensors, if anything is."""
    layers, settings, reason = block.layers_of_step(_why_not_usual)
    if settings is None or reason:
        return None, reason
    *first, last = layers
    act = block.__dict__[ATTRIBUTE].act
    if act.gated and len(first) == 1:
        return None, "its first layer makes gate and up, which ranks do not have half of each"
    if reason := _why_not_between(first, last):
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
    out: Any = DTensor.from_local(
        y, mesh, behind.y, run_check=False, shape=shape, stride=contiguous(shape)
    )
    for made in last._forward_hooks.values():
        out = made(last, (None,), out)
    return out, FUSED


# ------------------------------------------------------------------- hooks of parallelize_module
def _why_not_usual(name: str, layer: Any) -> str:
    """Why a layer is none that runs here, but for its tensors."""
    if reason := why_not_usual(name, layer):
        return reason
    if layer._gathers:
        return f"{name} is gathered as codes"
    before, behind = layer._forward_pre_hooks, layer._forward_hooks
    usual = (
        not (layer._backward_hooks or layer._backward_pre_hooks or "forward" in layer.__dict__)
        and not (layer._forward_pre_hooks_with_kwargs or layer._forward_hooks_with_kwargs)
        and all(_given(hook, "input_fn") for hook in before.values())
        and all(_given(hook, "output_fn") for hook in behind.values())
        and max(len(before), len(behind)) <= 1
    )
    return "" if usual else f"{name} has hooks other than those of parallelize_module"


def _given(hook: Any, name: str) -> Any:
    """The function that distribute_module was given, of a hook that it made; None of others, and of
    functions that no style of torch or te_mx has."""
    if not getattr(hook, "__qualname__", "").startswith(_MADE_BY):
        return None
    if name not in hook.__code__.co_freevars:
        return None
    made = hook.__closure__[hook.__code__.co_freevars.index(name)].cell_contents
    return made if isinstance(made, partial) and made.func in _KNOWN else None


def _known() -> dict[Any, Any]:
    """Functions of styles, and what each says of the inner width: whether that stays as the layer
    makes it, or is taken as it is made."""
    torch_into, torch_out = (lambda *its: its == (_INNER, _INNER)), (lambda to, _: to == _INNER)
    return {
        ColwiseParallel._prepare_input_fn: lambda *_: False,
        ColwiseParallel._prepare_output_fn: torch_out,
        RowwiseParallel._prepare_input_fn: torch_into,
        RowwiseParallel._prepare_output_fn: lambda *_: False,
        styles._prepare_input: lambda style: style.input_layouts == Shard(-1),
        styles._prepare_output: lambda style: style.output_layouts in (None, Shard(-1)),
    }


_KNOWN = _known()


def _of(layer: Any, hooks: str, name: str) -> Any:
    return next((_given(hook, name) for hook in getattr(layer, hooks).values()), None)


def _why_not_between(first: list[Any], last: Any) -> str:
    """Why what the first layers make does not go to the last one as it is."""
    into = [_of(one, "_forward_pre_hooks", "input_fn") for one in first]
    if any(_differ(one, into[0]) for one in into[1:]):
        return "its first layers take their input differently"
    made = [_of(one, "_forward_hooks", "output_fn") for one in first]
    taken = _of(last, "_forward_pre_hooks", "input_fn")
    local = [_makes_local(one) for one in made]
    if any(one != local[0] for one in local[1:]) or (local[0] and taken is None):
        return "its first layers give their results differently"
    if all(one is None or _KNOWN[one.func](*one.args) for one in (*made, taken)):
        return ""
    return "its inner width is not sharded along the features on all ranks"


def _makes_local(made: Any) -> bool:
    """Whether a plain tensor comes out of the hook."""
    if made is None:
        return False
    last = made.args[-1]
    return last if isinstance(last, bool) else last.use_local_output


def _differ(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is not other
    return one.func is not other.func or not _same(one.args, other.args)


def _same(one: Any, other: Any) -> bool:
    def of(args: Any) -> Any:
        return [getattr(a, "input_layouts", a) for a in args]

    return of(one) == of(other)
