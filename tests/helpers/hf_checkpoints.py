"""Checkpoints of small models on codes, for tests of what is written and read."""

from __future__ import annotations

from pathlib import Path

import torch
from hf_models import keep_head, model_of, tokens

import te_mx
from te_mx.formats import mxfp4_checkpoints

# Formats of the weights, where it is not the default one, and names of a layer's tensors.
STYLES = {
    "mxfp8": (None, ("weight", "weight_scale_inv")),
    "modelopt": (None, ("weight", "weight_scale")),
    "compressed-tensors": (None, ("weight", "weight_scale")),
    "compressed-tensors 4 bits": ("mxfp4", ("weight_packed", "weight_scale")),
    "compressed-tensors 6 bits": ("mxfp6_e2m3", ("weight_packed", "weight_scale")),
    "modelopt nvfp4": ("nvfp4", ("weight", "weight_scale", "weight_scale_2")),
    "compressed-tensors nvfp4": (
        "nvfp4",
        ("weight_packed", "weight_scale", "weight_global_scale"),
    ),
    "fp8": ("fp8_e4m3_128x128", ("weight", "weight_scale_inv")),
}
# Gate and up are whole blocks, and not one alone: Transformers 5.20 drops dimensions of 1.
WHOLE_BLOCKS = {"num_local_experts": 2, "intermediate_size": 256, "hidden_size": 256}


def frozen(name: str, fmt: str | None = None, **how):
    """A model on codes; experts and linear layers, but no head and no router."""
    model = model_of(name, **how.pop("sizes", {})).eval()
    te_mx.convert_model(model, filter_fn=lambda m, n: keep_head(m, n) and not n.endswith("gate"))
    te_mx.freeze_weights(model, drop_master=True, fmt=fmt, **how)
    return model


def gpt_oss():
    """A gpt-oss model whose config says MXFP4, and its checkpoint as published: codes and scales of
    the experts in blocks."""
    model = model_of("GptOss", num_local_experts=2, num_experts_per_tok=1, head_dim=16).eval()
    state = model.state_dict()
    for key in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{key}"
        weight = state.pop(name).transpose(-2, -1)
        q = te_mx.quantize(weight, fmt="mxfp4")
        both = q.rowwise_data, q.rowwise_scale
        codes, scales = (t.unflatten(0, weight.shape[:2]) for t in both)
        parts = mxfp4_checkpoints.to_gpt_oss(codes, scales, weight.shape[-1])
        state |= dict(zip((f"{name}_blocks", f"{name}_scales"), parts, strict=True))
    model.config.quantization_config = {"quant_method": "mxfp4"}
    return model, {name: value.contiguous() for name, value in state.items()}


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8) if t.element_size() == 1 else t


def check_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(as_bytes(value), as_bytes(other[name])), name


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits
