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

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from te_mx.distributed.collectives import OnOne
from te_mx.distributed.fsdp import Sharded, gathered_parameter, params_of
from te_mx.distributed.hooks import wanted_of
from te_mx.distributed.local_layer import call, local_layer
from te_mx.distributed.nodes import (
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
from te_mx.distributed.on_codes import gathered
from te_mx.distributed.plans import WHOLE, Plan, Way, plan_of
from te_mx.distributed.token_codes import tokens_of
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.nn.layernorm_mlp import LayerNormMLP
from te_mx.nn.tensor_parallel import EXPERTS


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
        rest[0] = _bias_of(module)
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


def _normalized(z: Tensor, mesh: Any, way: Way, own: list[Placement], shape: torch.Size) -> DTensor:
    """The normalized input as a layer returns it, placed as what was normalized."""
    shares = [
        dim for dim, (kind, place) in enumerate(zip(way.kinds, own, strict=True))
        if kind != WHOLE and place.is_replicate()
    ]  # fmt: skip
    z = OnOne.apply(z, True, all(mesh.get_local_rank(dim) == 0 for dim in shares))
    return DTensor.from_local(z, mesh, own, run_check=False, shape=shape, stride=contiguous(shape))


# ------------------------------------------------------------------------------- what a rank has
def local_of_layer(module: Any, plan: Plan, held: dict[str, Any]) -> Any:
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
    source = gathered(module, local, plan.settings, source)
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


def _run_experts(module: Any, plan: Plan, held: dict[str, Any], inp: Any, args: Any) -> Any:
    """Stacked weights, Shard(0): every rank runs the rows of its own experts, which the caller has
    sent there."""
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


def _bias_of(module: Any) -> Any:
    if isinstance(module, GroupedLinear):
        return module._returned(module._held(*module._bias_names))
    return module.fc2_bias if isinstance(module, LayerNormMLP) else module.bias
