"""ModelOpt: MXFP8, FP8 with a scale a tensor and NVFP4 with ``weight_scale_2``, one format for all
or layer by layer (MIXED_PRECISION)."""

from typing import Any

from te_mx.integrations.checkpoints.plan import SCALE, Plan, Style, width

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")
_WHOLE = (*SCALE, "_scale_2")
_KNOWN = {
    "FP8": Plan("fp8_e4m3_128x128", SCALE, of_tensor=True, inputs="input_scale"),
    "MXFP8": Plan("mxfp8_e4m3", SCALE),
    "NVFP4": Plan("nvfp4", _WHOLE, weight_only=True, inputs="input_scale"),
    "W4A16_NVFP4": Plan("nvfp4", _WHOLE, weight_only=True),
}


def plan(fields: dict[str, Any]) -> Plan | str:
    """The plan of a quantization_config, or of a hf_quant_config.json, or why there is none."""
    inner = fields.get("quantization", fields)
    kept = tuple(inner.get("ignore") or inner.get("exclude_modules") or ())
    if str(inner.get("quant_algo")).upper() != "MIXED_PRECISION":
        found = _of(inner)
        return found if isinstance(found, str) else found._replace(kept=kept)
    layers = {}
    for name, one in (inner.get("quantized_layers") or {}).items():
        found = _of(one)
        if isinstance(found, str):
            return f"{name}: {found}"
        layers[name] = found
    if not layers:
        return "quant_algo is 'MIXED_PRECISION', without quantized_layers"
    most = max(layers.values(), key=lambda one: (len(one.ends), one.inputs))  # of their tensors
    return most._replace(kept=kept, layers=layers)


def _of(one: dict[str, Any]) -> Plan | str:
    found = _KNOWN.get(str(one.get("quant_algo")).upper())
    if found is None:
        *first, last = map(repr, _KNOWN)
        return f"quant_algo is {one.get('quant_algo')!r}, not {', '.join(first)} or {last}"
    size = one.get("group_size") or width(found.fmt)
    if size != width(found.fmt) and not found.of_tensor:
        return f"group_size is {size}, and {one['quant_algo']} has {width(found.fmt)}"
    return found


def _config(fmt: str, weight_only: bool, kept: list[str]) -> dict[str, Any]:
    algo = "MXFP8" if fmt == "mxfp8_e4m3" else "W4A16_NVFP4"
    return {
        "quant_method": "modelopt", "quant_algo": algo, "group_size": width(fmt),
        "kv_cache_quant_algo": None, "ignore": kept,
    }  # fmt: skip


STYLES = {"modelopt": Style({"mxfp8_e4m3": SCALE, "nvfp4": _WHOLE}, _config)}
