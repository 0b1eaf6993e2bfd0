"""Modules that run on weights which FSDP2 gathered as codes (te_mx/distributed/fsdp.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from te_mx._ops import Operand, Stack
from te_mx.autograd import weight_parts
from te_mx.autograd.linear_recipe import KeptWeight, at_rest
from te_mx.context.region import is_tracing
from te_mx.distributed.gathered import GatheredWeight
from te_mx.distributed.local_layer import call, local_layer
from te_mx.recipes.settings import Settings
from te_mx.weights.source import Gathered, WeightSource


def run(module: Any, inp: Any, *args: Any) -> Any:
    """The forward of a module with gathered codes as weights."""
    held = module._parameters
    source = gathered(module, held, module._one_settings(), module._source)
    layer = local_layer(module, held, _source=source)
    return call(module, layer, inp, *args)


def gathered(
    module: Any, held: Mapping[str, Any], settings: Settings | None, source: WeightSource
) -> WeightSource:
    """The source of a layer that runs on these parameters: the given one, or that of codes where
    some of them are gathered so.

    Raises:
        RuntimeError: they are of another format than the active recipe wants.
    """
    found = {key: value for key, value in held.items() if isinstance(value, GatheredWeight)}
    if not found:
        return source
    kept: dict[str, Any] = {}
    whole: Any = None
    for key in module._weight_keys:
        names = module._parts_of(key)
        if len(names) == 1 and names[0] in found:
            kept[key] = _kept(found[key], _check(module, key, settings))
        elif names[0] in found:  # parameters_split, or halves of a gated fc1
            wanted = [_check(module, name, settings) for name in names]
            whole = weight_parts.cat([found[name] for name in names])
            kept[key] = _of_codes(whole, wanted[0])
    return Gathered(kept, whole, source)


def codes_of(module: Any, settings: Settings | None) -> WeightSource:
    """The source of a module whose weights are gathered as codes."""
    return gathered(module, module._parameters, settings, module._source)


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
    parts, (*groups, rows, k) = (weight.codes, weight.scales, at_rest(weight.fmt)), weight.shape
    held: Any = Stack(*parts, groups[0], rows, k) if groups else Operand(*parts, rows, k)
    return KeptWeight(settings._replace(one_copy=True), held, None)
