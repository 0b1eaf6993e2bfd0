"""Codes do not reach a checkpoint that somebody else's from_pretrained loads as plain weights."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import te_mx


class Pretrained(nn.Module):
    """What matters of transformers' PreTrainedModel and of diffusers' ModelMixin."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.body = nn.Sequential(te_mx.Linear(40, 8))

    def save_pretrained(self, path, state_dict=None):
        def shards():
            return self.state_dict() if state_dict is None else state_dict

        torch.save(shards(), path)


class Adapters(nn.Module):
    """As peft's PeftModel: it answers for the model inside, and saves what is its own."""

    def __init__(self, model):
        super().__init__()
        self.model, self.peft_config = model, {"default": "lora"}
        self.lora = nn.Parameter(torch.ones(2))

    @property
    def config(self):
        return self.model.config

    def save_pretrained(self, path):
        state = self.state_dict()
        torch.save({key: value for key, value in state.items() if key.startswith("lora")}, path)


@pytest.mark.parametrize(
    "config", [SimpleNamespace(), {}, SimpleNamespace(quantization_config=None)]
)
def test_codes_are_refused(config, tmp_path):
    model, path = Pretrained(config), tmp_path / "model.pt"
    te_mx.freeze_weights(model)
    model.save_pretrained(path)  # the masters
    path.unlink()
    te_mx.freeze_weights(model, drop_master=True)
    remedy = r"Pretrained.save_pretrained.*torch.save.model.state_dict.*dequantize=True"
    with pytest.raises(RuntimeError, match=remedy):
        model.save_pretrained(path)
    assert not path.exists()
    torch.save(model.state_dict(), path)
    other = Pretrained(config)
    other.load_state_dict(torch.load(path, weights_only=True))
    te_mx.unfreeze_weights(model, dequantize=True)
    model.save_pretrained(path)
    assert torch.load(path, weights_only=True)["body.0.weight"].dtype == torch.float32


@pytest.mark.parametrize("named", [{"quant_method": "ours"}, SimpleNamespace(quant_method="ours")])
def test_a_config_that_says_what_they_are(named, tmp_path):
    for config in (SimpleNamespace(quantization_config=named), {"quantization_config": named}):
        model = Pretrained(config)
        te_mx.freeze_weights(model, drop_master=True)
        model.save_pretrained(tmp_path / "model.pt")


def test_adapters_on_codes(tmp_path):
    model = Adapters(Pretrained(SimpleNamespace()))
    te_mx.freeze_weights(model, drop_master=True)
    model.save_pretrained(tmp_path / "adapters.pt")
    assert list(torch.load(tmp_path / "adapters.pt")) == ["lora"]
    with pytest.raises(RuntimeError, match="holds codes"):
        copy.deepcopy(model.model).save_pretrained(tmp_path / "model.pt")
