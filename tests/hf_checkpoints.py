"""Checkpoints of small models on codes, for tests of what is written and read."""

from __future__ import annotations

from pathlib import Path

import torch
from hf_models import keep_head, model_of, tokens

import te_mx

# Formats of the weights, where it is not the default one, and names of a layer's tensors.
STYLES = {
    "mxfp8": (None, ("weight", "weight_scale_inv")),
    "modelopt": (None, ("weight", "weight_scale")),
    "compressed-tensors": (None, ("weight", "weight_scale")),
    "compressed-tensors 4 bits": ("mxfp4", ("weight_packed", "weight_scale")),
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
