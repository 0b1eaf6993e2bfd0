"""Conversions of Transformers that merge, split or rename weights, for codes and scales as well."""

import re
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter

from te_mx.integrations.checkpoints import Plan, plan_of
from te_mx.integrations.checkpoints.tensors import Numbers, OneAMatrix, Scales


def with_codes(conversions: Any, model: Any, plan: Plan, number: tuple[int, ...]) -> list[Any]:
    """The conversions, and beside each that merges or renames weights one for their codes and one
    for their scales, as far as the model has such. number: the shape of what is one a matrix."""
    names = "\n".join(model.state_dict())
    made = []
    for one in conversions:
        made.append(one)
        if not isinstance(one, WeightConverter):
            continue
        sources, targets = one._original_source_patterns, one._original_target_patterns
        if not all(source.endswith(".weight") for source in sources):
            continue
        code_end, scale_end, *number_end = plan.ends
        steps: dict[str, tuple[list[Any], list[Any]]] = {code_end: ([], [])}
        # float8_e4m3fn scales, of NVFP4, are merged as they are.
        steps[scale_end] = ([] if number_end else [Scales(plan.has_bytes)], [])
        if plan.of_tensor:
            steps[scale_end] = [Numbers(number)], []
        steps |= {end: ([Numbers(number)], [OneAMatrix(len(sources))]) for end in number_end}
        for end, (first, last) in steps.items():
            if end and re.search(f"{targets[0]}{end}$", names, re.MULTILINE):
                given, made_of = ([one + end for one in each] for each in (targets, sources))
                made.append(_like(one, made_of, given, first, last))
        if plan.inputs:
            named = [f"{source.removesuffix('weight')}{plan.inputs}" for source in sources]
            targets = [f"{target}_{plan.inputs}" for target in targets]
            if re.search(f"{targets[0]}$", names, re.MULTILINE):
                made.append(_like(one, named, targets, [Numbers(number)], []))
    return made


def convert_scales_too(model: Any, fields: dict[str, Any]) -> None:
    """Have ``save_pretrained`` split and rename the scales of stacked experts as it does their
    weights. `fields`: the model's quantization_config."""
    known = getattr(model, "_weight_conversions", None)
    if known is None:  # the model was not loaded: what save_pretrained would take
        found = get_model_conversion_mapping(model, add_legacy=False)
        known = [one for one in found if not isinstance(one, PrefixChange)]
    plan = plan_of(fields)
    assert isinstance(plan, Plan)  # of what te_mx writes
    model._weight_conversions = with_codes(known, model, plan, (1,) if plan.reciprocal else ())


def _like(
    converter: Any, sources: list[str], targets: list[str], first: list[Any], last: list[Any]
) -> Any:
    """A converter like this one, of tensors with other names, with these steps before and after."""
    copy = WeightConverter(sources, targets, [*first, *converter.operations, *last])
    for name in ("force_cpu", "scope_prefix", "base_model_prefix"):
        if hasattr(converter, name):
            setattr(copy, name, getattr(converter, name))
    return copy
