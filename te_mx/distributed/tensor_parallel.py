"""te_mx modules that several ranks share: on DTensors, as ``parallelize_module``,
``distribute_module`` and fully_shard on top of them make of their parameters (`run`), and with a
process group and plain parameters, as Transformer Engine's (`run_group`).

A rank runs the layer on what it has (local_layer.py). Around it DTensor moves what goes in and
comes out, or the collectives of the group do the same. For every dimension of the mesh the
placement of the weight says how; a group shares a layer in one of the first three ways:

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

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from te_mx.autograd import node, sequence_parallel
from te_mx.context.region import is_tracing
from te_mx.distributed.collectives import (
    COPIED,
    GATHERED,
    SCATTERED,
    Moved,
    OnOne,
    Ranks,
    answers_with,
    contiguous,
    here_of,
    lends,
    local_of,
    local_of_input,
    may_sum,
    placed,
    plain,
    spread,
    summed,
)
from te_mx.distributed.fsdp import Sharded, gathered_parameter, params_of, source_of
from te_mx.distributed.local_layer import call, check_whole_blocks, local_layer
from te_mx.distributed.styles import wanted_of
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.nn.layernorm_linear import LayerNormLinear
from te_mx.nn.layernorm_mlp import LayerNormMLP
from te_mx.nn.linear import Linear
from te_mx.nn.tensor_parallel import (
    BOTH,
    COLUMN,
    EXPERTS,
    NORM,
    ROW,
    SIZES,
    Shared,
    biases_of_sum,
    cut_of,
)
from te_mx.recipes.settings import Settings
from te_mx.runtime.arguments import check_flag, check_module


def run(module: Any, inp: Any, *args: Any) -> Any:
    """The forward of a module of which the input or parameters are DTensors.

    Raises:
        TypeError: some of them are DTensors and others are not.
        ValueError: they are on different meshes, or the weights are sharded in a way that no rank
            can compute with: across blocks, or along other dimensions.
        NotImplementedError: what the module does besides has no meaning on a shard.
    """
    module._source.needs_values(
        NotImplementedError,
        f"{module._label()}: frozen without its master weight, it takes no DTensor; unfreeze "
        "with te_mx.unfreeze_weights(model, dequantize=True), or give it inp.to_local()",
    )
    held = {name: p for name, p in module._parameters.items() if p is not None}
    settings = module._one_settings()
    plan = plan_of(module, held, settings, inp)
    mesh, way = plan.mesh, plan.way
    if EXPERTS in way.kinds:
        return _run_experts(module, plan, held, inp, args)
    x = inp if isinstance(inp, DTensor) else whole(inp, mesh)
    layer = local_of_layer(module, plan, held)
    tokens = None if isinstance(module, GroupedLinear) else tokens_of(module, mesh, way.x, x)
    if tokens is None:
        x = placed(x, mesh, way.x)
        mine = local_of_input(x, way.x_grad)
    else:
        layer._tokens = tokens
        mine = local_of_input(x, list(x.placements))
    made = call(module, layer, mine, *args)
    y, *rest = made if isinstance(made, tuple) else (made,)
    out = module.hidden_size if isinstance(module, LayerNormMLP) else module.out_features
    shape = torch.Size((*x.shape[:-1], out))
    if not isinstance(made, tuple):
        return result(module, y, mesh, way.y, shape)
    y = spread(y, mesh, way.y, shape)
    if module.return_bias:
        if isinstance(module, GroupedLinear):
            rest[0] = module._returned(module._held(*module._bias_names))
        else:
            rest[0] = module.fc2_bias if isinstance(module, LayerNormMLP) else module.bias
    if getattr(module, "return_layernorm_output", False):
        own = way.x if tokens is None else list(x.placements)
        rest[-1] = _normalized(rest[-1], mesh, way, own, x.shape)
    return (y, *rest)


def result(
    module: Any, y: Tensor, mesh: Any, places: list[Placement], shape: torch.Size
) -> DTensor:
    """The DTensor of which a layer made y on this rank. Where the hook behind the layer is known to
    sum it over the ranks, that is done here, in place."""
    wanted = wanted_of(module) if plain(y) and mesh.ndim == 1 else None
    if wanted is None:
        return spread(y, mesh, places, shape)
    if places[0].is_partial() and wanted.whole() and may_sum(y):
        y, places = summed(y, mesh.get_group(0)), [Replicate()]
    out = spread(y, mesh, places, shape)
    return answers_with(out, y) if wanted.local else out


def behind_hook(module: Any, y: Tensor, mesh: Any, places: list[Placement]) -> Tensor | None:
    """What comes out of the hook behind the layer that made y, where that is known to be a sum over
    the ranks, as a plain tensor; else None."""
    wanted = wanted_of(module) if plain(y) and mesh.ndim == 1 else None
    if wanted is None or not wanted.local or not wanted.whole():
        return None
    return summed(y, mesh.get_group(0)) if places[0].is_partial() and may_sum(y) else None


def _normalized(
    z: Tensor, mesh: Any, way: "Way", own: list[Placement], shape: torch.Size
) -> DTensor:
    """The normalized input as a layer returns it, placed as what was normalized."""
    shares = [
        dim for dim, (kind, place) in enumerate(zip(way.kinds, own, strict=True))
        if kind != WHOLE and place.is_replicate()
    ]  # fmt: skip
    z = OnOne.apply(z, True, all(mesh.get_local_rank(dim) == 0 for dim in shares))
    return DTensor.from_local(z, mesh, own, run_check=False, shape=shape, stride=contiguous(shape))


# ------------------------------------------------------------------------------- what a rank has
def local_of_layer(module: Any, plan: "Plan", held: dict[str, Any]) -> Any:
    """A module as this rank sees it."""
    routed = module._routed() and torch.is_grad_enabled()
    local: dict[str, Any] = dict.fromkeys(module._parameters)
    owned: dict[int, Any] = {}
    weights = _weights_of(module) if routed else ()
    lent = None
    if not routed and plan.settings is not None and lends(module):
        lent = here_of(held["weight"], plan.grads["weight"])
    for name, parameter in held.items():
        grads = plan.grads[name]
        if lent is not None and name == "weight":
            value = lent.local
        elif name in weights:
            value = parameter.detach().to_local().requires_grad_(parameter.requires_grad)
            owned[id(value)] = _owner(module, parameter, list(grads))
        elif not parameter.requires_grad:
            with torch.no_grad():
                value = parameter.to_local()
        else:
            value = local_of(parameter, grads)
        if name in plan.elsewhere:
            value = OnOne.apply(value, False, True)
        local[name] = value
    source = module._source.shared_by(lent, owned or None)
    source = source_of(module, local, plan.settings, source)
    return local_layer(module, local, _source=source, **_sizes(module, local))


class Placed:
    """Owner of a weight gradient (te_mx/autograd/grad_target.py): a DTensor parameter, of which
    every rank has a part or a copy; `grads` is how the ranks' gradients make one."""

    reached = False

    def __init__(self, parameter: Any, grads: list[Placement]) -> None:
        self.parameter, self._grads = parameter, grads

    def reduced(self, dw: Tensor) -> DTensor:
        """What ranks computed, as a DTensor that lies as the parameter does."""
        made = DTensor.from_local(
            dw, self.parameter.device_mesh, self._grads, run_check=False,
            shape=self.parameter.shape, stride=self.parameter.stride(),
        )  # fmt: skip
        return made.redistribute(placements=self.parameter.placements)


def _owner(module: Any, parameter: Any, grads: list[Placement]) -> Any:
    """Whom the gradient of a weight belongs to: where fully_shard lends it, what it is made of."""
    owner = Placed(parameter, grads)
    for param in params_of(module).values():
        if gathered_parameter(param) is parameter:
            return Sharded(module, param, before=owner)
    return owner


def _weights_of(module: Any) -> tuple[str, ...]:
    return tuple(name for key in module._weight_keys for name in module._parts_of(key))


def _sizes(module: Any, local: dict[str, Any]) -> dict[str, int]:
    """The sizes of a local layer."""
    if isinstance(module, LayerNormMLP):
        return {"ffn_hidden_size": local["fc2_weight"].shape[1]}
    weight = local[_weights_of(module)[0]]
    sizes = {"out_features": weight.shape[-2], "in_features": weight.shape[-1]}
    if isinstance(module, GroupedLinear) and module.single_grouped_weight:
        sizes["num_gemms"] = weight.shape[0]
    return sizes


def _run_experts(module: Any, plan: "Plan", held: dict[str, Any], inp: Any, args: Any) -> Any:
    """Stacked weights, Shard(0): a rank runs the rows of its own experts, sent there before."""
    if isinstance(inp, DTensor):
        raise TypeError(
            f"{module._label()}: experts are on several ranks, so inp must be the rows of those of "
            "this rank, a plain tensor, and m_splits theirs; got a DTensor: inp.to_local()"
        )
    if plan.mesh.ndim > 1:
        raise NotImplementedError(
            f"{module._label()}: experts are sharded over a mesh of one dimension, got {plan.mesh}"
        )
    return call(module, local_of_layer(module, plan, held), inp, *args)


def whole(inp: Any, mesh: Any) -> DTensor:
    return DTensor.from_local(inp, mesh, [Replicate()] * mesh.ndim, run_check=False)


WHOLE = "whole"  # beside the modes: every rank has all of it


# -------------------------------------------------------------- plans: found once from placements
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
    do, these settings and an input that is placed so, None for a plain tensor."""

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
    """How layers of these kinds run on an input placed like x, whose last dimension is `last`."""
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


# ---------------------------------------------------------------------------- with a process group
def run_group(module: Any, inp: Any, *args: Any) -> Any:
    """The forward of a layer that a group shares. With sequence parallelism tokens are sharded
    along dimension 0: the input is gathered, as it is or as codes, and the sum scattered; gradients
    of what every rank has (norm, bias of a sum) are left for the trainer to sum, which
    ``parameter.sequence_parallel`` tells it.

    Raises:
        RuntimeError: the layer has no group yet.
        ValueError: its parts are no whole blocks, or the tokens do not divide by the ranks.
    """
    how, group, label = module._shared, module._tp_group, module._label()
    if group is None:
        raise RuntimeError(
            f"{label}: it is built for tp_size={how.size} and has no group; call "
            "layer.set_tensor_parallel_group(group) first, also of a copy"
        )
    name = SIZES[how.mode]
    whole = getattr(module, name) * how.size
    check_whole_blocks(label, module._settings(), name, whole, how.size)
    held = dict(module._parameters)
    for key in biases_of_sum(held, (how.mode,)) if group.rank() != 0 else ():
        if held.get(key) is not None:
            held[key] = OnOne.apply(held[key], False, not how.sequence)
    x, tokens = inp, None
    if how.mode != ROW and how.sequence and gathers_codes(module, inp):
        tokens = Ranks(group, how.size)
    elif how.mode != ROW:
        x = Moved.apply(inp, *(GATHERED if how.sequence else COPIED), group)
        for key in NORM if not how.sequence else ():
            if held.get(key) is not None:
                held[key] = Moved.apply(held[key], *COPIED, group)
    source = source_of(module, held, module._settings(), module._source)
    layer = local_layer(module, held, _tokens=tokens, _source=source)
    made = call(module, layer, x, *args)
    y, *rest = made if isinstance(made, tuple) else (made,)
    if getattr(module, "return_layernorm_output", False):
        rest[-1] = _mine(rest[-1], how, group, tokens is not None)
    if how.mode != COLUMN:
        if how.sequence and y.shape[0] % how.size:
            raise ValueError(
                f"{label}: sequence_parallel=True shards {y.shape[0]} tokens (dimension 0) over "
                f"{how.size} ranks, which must divide it"
            )
        y = Moved.apply(y, *SCATTERED, group) if how.sequence else summed(y, group)
        if module.return_bias:
            rest[0] = module.whole_bias() if how.mode == ROW else module.fc2_bias
    return (y, *rest) if isinstance(made, tuple) else y


def _mine(z: Tensor, how: Shared, group: Any, is_mine: bool) -> Tensor:
    """The normalized input as a layer returns it: this rank's or all tokens, one gradient of it."""
    if is_mine:
        return z
    if how.sequence:
        return z.chunk(how.size)[group.rank()]
    return OnOne.apply(z, True, group.rank() == 0)


# -------------------------------------------------------------- inputs that are gathered as codes
def quantized_input_gather(model: nn.Module, enabled: bool = True) -> int:
    """Have the te_mx layers in `model` gather inputs whose tokens are sharded as codes and scales,
    1.03 bytes an element in MXFP8 instead of 2, and keep for backward what one rank has of them.

    Results are those of gathering values, bit for bit. Forward gathers rowwise codes, backward
    columnwise ones: two small gathers for a large one, and 1 / ranks of what is kept.
    LayerNormLinear and LayerNormMLP normalize the tokens of the rank alone, and sum the gradient of
    what they normalized over the ranks.

    It concerns te_mx.Linear, LayerNormLinear and LayerNormMLP in front of which tokens are gathered
    along dimension 0: with a process group and ``sequence_parallel=True``, or as DTensors whose
    gather is left to the layer (docs/distributed.md). Elsewhere, outside of te_mx.autocast and for
    weights of codes whose inputs are not quantized the values are gathered.

    Args:
        model: before or after it is sharded.
        enabled: False takes it back.

    Returns:
        The number of layers.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such layer in `model`.
    """
    check_module(model)
    check_flag("enabled", enabled)
    layers = [m for m in model.modules() if isinstance(m, (Linear, LayerNormLinear, LayerNormMLP))]
    if not layers:
        raise ValueError(
            f"no te_mx.Linear, LayerNormLinear or LayerNormMLP in {type(model).__name__}; call "
            "te_mx.convert_model first"
        )
    for layer in layers:
        layer._gathers_inputs = enabled
    return len(layers)


def gathers_codes(module: Any, inp: Tensor) -> bool:
    """Whether this call on tokens of one rank gathers codes."""
    if not module._gathers_inputs or inp.dim() < 2 or node.active():
        return False
    settings = module._one_settings()
    quantizes = module._source.quantizes_inputs
    return settings is not None and quantizes and sequence_parallel.takes(settings)


def tokens_of(module: Any, mesh: Any, wanted: Sequence[Placement], x: DTensor) -> Ranks | None:
    """The ranks whose tokens a layer gathers as codes, of an input x that is wanted elsewhere; None
    where it gathers values, or nothing."""
    moved = [dim for dim in range(mesh.ndim) if x.placements[dim] != wanted[dim]]
    if len(moved) != 1 or x.device_mesh != mesh or not gathers_codes(module, x):
        return None
    (dim,), ranks = moved, mesh.size(moved[0])
    whole_parts = x.placements[dim] == Shard(0) and x.shape[0] % ranks == 0
    if not whole_parts or wanted[dim] != Replicate():
        return None
    if any(place.is_shard(0) for place in wanted):
        return None  # tokens of several dimensions do not stand one behind the other
    return Ranks(mesh.get_group(dim), ranks)
