"""What the config of a model says of its codes, and whether it is still so.

te_mx.quantization_config and te_mx.integrations.hf_quantizer give each module that holds codes the
names that these are saved under (`_saved_as`) and the quantization_config that says what they are
(`_claim`). Unfreezing ends the names and leaves the claim, which the model still makes: until all
codes are gone, or the model says anew what it holds, save_pretrained would write it beside other
weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from te_mx.nn.frozen_weight import Freezable


def claim(model: nn.Module, holding: Iterable[Freezable], ends: Any, fields: Any) -> None:
    """Let modules of a model save codes under names with these endings, and `fields`, its
    quantization_config, say so of them and of no others."""
    for module in model.modules():
        module.__dict__.pop("_claim", None)
        quantizer: Any = module.__dict__.get("hf_quantizer")
        if hasattr(quantizer, "restate"):  # the one that te_mx layers were loaded by
            quantizer.restate(module, fields)
    for one in holding:
        one._saved_as, one._claim = ends, fields


def take_back(model: nn.Module) -> None:
    """Where no module of a model holds codes any more: have its config say nothing of them, and
    Transformers take it for a model that was never quantized."""
    modules = [m for m in model.modules() if isinstance(m, Freezable)]
    claims = [m._claim for m in modules if m._claim is not None]
    if not claims or any(m._is_dropped() for m in modules):
        return
    methods = {str(one.get("quant_method")) for one in claims}
    # Layers of a part may hold the config of all; models are what saves one.
    for one in (m for m in model.modules() if hasattr(m, "save_pretrained")):
        quantizer = one.__dict__.get("hf_quantizer")
        if quantizer is not None and _method(quantizer) in methods:
            quantizer.remove_quantization_config(one)
        config = one.__dict__.get("config")
        if config is not None and not isinstance(config, dict):
            if _method(config) in methods:
                vars(config).pop("quantization_config", None)
            if _fields(config) is None:
                vars(config).pop("_is_quantized", None)


def check_saved(module: Any) -> None:
    """Raise RuntimeError where transformers or diffusers save a module in a model whose config says
    something else of it: their from_pretrained would load codes as plain weights, or look for codes
    that are not there.

    Only the stack tells: a layer does not know its model. Adapters alone may be saved, and so may a
    model whose config names a quantization of somebody else.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "save_pretrained":
        frame = frame.f_back
    model = frame and frame.f_locals.get("self")
    if not isinstance(model, nn.Module) or getattr(model, "peft_config", None):
        return
    fields, holds = _fields(getattr(model, "config", None)), module._is_dropped()
    if holds and fields is None:
        raise RuntimeError(
            f"{module._label()} holds codes (drop_master=True), which "
            f"{type(model).__name__}.save_pretrained writes and from_pretrained loads as "
            "plain weights. Save them with torch.save(model.state_dict(), path), to load "
            "with load_state_dict into a model of te_mx layers; say in the config what "
            "they are, te_mx.quantization_config(model, style); or get weights back "
            "first: te_mx.unfreeze_weights(model, dequantize=True)"
        )
    if fields is None or module._saved_as is not None:
        return
    if module._claim == fields or (
        holds and any(getattr(m, "_claim", None) == fields for m in model.modules())
    ):
        what = f"holds other codes, {module._frozen.settings.w}," if holds else "holds weights"
        raise RuntimeError(
            f"{module._label()} {what} since it was frozen or unfrozen by itself, and the "
            f"quantization_config of {type(model).__name__}, {fields.get('quant_method')!r}, was "
            "made before that. Make it anew, te_mx.quantization_config(model, style), or get all "
            "weights back, which removes it: te_mx.unfreeze_weights(model, dequantize=True)"
        )


def _fields(config: Any) -> dict[str, Any] | None:
    """The quantization_config of a config as in config.json, or None."""
    if isinstance(config, dict):
        said = config.get("quantization_config")
    else:
        said = getattr(config, "quantization_config", None)
    if said is None or isinstance(said, dict):
        return said
    return said.to_dict() if hasattr(said, "to_dict") else dict(vars(said))


def _method(owner: Any) -> str | None:
    """The quant_method that a config or a quantizer of Transformers names."""
    fields = _fields(owner)
    return None if fields is None else str(fields.get("quant_method"))
