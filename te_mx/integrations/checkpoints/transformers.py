"""Transformers' own schemas: ``mxfp8`` and ``fp8``, which DeepSeek's checkpoints have, with scales
in ``weight_scale_inv``, and ``mxfp4``, the experts of gpt-oss in ``*_blocks`` and ``*_scales``."""

from typing import Any

from te_mx import formats
from te_mx.integrations.checkpoints.plan import INVERSE, Plan, Style

METHODS = ("mxfp8", "fp8", "mxfp4")


def plan(fields: dict[str, Any]) -> Plan | str:
    """The plan of such a quantization_config, or why te_mx has none."""
    if fields["quant_method"] == "mxfp4":
        return Plan("mxfp4", ("_blocks", "_scales"), weight_only=True, experts_only=True)
    kept = fields.get("modules_to_not_convert") or fields.get("ignored_layers") or ()
    block = list(fields.get("weight_block_size") or ())
    powers = fields.get("scale_fmt", "float") == "ue8m0" or fields["quant_method"] == "mxfp8"
    for name, taken in (("activation_scheme", "dynamic"), ("expert_dtype", "fp8")):
        if fields.get(name, taken) != taken:
            return f"{name} is {fields[name]!r}, not {taken!r}"
    for name in ("modules_to_convert", "dequantize"):
        if fields.get(name):
            return f"{name} is {fields[name]!r}"
    if block == [1, 32] and powers:
        return Plan("mxfp8_e4m3", INVERSE, tuple(kept))
    if block == [128, 128] and fields["quant_method"] == "fp8":
        return Plan("fp8_e4m3_128x128", INVERSE, tuple(kept), powers=powers)
    return f"weight_block_size is {block or None}, not [128, 128], nor [1, 32] with E8M0 scales"


def _config(fmt: str, weight_only: bool, kept: list[str]) -> dict[str, Any]:
    scaling = formats.get(fmt).scaling
    mx = scaling.scale != "fp32"
    return {
        "quant_method": "mxfp8" if mx else "fp8", "activation_scheme": "dynamic",
        "weight_block_size": list(scaling.block), "scale_fmt": "ue8m0" if mx else "float",
        "modules_to_not_convert": kept,
    }  # fmt: skip


STYLES = {
    "mxfp8": Style({"mxfp8_e4m3": INVERSE}, _config, has_head=False),
    "fp8": Style({"fp8_e4m3_128x128": INVERSE}, _config, has_head=False),
}
