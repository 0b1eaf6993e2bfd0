"""What adapters on te_mx modules do not do, in words that name the layer, and what a merge has to
tell the module."""

from __future__ import annotations

from typing import Any

from te_mx.nn.base import MXModule

_ON_CODES = ("use_dora",)  # variants of LoRA that a layer without a master has


def check_base(base: Any) -> None:
    """Raise ValueError for a module whose weight is not in one piece or whose result is not one
    tensor plus, perhaps, the normalized input."""
    while not isinstance(base, MXModule):
        base = base.base_layer
    if getattr(base, "return_bias", False):
        raise ValueError(
            f"{base._label()}: return_bias=True leaves the bias to others, while adapters add to "
            "the whole result; build the layer with return_bias=False"
        )
    if getattr(base, "_split", None) is not None:
        raise ValueError(
            f"{base._label()}: parameters_split leaves no one weight to adapt; build the layer "
            "without"
        )


def check_config(layer: Any, config: Any) -> None:
    """Raise ValueError for a variant or an initialization that reads or changes the weight of a
    module that holds codes alone."""
    base: Any = layer.get_base_layer()
    if not base._is_dropped():
        return
    init = config.init_lora_weights
    if isinstance(init, str) and init not in ("gaussian", "eva"):
        raise ValueError(
            f"{base._label()}: init_lora_weights={init!r} needs the weight, of which "
            "drop_master=True left codes alone; use True or 'gaussian', or freeze with "
            "drop_master=False"
        )
    for name, field in type(config).__dataclass_fields__.items():
        wanted = field.metadata.get("is_lora_variant") and getattr(config, name)
        if wanted and name not in _ON_CODES:
            raise ValueError(
                f"{base._label()}: {name} is not supported on a layer that holds codes alone "
                "(drop_master=True); freeze with drop_master=False"
            )


def refuse_merge(layer: Any, what: str) -> None:
    """Raise RuntimeError where there is no weight that an adapter could be added to."""
    base: Any = layer.get_base_layer()
    if base._is_dropped():
        raise RuntimeError(
            f"{base._label()}: cannot {what} an adapter, because only codes of its weight are left "
            "(drop_master=True). Get weights back by te_mx.unfreeze_weights(model, "
            f"dequantize=True), {what} then, and freeze again"
        )


def forget(layer: Any) -> None:
    """The weight changed behind the back of torch: what was quantized of it is old."""
    layer.get_base_layer()._forget_copies()
