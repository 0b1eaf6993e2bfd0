"""quantization_config: what config.json says of a model whose weights are codes, in the words of
those who read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from te_mx import formats
from te_mx.fusion.experts import ExpertsModule
from te_mx.nn.base import MXModule
from te_mx.nn.linear import Linear
from te_mx.runtime.arguments import check_module, check_one_of
from te_mx.weights.freezing import Freezable
from te_mx.weights.missing import claim

_K = 32  # elements of an MX block


class _Style(NamedTuple):
    """Endings of the names of codes and of scales, by format, and what makes the config of (format,
    weight only, modules that stay). says_inputs: it can say that inputs are not quantized.
    has_head: its readers take output embeddings that are."""

    ends: dict[str, tuple[str, str]]
    make: Callable[[str, bool, list[str]], dict[str, Any]]
    says_inputs: bool = False
    has_head: bool = True


def _compressed_tensors(fmt: str, weight_only: bool, kept: list[str]) -> dict[str, Any]:
    bits = formats.get(fmt).element.bits
    numbers = {
        "num_bits": bits, "type": "float", "strategy": "group", "group_size": _K,
        "symmetric": True, "scale_dtype": "torch.uint8",
    }  # fmt: skip
    inputs = None if weight_only else {**numbers, "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"mxfp{bits}-{'pack-' if bits < 8 else ''}quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "dynamic": False},
                "input_activations": inputs,
                "output_activations": None,
            }
        },
        "ignore": kept,
    }


def _modelopt(fmt: str, weight_only: bool, kept: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": _K,
        "kv_cache_quant_algo": None, "ignore": kept,
    }  # fmt: skip


def _transformers(fmt: str, weight_only: bool, kept: list[str]) -> dict[str, Any]:
    block = list(formats.get(fmt).scaling.block)
    mx = formats.get(fmt).scaling.scale != "fp32"
    return {
        "quant_method": "mxfp8" if mx else "fp8", "activation_scheme": "dynamic",
        "weight_block_size": block, "scale_fmt": "ue8m0" if mx else "float",
        "modules_to_not_convert": kept,
    }  # fmt: skip


_PLAIN, _INVERSE, _PACKED = ("", "_scale"), ("", "_scale_inv"), ("_packed", "_scale")
STYLES = {
    "compressed-tensors": _Style(
        {"mxfp8_e4m3": _PLAIN, "mxfp4": _PACKED}, _compressed_tensors, says_inputs=True
    ),
    "modelopt": _Style({"mxfp8_e4m3": _PLAIN}, _modelopt),
    "mxfp8": _Style({"mxfp8_e4m3": _INVERSE}, _transformers, has_head=False),
    "fp8": _Style({"fp8_e4m3_128x128": _INVERSE}, _transformers, has_head=False),
}


def quantization_config(model: nn.Module, style: str) -> dict[str, Any]:
    """Have a model whose weights are codes save them as others name them, and say what they are.

    The state_dict of the model has these names from now on (te_mx loads all of them), and
    ``model.config.quantization_config`` becomes the result, where there is a config: then
    ``save_pretrained`` writes both.

    ====================  ===================  ==================================  ================
    style                 weights              names                               read by
    ====================  ===================  ==================================  ================
    "compressed-tensors"  MXFP8                ``weight``, ``weight_scale``        vLLM, SGLang
    ..                    MXFP4                ``weight_packed``, ``weight_scale``  ..
    "modelopt"            MXFP8                ``weight``, ``weight_scale``        vLLM, SGLang
    "mxfp8"               MXFP8                ``weight``, ``weight_scale_inv``    Transformers
    "fp8"                 FP8, blocks 128x128  ``weight``, ``weight_scale_inv``    Transformers, ..
    ====================  ===================  ==================================  ================

    Args:
        model: its te_mx layers were frozen by ``te_mx.freeze_weights(drop_master=True)``, all to
            one format; layers that were not are listed as left out.
        style: one of the four.

    Returns:
        The config, of values that JSON has.

    Raises:
        TypeError: model is no nn.Module.
        ValueError: the style is unknown, or does not have the format; no layer holds codes, or they
            are of several formats; inputs are not quantized (``activations="bf16"``) in some of
            these layers alone, or in a style that cannot say it; a layer with codes is no
            te_mx.Linear and no stack of Transformers' experts [E, out, in], which is what others
            read, or its rows are no whole blocks; it is the output embeddings, where these are tied
            to others or readers of the style expect values. Nothing is changed.
    """
    check_module(model)
    check_one_of("style", style, STYLES)
    chosen = STYLES[style]
    dropped = [
        (n or "(root)", m) for n, m in model.named_modules()
        if isinstance(m, MXModule) and m._source.saved is not None
    ]  # fmt: skip
    fmt, weight_only = _the_format(dropped)
    if fmt not in chosen.ends:
        raise ValueError(f"{style!r} has {' and '.join(chosen.ends)}, the layers hold {fmt}")
    if weight_only and not chosen.says_inputs:
        raise ValueError(
            f"{style!r} means inputs that are quantized, the layers were frozen with "
            "activations='bf16': take 'compressed-tensors', or give te_mx.freeze_weights other "
            "activations"
        )
    for name, module in dropped:
        if problem := _why_not(module, fmt) or _why_no_head(model, module, chosen):
            raise ValueError(f"{name}: {problem}")
    codes = {id(module) for _, module in dropped}
    linear = (nn.Linear, MXModule)
    left = [n for n, m in model.named_modules() if isinstance(m, linear) and id(m) not in codes]
    made = chosen.make(fmt, weight_only, left)
    claim(model, [module for _, module in dropped], chosen.ends[fmt], made)
    if any(isinstance(module, ExpertsModule) for _, module in dropped):
        from te_mx.integrations.hf_quantizer import convert_scales_too

        convert_scales_too(model, made)
    if getattr(model, "config", None) is not None and not isinstance(model.config, dict):
        model.config.quantization_config = made  # type: ignore[union-attr]
    return made


def _the_format(dropped: list[tuple[str, Any]]) -> tuple[str, bool]:
    """The format of all weights, and whether inputs are not quantized."""
    if not dropped:
        raise ValueError(
            "no layer holds codes: call te_mx.freeze_weights(model, drop_master=True) first"
        )
    found = {m._source.saved: n for n, m in dropped}
    if len({fmt for fmt, _ in found}) > 1:
        rows = ", ".join(f"{name} {fmt}" for (fmt, _), name in found.items())
        raise ValueError(f"the layers hold several formats ({rows}), and a config says one")
    if len(found) > 1:
        raise ValueError(
            f"inputs are left as they are in some layers ({found[next(iter(found))[0], True]}) and "
            "quantized in others, and a config says one; give te_mx.freeze_weights the same "
            "activations for all"
        )
    return next(iter(found))


def _why_not(module: Freezable, fmt: str) -> str:
    """Why others could not read what this module holds, or an empty string."""
    if not isinstance(module, Linear | ExpertsModule):
        return (
            f"is a {type(module).__name__}, for which others have no names; leave it out by "
            "filter_fn of te_mx.freeze_weights"
        )
    if isinstance(module, ExpertsModule) and module._transposed:
        return "holds codes of transposed weights, which others would read the other way round"
    width = formats.get(fmt).scaling.block[1]
    for key in module._weight_keys:
        *_, k = module._shape_of(key)
        if isinstance(module, ExpertsModule) and module._cuts_a_block(key, formats.get(fmt)):
            return f"{key}: a block of {fmt} reaches from gate into up, which others have apart"
        if width == _K and k % _K:
            return f"{key} has {k} columns; others have whole blocks of {_K} only"
    return ""


def _why_no_head(model: Any, module: Any, style: _Style) -> str:
    """Why readers would take the codes of the output embeddings for values, or an empty string."""
    find = getattr(model, "get_output_embeddings", None)
    if find is None or find() is not module:
        return ""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if style.has_head and not tied:
        return ""
    why = "are tied to the input embeddings" if tied else "stay in high precision for its readers"
    return f"output embeddings {why}; leave them out by filter_fn of te_mx.freeze_weights"
