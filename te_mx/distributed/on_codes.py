"""Modules that run on weights which FSDP2 gathered as codes (te_mx/distributed/fsdp.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor

from te_mx._ops import Made, Operand, Stack
from te_mx.autograd import node, weight_parts
from te_mx.autograd.grouped import KeptWeights
from te_mx.autograd.linear_recipe import KeptWeight, at_rest
from te_mx.context.region import is_tracing
from te_mx.distributed.gathered import GatheredWeight
from te_mx.distributed.local_layer import call, local_layer
from te_mx.nn.linear import Linear
from te_mx.recipes.settings import Settings


def run(module: Any, inp: Any, *args: Any) -> Any:
    """The forward of a module with gathered codes as weights."""
    held = module._parameters
    if type(module) is Linear and (kept := _alone(module, held, inp, args)) is not None:
        return module._on_codes(inp, kept)
    layer = local_layer(module, held, **gathered(module, held, module._settings()))
    return call(module, layer, inp, *args)


def _alone(module: Any, held: Mapping[str, Any], inp: Any, args: Any) -> KeptWeight | None:
    """What stands in for the weight of a layer that has nothing else to look at; None of others."""
    weight, bias = held.get("weight"), held.get("bias")
    if (
        not isinstance(weight, GatheredWeight)
        or isinstance(bias, (DTensor, GatheredWeight))
        or isinstance(inp, DTensor)
        or any(arg is not None for arg in args)
        or module._frozen is not None
        or module._routed()
        or is_tracing()
        or node.active()
    ):
        return None
    return _checked(module, "weight", weight, module._settings())


def gathered(module: Any, held: Mapping[str, Any], settings: Settings | None) -> dict[str, Any]:
    """What a local layer has to know where some of these parameters are gathered codes.

    Raises:
        RuntimeError: they are of another format than the active recipe wants.
    """
    found = {key: value for key, value in held.items() if isinstance(value, GatheredWeight)}
    if not found:
        return {}
    kept: dict[str, Any] = {}
    whole: Any = None
    for key in module._weight_keys:
        names = module._parts_of(key)
        if len(names) == 1 and names[0] in found:
            kept[key] = _checked(module, key, found[key], settings)
        elif names[0] in found:  # parameters_split, or halves of a gated fc1
            wanted = [_check(module, name, settings) for name in names]
            whole = weight_parts.cat([found[name] for name in names])
            kept[key] = _of_codes(whole, wanted[0])
    return {"_gathered": kept, "_joined": whole, "_ran_with": next(iter(kept.values())).settings}


def codes_of(module: Any, settings: Settings | None) -> tuple[dict[str, Any], Any]:
    """Gathered weights of a module, by name, and the settings that it runs with."""
    found = gathered(module, module._parameters, settings)
    return found["_gathered"], found["_ran_with"]


def _checked(module: Any, key: str, weight: GatheredWeight, settings: Settings | None) -> Any:
    return _kept(weight, _check(module, key, settings))


def _check(module: Any, key: str, settings: Settings | None) -> Settings:
    """Settings that a weight was quantized for; others are refused."""
    wanted = module._gathers[key]
    if settings is None or (settings.w, settings.scale_rule) != (wanted.w, wanted.scale_rule):
        active = "no recipe is active" if settings is None else f"the recipe wants {settings.w}"
        raise RuntimeError(
            f"{module._label()}: {key} was gathered as {wanted.w} ({wanted.scale_rule}) by "
            f"te_mx.distributed.quantized_all_gather, and {active}; run it under "
            "te_mx.autocast with the recipe that was given there"
        )
    return settings


def _kept(weight: GatheredWeight, settings: Settings) -> Any:
    """What stands in for a weight. Made once: FSDP2 gives the same tensors in every pass, filled
    again, and has the current stream wait for them."""
    if is_tracing():
        return _of_codes(weight, settings)
    if weight.kept is None or weight.kept[0] is not settings:
        weight.kept = settings, _of_codes(weight, settings)
    return weight.kept[1]


def _of_codes(weight: GatheredWeight, settings: Settings) -> Any:
    spec, with_codes = at_rest(weight.fmt), settings._replace(one_copy=True)
    if weight.dim() == 3:
        groups, rows, k = weight.shape
        stack = Stack(weight.codes, weight.scales, spec, groups, rows, k)
        return KeptWeights(with_codes, stack, None, Made(0, None))
    rows, k = weight.shape
    return KeptWeight(with_codes, Operand(weight.codes, weight.scales, spec, rows, k), None)
