"""te_mx modules on DTensors: what ``parallelize_module``, ``distribute_module`` and fully_shard on
top of them make of their parameters.

A rank runs the layer on what it has (local_layer.py); DTensor moves what goes in and comes out. For
every dimension of the mesh the placement of the weight says how:

==============  ================  ==================  ==================  =====================
weight          input             its gradient        result              gradients
==============  ================  ==================  ==================  =====================
Shard(0)        Replicate         Partial             Shard(-1)           norm: Partial
Shard(1)        Shard(-1)         Shard(-1)           Partial             bias: Replicate
fc1, fc2 both   Replicate         Partial             Partial             norm: Partial
Replicate       tokens sharded    like the input      like the input      Partial, all
==============  ================  ==================  ==================  =====================

The bias of a result that is Partial is added by one rank, in its GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from te_mx.distributed.fsdp import Sharded, gathered, params_of
from te_mx.distributed.hooks import Wanted, wanted_of
from te_mx.distributed.inputs import local_of, placed
from te_mx.distributed.local_layer import call, check_whole_blocks, local_layer
from te_mx.distributed.nodes import answers_with, contiguous, may_sum, plain, spread, summed
from te_mx.distributed.nodes import local_of as local_of_parameter
from te_mx.distributed.owners import Placed
from te_mx.distributed.token_codes import tokens_of
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.nn.layernorm_linear import LayerNormLinear
from te_mx.nn.layernorm_mlp import LayerNormMLP

COLUMN, ROW, BOTH, EXPERTS, WHOLE = "column", "row", "both", "experts", "whole"
_NORM = ("layer_norm_weight", "layer_norm_bias")


class Elsewhere(torch.autograd.Function):
    """The bias of a rank that does not add it: zero, and the gradient passes as on the one that
    does, because every rank has the whole gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Counted(torch.autograd.Function):
    """What every rank has, with the same gradient on each: it is that of one rank, where gradients
    of ranks are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.counts else torch.zeros_like(grad), None


class Way(NamedTuple):
    """How a call runs, for each dimension of the mesh: what the weights are, where the input is to
    be, its gradient and the result."""

    kinds: list[str]
    x: list[Placement]
    x_grad: list[Placement]
    y: list[Placement]


def run(module: Any, inp: Any, *args: Any) -> Any:
    """The forward of a module of which the input or parameters are DTensors.

    Raises:
        TypeError: some of them are DTensors and others are not.
        ValueError: they are on different meshes, or the weights are sharded in a way that no rank
            can compute with: across blocks, or along other dimensions.
        NotImplementedError: what the module does besides has no meaning on a shard.
    """
    label = module._label()
    if module._is_dropped():
        raise NotImplementedError(
            f"{label}: frozen without its master weight, it takes no DTensor; unfreeze with "
            "te_mx.unfreeze_weights(model, dequantize=True), or give it inp.to_local()"
        )
    held = {name: p for name, p in module._parameters.items() if p is not None}
    mesh = mesh_of(label, held, inp)
    if isinstance(module, GroupedLinear):
        first = held[module._weight_names[0]]
    else:
        first = held.get(module._weight_keys[0])
    if first is None:
        raise NotImplementedError(
            f"{label}: parameters_split makes several parameters of one weight, whose shards are "
            "no shards of it; under DTensor use a layer for each"
        )
    kinds = [kind_of(module, label, held, dim) for dim in range(mesh.ndim)]
    _refuse(module, label, kinds)
    settings = module._settings()
    for name, size, ranks in cuts_of(module, kinds, mesh):
        check_whole_blocks(label, settings, name, size, ranks)
    if EXPERTS in kinds:
        return _run_experts(module, mesh, held, inp, args)
    x = inp if isinstance(inp, DTensor) else whole(inp, mesh)
    way = way_of(kinds, x.placements, x.ndim - 1)
    layer = local_of_layer(module, mesh, held, way)
    tokens = None if isinstance(module, GroupedLinear) else tokens_of(module, mesh, way.x, x)
    if tokens is None:
        x = placed(x, mesh, way.x)
        mine = local_of(x, way.x_grad)
    else:
        layer._tokens = tokens
        mine = local_of(x, list(x.placements))
    made = call(module, layer, mine, *args)
    y, *rest = made if isinstance(made, tuple) else (made,)
    out = _out_features(module)
    shape = torch.Size((*x.shape[:-1], out))
    if not isinstance(made, tuple):
        return result(y, mesh, way.y, shape, wanted_of(module))
    y = spread(y, mesh, way.y, shape)
    if module.return_bias:
        rest[0] = _bias_of(module)
    if getattr(module, "return_layernorm_output", False):
        own = way.x if tokens is None else list(x.placements)
        rest[-1] = _normalized(rest[-1], mesh, way, own, x.shape)
    return (y, *rest)


def result(
    y: Tensor, mesh: Any, places: list[Placement], shape: torch.Size, wanted: Wanted | None
) -> DTensor:
    """The DTensor of which a layer made y on this rank. Where the hook behind the layer is known to
    sum it over the ranks, that is done here, in place."""
    if wanted is None or mesh.ndim > 1 or not plain(y):
        return spread(y, mesh, places, shape)
    if places[0].is_partial() and wanted.whole() and may_sum(y):
        y, places = summed(y, mesh), [Replicate()]
    out = spread(y, mesh, places, shape)
    return answers_with(out, y) if wanted.local else out


def _normalized(z: Tensor, mesh: Any, way: Way, own: list[Placement], shape: torch.Size) -> DTensor:
    """The normalized input as a layer returns it, placed as what was normalized."""
    shares = [
        dim for dim, (kind, place) in enumerate(zip(way.kinds, own, strict=True))
        if kind != WHOLE and place.is_replicate()
    ]  # fmt: skip
    z = Counted.apply(z, all(mesh.get_local_rank(dim) == 0 for dim in shares))
    return DTensor.from_local(z, mesh, own, run_check=False, shape=shape, stride=contiguous(shape))


# ------------------------------------------------------------------------------ what is to be done
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
        one, two = (_dim_of(held[key].placements[dim]) for key in module._weight_keys)
        if (one, two) in ((0, 1), (None, None)):
            return WHOLE if one is None else BOTH
        raise ValueError(
            f"{label}: fc1_weight and fc2_weight must be Shard(0) and Shard(1), or both Replicate, "
            f"got {held['fc1_weight'].placements[dim]} and {held['fc2_weight'].placements[dim]}"
        )
    name = module._weight_names[0] if isinstance(module, GroupedLinear) else "weight"
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


def cuts_of(module: Any, kinds: list[str], mesh: Any) -> Iterator[tuple[str, int, int]]:
    """Sizes of weights that are cut, and for how many ranks. Cuts of out_features matter where a
    gradient is made, or where blocks have several rows."""
    for dim, kind in enumerate(kinds):
        ranks = mesh.size(dim)
        if kind == ROW:
            yield "in_features", module.in_features, ranks
        elif kind == COLUMN:
            yield "out_features", module.out_features, ranks
        elif kind == BOTH:
            yield "ffn_hidden_size", module.ffn_hidden_size, ranks


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
        elif name in _NORM:
            made.append(Partial())
        else:
            made.append(place)  # a shard; or Replicate, a bias that is added to a sum
    return made


# ------------------------------------------------------------------------------- what a rank has
def local_of_layer(module: Any, mesh: Any, held: dict[str, Any], way: Way) -> Any:
    routed = module._routed() and torch.is_grad_enabled()
    adds = all(
        kind not in (ROW, BOTH) or mesh.get_local_rank(dim) == 0
        for dim, kind in enumerate(way.kinds)
    )
    added: set[str] = set()
    if ROW in way.kinds:
        added.update(module._bias_names if isinstance(module, GroupedLinear) else ("bias",))
    if BOTH in way.kinds:
        added.add("fc2_bias")
    local: dict[str, Any] = dict.fromkeys(module._parameters)
    owned: dict[int, Any] = {}
    weights = _weights_of(module)
    for name, parameter in held.items():
        grads = _gradients_of(name, way, parameter.placements)
        if routed and name in weights and parameter.requires_grad:
            value = parameter.detach().to_local().requires_grad_()
            owned[id(value)] = _owner(module, parameter, grads)
        elif not parameter.requires_grad:
            with torch.no_grad():
                value = parameter.to_local()
        else:
            value = local_of_parameter(parameter, grads)
        if name in added and not adds:
            value = Elsewhere.apply(value)
        local[name] = value
    return local_layer(
        module, local, _owned=owned or None, **_sizes(module, local),
        **gathered(module, local, module._settings()),
    )  # fmt: skip


def _owner(module: Any, parameter: Any, grads: list[Placement]) -> Any:
    """Whom the gradient of a weight belongs to: where fully_shard lends it, what it is made of."""
    placed = Placed(parameter, grads)
    for param in params_of(module).values():
        if getattr(param, "_unsharded_param", None) is parameter:
            return Sharded(param, before=placed)
    return placed


def _weights_of(module: Any) -> tuple[str, ...]:
    return module._weight_names if isinstance(module, GroupedLinear) else module._weight_keys


def _sizes(module: Any, local: dict[str, Any]) -> dict[str, int]:
    """The sizes of a local layer."""
    if isinstance(module, LayerNormMLP):
        return {"ffn_hidden_size": local["fc2_weight"].shape[1]}
    weight = local[_weights_of(module)[0]]
    sizes = {"out_features": weight.shape[-2], "in_features": weight.shape[-1]}
    if isinstance(module, GroupedLinear) and module.single_grouped_weight:
        sizes["num_gemms"] = weight.shape[0]
    return sizes


def _run_experts(module: Any, mesh: Any, held: dict[str, Any], inp: Any, args: Any) -> Any:
    """Stacked weights, Shard(0): every rank runs the rows of its own experts, which the caller has
    sent there."""
    if isinstance(inp, DTensor):
        raise TypeError(
            f"{module._label()}: experts are on several ranks, so inp must be the rows of those of "
            "this rank, a plain tensor, and m_splits theirs; got a DTensor: inp.to_local()"
        )
    if mesh.ndim > 1:
        raise NotImplementedError(
            f"{module._label()}: experts are sharded over a mesh of one dimension, got {mesh}"
        )
    way = Way([EXPERTS], [Replicate()], [Replicate()], [Replicate()])
    return call(module, local_of_layer(module, mesh, held, way), inp, *args)


def whole(inp: Any, mesh: Any) -> DTensor:
    return DTensor.from_local(inp, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _out_features(module: Any) -> int:
    return module.hidden_size if isinstance(module, LayerNormMLP) else module.out_features


def _bias_of(module: Any) -> Any:
    if isinstance(module, GroupedLinear):
        return module._returned(module._held(*module._bias_names))
    return module.fc2_bias if isinstance(module, LayerNormMLP) else module.bias
