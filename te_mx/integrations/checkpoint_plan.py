"""What a quantization_config in config.json says of the tensors of a checkpoint."""

from __future__ import annotations

import fnmatch
import re
from typing import Any, NamedTuple

import torch

from te_mx import formats


class Plan(NamedTuple):
    """The format of the weights, endings of the names of codes and scales, and patterns of the
    modules that keep their weights. experts_only: gpt-oss, whose linear layers do. weight_only:
    inputs are not quantized. powers: their fp32 scales are powers of two (DeepSeek-V3.1)."""

    fmt: str
    ends: tuple[str, str]
    kept: tuple[str, ...] = ()
    weight_only: bool = False
    experts_only: bool = False
    powers: bool = False

    @property
    def has_bytes(self) -> bool:
        """Whether scales are E8M0 bytes."""
        return formats.get(self.fmt).scaling.storage == torch.uint8

    def leaves_out(self, name: str) -> bool:
        """Whether a module of this name keeps its weights. A pattern is a name, the name of
        something around it or its last part, a regular expression behind "re:" (all of the name,
        from the start), or has wildcards."""
        return any(_matches(pattern, name) for pattern in self.kept)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


def plan_of(fields: dict[str, Any]) -> Plan | str:
    """The plan of a checkpoint that te_mx reads, or why it does not."""
    method = fields.get("quant_method")
    if method in ("mxfp8", "fp8"):
        return _transformers(fields)
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    if method == "modelopt":
        inner = fields.get("quantization", fields)
        if str(inner.get("quant_algo")).upper() != "MXFP8":
            return f"quant_algo is {inner.get('quant_algo')!r}, not 'MXFP8'"
        kept = inner.get("ignore") or inner.get("exclude_modules") or ()
        return Plan("mxfp8_e4m3", ("", "_scale"), tuple(kept))
    if method == "mxfp4":
        return Plan("mxfp4", ("_blocks", "_scales"), weight_only=True, experts_only=True)
    return f"te_mx does not know quant_method {method!r}"


def _transformers(fields: dict[str, Any]) -> Plan | str:
    """Transformers' own: weight_scale_inv."""
    kept = fields.get("modules_to_not_convert") or fields.get("ignored_layers") or ()
    block = list(fields.get("weight_block_size") or ())
    powers = fields.get("scale_fmt", "float") == "ue8m0" or fields["quant_method"] == "mxfp8"
    for name, taken in (("activation_scheme", "dynamic"), ("expert_dtype", "fp8")):
        if fields.get(name, taken) != taken:
            return f"{name} is {fields[name]!r}, not {taken!r}"
    for name in ("modules_to_convert", "dequantize"):
        if fields.get(name):
            return f"{name} is {fields[name]!r}"
    ends = "", "_scale_inv"
    if block == [1, 32] and powers:
        return Plan("mxfp8_e4m3", ends, tuple(kept))
    if block == [128, 128] and fields["quant_method"] == "fp8":
        return Plan("fp8_e4m3_128x128", ends, tuple(kept), powers=powers)
    return f"weight_block_size is {block or None}, not [128, 128], nor [1, 32] with E8M0 scales"


def _compressed_tensors(fields: dict[str, Any]) -> Plan | str:
    known = {"mxfp8-quantized": ("mxfp8_e4m3", ""), "mxfp4-pack-quantized": ("mxfp4", "_packed")}
    if (given := fields.get("format", "")) not in known:
        return f"format is {given!r}, not one of {', '.join(known)}"
    groups = list((fields.get("config_groups") or {}).values())
    if len(groups) != 1 or "Linear" not in groups[0].get("targets", ()):
        return f"config_groups must be one group of target 'Linear', got {len(groups)} groups"
    fmt, end = known[given]
    weight_only = groups[0].get("input_activations") is None
    return Plan(fmt, (end, "_scale"), tuple(fields.get("ignore") or ()), weight_only)
