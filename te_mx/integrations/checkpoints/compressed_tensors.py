"""compressed-tensors, which llm-compressor writes: MXFP8, MXFP6 (E2M3) and MXFP4 with E8M0 scales,
NVFP4 with ``weight_global_scale``, the reciprocal of the tensor scale."""

from typing import Any

from te_mx import formats
from te_mx.integrations.checkpoints.plan import PACKED, SCALE, Plan, Style, width

METHODS = ("compressed-tensors",)
_KNOWN = {
    "mxfp8-quantized": ("mxfp8_e4m3", SCALE),
    "mxfp6-pack-quantized": ("mxfp6_e2m3", PACKED),
    "mxfp4-pack-quantized": ("mxfp4", PACKED),
    "nvfp4-pack-quantized": ("nvfp4", (*PACKED, "_global_scale")),
}
_NAMES = {fmt: name for name, (fmt, _) in _KNOWN.items()}


def plan(fields: dict[str, Any]) -> Plan | str:
    """The plan of such a quantization_config, or why te_mx has none."""
    if (given := fields.get("format", "")) not in _KNOWN:
        return f"format is {given!r}, not one of {', '.join(_KNOWN)}"
    if fields.get("transform_config"):
        return "transform_config rotates inputs, which te_mx does not"
    if (fields.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return f"sparsity_config has the format {fields['sparsity_config']['format']!r}"
    groups = list((fields.get("config_groups") or {}).items())
    if len(groups) != 1:
        return f"config_groups must be one group, got {len(groups)}"
    name, group = groups[0]
    fmt, ends = _KNOWN[given]
    if isinstance(group, list):  # the name of a scheme, and targets
        is_16 = name.upper().endswith("A16")
        group = {"targets": group, "input_activations": None if is_16 else {}}
    weights, targets = group.get("weights") or {}, tuple(group.get("targets") or ())
    size = weights.get("group_size") or width(fmt)
    if size != width(fmt):
        return f"group_size is {size}, and {given} has {width(fmt)}"
    if weights.get("symmetric") is False:
        return "weights are not symmetric, and have zero points"
    if not targets:
        return "config_groups has no targets"
    only = () if "Linear" in targets else targets
    kept, inputs = tuple(fields.get("ignore") or ()), group.get("input_activations")
    if fmt == "nvfp4":
        scale = "" if inputs is None else "input_global_scale"
        return Plan(fmt, ends, kept, weight_only=True, reciprocal=True, inputs=scale, only=only)
    return Plan(fmt, ends, kept, inputs is None, only=only)


def _config(fmt: str, weight_only: bool, kept: list[str]) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "num_bits": formats.get(fmt).element.bits, "type": "float", "strategy": "group",
        "group_size": width(fmt), "symmetric": True, "scale_dtype": "torch.uint8",
    }  # fmt: skip
    if fmt == "nvfp4":
        numbers |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    inputs = numbers
    if fmt == "mxfp6_e2m3":  # as its scheme MXFP6A8
        inputs = {**numbers, "num_bits": 8}
    return {
        "quant_method": "compressed-tensors",
        "format": _NAMES[fmt],
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "dynamic": False},
                "input_activations": None if weight_only else {**inputs, "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": kept,
    }


STYLES = {
    "compressed-tensors": Style(dict(_KNOWN.values()), _config, says_inputs=True),
}
