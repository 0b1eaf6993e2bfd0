"""AMD's Quark: MXFP8, MXFP6 and MXFP4 with E8M0 scales, in tensors of the same two names.

te_mx reads it and saves what it read, and makes no such config of its own."""

from typing import Any

from te_mx.integrations.checkpoints.plan import SCALE, Plan

METHODS = ("quark",)
_KNOWN = {
    "fp8_e4m3": "mxfp8_e4m3", "fp8_e5m2": "mxfp8_e5m2", "fp6_e2m3": "mxfp6_e2m3",
    "fp6_e3m2": "mxfp6_e3m2", "fp4": "mxfp4",
}  # fmt: skip


def plan(fields: dict[str, Any]) -> Plan | str:
    """The plan of such a quantization_config, or why te_mx has none."""
    says = fields.get("global_quant_config") or {}
    weight = says.get("weight")
    weight = weight[0] if isinstance(weight, list) and len(weight) == 1 else weight
    if not isinstance(weight, dict):
        return f"global_quant_config has {weight!r} for weights, not one tensor's"
    for name in ("layer_quant_config", "layer_type_quant_config"):
        if any((fields.get(name) or {}).values()):
            return f"{name} has layers that differ"
    wanted = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    for name, taken in wanted.items():
        if weight.get(name) != taken:
            return f"{name} of weights is {weight.get(name)!r}, not {taken!r}"
    export = fields.get("export") or {}
    if export.get("weight_format", "real_quantized") != "real_quantized":
        return f"weight_format is {export['weight_format']!r}, not 'real_quantized'"
    if weight.get("dtype") not in _KNOWN:
        return f"dtype of weights is {weight.get('dtype')!r}, not one of {', '.join(_KNOWN)}"
    kept, weight_only = tuple(fields.get("exclude") or ()), says.get("input_tensors") is None
    return Plan(_KNOWN[weight["dtype"]], SCALE, kept, weight_only)
