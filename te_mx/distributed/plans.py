"""What modules of te_mx do on DTensors: found out from placements once, and kept as long as they
stay what they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from te_mx.context.region import is_tracing
from te_mx.distributed.local_layer import check_whole_blocks
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.nn.layernorm_linear import LayerNormLinear
from te_mx.nn.layernorm_mlp import LayerNormMLP
from te_mx.nn.tensor_parallel import BOTH, COLUMN, EXPERTS, NORM, ROW, SIZES, biases_of_sum, cut_of
from te_mx.recipes.settings import Settings

WHOLE = "whole"  # beside the modes: every rank has all of it


class Way(NamedTuple):
    """How a call runs, for each dimension of the mesh: what the weights are, where the input is to
    be, its gradient and the result."""

    kinds: list[str]
    x: list[Placement]
    x_grad: list[Placement]
    y: list[Placement]


class Plan(NamedTuple):
    """How a module runs: on a mesh, in a way; where the gradient of each parameter lies; and which
    of them are biases that another rank adds. It holds for parameters that lie as these
    do, these settings and an input that is placed so, None for a plain tensor.
    """

    mesh: Any
    way: Way
    grads: dict[str, tuple[Placement, ...]]
    elsewhere: frozenset[str]
    held: tuple[tuple[Any, tuple[Placement, ...], torch.Size], ...]
    settings: Settings | None
    x: tuple[Placement, ...] | None
    x_ndim: int

    def serves(self, held: dict[str, Any], settings: Settings | None, x: Any) -> bool:
        """Whether it holds for a call."""
        if settings is not self.settings or len(held) != len(self.held):
            return False
        for parameter, (mesh, placements, shape) in zip(held.values(), self.held, strict=True):
            # A mesh counts by its identity: one of a group that is gone equals its successor.
            if not isinstance(parameter, DTensor) or parameter.device_mesh is not mesh:
                return False
            if parameter.placements != placements or parameter.shape != shape:
                return False
        if x.ndim != self.x_ndim:
            return False
        if not isinstance(x, DTensor):
            return self.x is None
        return x.placements == self.x and x.device_mesh == self.mesh


_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


def plan_of(module: Any, held: dict[str, Any], settings: Settings | None, inp: Any) -> Plan:
    """The plan of a call of a module.

    Raises:
        TypeError, ValueError, NotImplementedError: as tensor_parallel.run.
    """
    if is_tracing():
        return _made(module, held, settings, inp)
    plan = _plans.get(module)
    if plan is None or not plan.serves(held, settings, inp):
        plan = _plans[module] = _made(module, held, settings, inp)
    return plan


def _made(module: Any, held: dict[str, Any], settings: Settings | None, inp: Any) -> Plan:
    label = module._label()
    mesh = mesh_of(label, held, inp)
    first = held.get(module._parts_of(module._weight_keys[0])[0])
    if first is None or getattr(module, "_split", None) is not None:
        raise NotImplementedError(
            f"{label}: parameters_split makes several parameters of one weight, whose shards are "
            "no shards of it; under DTensor use a layer for each"
        )
    kinds = [kind_of(module, label, held, dim) for dim in range(mesh.ndim)]
    _refuse(module, label, kinds)
    check_cuts(module, settings, kinds, mesh)
    if EXPERTS in kinds:
        way = Way(kinds, [Replicate()], [Replicate()], [Replicate()])
        return planned(module, mesh, held, way, settings, inp)
    placements = inp.placements if isinstance(inp, DTensor) else (Replicate(),) * mesh.ndim
    return planned(module, mesh, held, way_of(kinds, placements, inp.ndim - 1), settings, inp)


def planned(
    module: Any, mesh: Any, held: dict[str, Any], way: Way, settings: Settings | None, inp: Any
) -> Plan:
    """The plan of a module that runs in a way."""
    adds = all(
        kind not in (ROW, BOTH) or mesh.get_local_rank(dim) == 0
        for dim, kind in enumerate(way.kinds)
    )
    grads = {name: tuple(_gradients_of(name, way, p.placements)) for name, p in held.items()}
    return Plan(
        mesh, way, grads, frozenset(() if adds else biases_of_sum(held, way.kinds)),
        tuple([(p.device_mesh, p.placements, p.shape) for p in held.values()]), settings,
        inp.placements if isinstance(inp, DTensor) else None, inp.ndim,
    )  # fmt: skip


def mesh_of(label: str, held: dict[str, Any], inp: Any) -> Any:
    spread = {name: p for name, p in held.items() if isinstance(p, DTensor)}
    if len(spread) < len(held):
        plain = next(name for name in held if name not in spread)
        have = f"{next(iter(spread))} is" if spread else "inp is"
        raise TypeError(
            f"{label}: {have} a DTensor and {plain} is not; make all parameters DTensors, with "
            "parallelize_module or distribute_module"
        )
    meshes = {name: p.device_mesh for name, p in spread.items()}
    if isinstance(inp, DTensor):
        meshes["inp"] = inp.device_mesh
    name, mesh = next(iter(meshes.items()))
    for other, its in meshes.items():
        if its != mesh:
            raise ValueError(
                f"{label}: {name} is on the mesh {mesh} and {other} on {its}; move one"
            )
    return mesh


def kind_of(module: Any, label: str, held: dict[str, Any], dim: int) -> str:
    """What the weights of a module are along one dimension of the mesh."""
    if isinstance(module, LayerNormMLP):
        names = module._parts_of("fc1_weight")
        places = [held[name].placements[dim] for name in (*names, "fc2_weight")]
        dims = [_dim_of(place) for place in places]
        if set(dims) == {None}:
            return WHOLE
        if dims != [cut_of(BOTH, name) for name in (*names, "fc2_weight")]:
            raise ValueError(
                f"{label}: {', '.join(names)} and fc2_weight must be Shard(0) and Shard(1), or all "
                f"Replicate, got {', '.join(map(str, places))}"
            )
        whole = len(names) == 1 and held[names[0]].device_mesh.size(dim) > 1
        if whole and module._act.gated:
            raise ValueError(
                f"{label}: the rows of fc1_weight are halves, what is activated and its gate, and "
                f"{places[0]} gives no rank the same part of both; shard the layer with "
                "te_mx.distributed.ModuleParallel"
            )
        return BOTH
    name = module._parts_of("weight")[0]
    kinds = [COLUMN, ROW]
    if isinstance(module, GroupedLinear) and module.single_grouped_weight:
        kinds = [EXPERTS, COLUMN, ROW]
    place = held[name].placements[dim]
    at = _dim_of(place)
    if place.is_partial():
        raise ValueError(f"{label}: {name} is {place}; redistribute it to Replicate or Shard")
    return WHOLE if at is None else kinds[at]


def _dim_of(place: Placement) -> int | None:
    return getattr(place, "dim", None)


def _refuse(module: Any, label: str, kinds: list[str]) -> None:
    """Raise NotImplementedError for what cannot be done on shards."""
    if isinstance(module, LayerNormLinear) and ROW in kinds:
        raise NotImplementedError(
            f"{label}: a weight that is Shard(1) needs an input sharded along its features, which "
            "cannot be normalized; shard it along dimension 0"
        )
    grouped = isinstance(module, GroupedLinear)
    if grouped and EXPERTS in kinds and not module.single_grouped_bias and module.use_bias:
        raise NotImplementedError(
            f"{label}: experts are sharded with their biases: single_grouped_bias=True"
        )


def check_cuts(module: Any, settings: Settings | None, kinds: list[str], mesh: Any) -> None:
    """Raise ValueError where a weight is not cut between blocks. Cuts of out_features matter where
    a gradient is made, or where blocks have several rows."""
    for dim, kind in enumerate(kinds):
        if name := SIZES.get(kind):
            size = getattr(module, name)
            check_whole_blocks(module._label(), settings, name, size, mesh.size(dim))


def way_of(kinds: list[str], x: Sequence[Placement], last: int) -> Way:
    """How layers of these kinds run on an input that is placed like x; `last` is its last
    dimension."""
    way = Way(kinds, [], [], [])
    for kind, place in zip(kinds, x, strict=True):
        if kind == ROW:
            asked: tuple[Placement, Placement, Placement] = Shard(last), Shard(last), Partial()
        elif kind in (COLUMN, BOTH):
            asked = Replicate(), Partial(), Shard(last) if kind == COLUMN else Partial()
        else:
            tokens = place.is_shard() and place.dim not in (last, -1)  # type: ignore[attr-defined]
            asked = (place,) * 3 if tokens else (Replicate(),) * 3
        for places, one in zip((way.x, way.x_grad, way.y), asked, strict=True):
            places.append(one)
    return way


def _gradients_of(name: str, way: Way, own: tuple[Placement, ...]) -> list[Placement]:
    """Where the gradient of a parameter is, for each dimension of the mesh."""
    made: list[Placement] = []
    for kind, x, place in zip(way.kinds, way.x, own, strict=True):
        whole = Partial() if x.is_shard() else Replicate()
        if kind == WHOLE:
            made.append(whole)
        elif name in NORM:
            made.append(Partial())
        else:
            made.append(place)  # a shard; or Replicate, a bias that is added to a sum
    return made
