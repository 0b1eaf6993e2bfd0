"""GPT-2's Conv1D, whose weight is [in, out], in MXFP8 where it stands."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import te_mx

transformers = pytest.importorskip("transformers", minversion="5.0")


def conv1d() -> nn.Module:
    torch.manual_seed(4)
    layer = transformers.pytorch_utils.Conv1D(48, 40)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv1d_has_the_bits_of_linear(dtype):
    layer = conv1d().to(dtype)
    linear = te_mx.Linear(40, 48, dtype=dtype)
    linear.load_state_dict({"weight": layer.weight.t(), "bias": layer.bias})
    storage, state = layer.weight.data_ptr(), list(layer.state_dict())
    x = torch.randn(3, 50, 40, dtype=dtype, requires_grad=True)
    plain = layer(x)
    report = te_mx.convert_model(layer)
    assert report.layers == [("(root)", "converted", "40 -> 48", "Conv1D")] and report.share == 1
    assert isinstance(layer, transformers.pytorch_utils.Conv1D) and torch.equal(layer(x), plain)
    with te_mx.autocast():
        y, expected = layer(x), linear(x)
    g = torch.randn_like(y)
    dx, dw, db = torch.autograd.grad(y, (x, layer.weight, layer.bias), g)
    wanted = torch.autograd.grad(expected, (x, linear.weight, linear.bias), g)
    assert torch.equal(y, expected) and torch.equal(dx, wanted[0])
    assert torch.equal(dw, wanted[1].t()) and torch.equal(db, wanted[2])
    assert layer.weight.data_ptr() == storage and list(layer.state_dict()) == state
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with te_mx.autocast():
            assert torch.equal(other(x), y)
    with torch.no_grad(), te_mx.autocast():
        assert torch.equal(layer(x), y)
        for drop in (False, True):
            te_mx.freeze_weights(layer, drop_master=drop)
            assert torch.equal(layer(x), y)
        te_mx.unfreeze_weights(layer, dequantize=True)
        assert torch.equal(layer(x), y) and layer.weight.shape == (40, 48)
    assert te_mx.revert_model(layer).count("reverted") == 1
    assert type(layer) is transformers.pytorch_utils.Conv1D


def backward(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    ids = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = model(ids, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters()}


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value - exact).norm() / exact.norm())


def test_gpt2():
    torch.manual_seed(5)
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    exact, gradients = backward(model)
    report = te_mx.convert_model(model, filter_fn=lambda module, name: name != "lm_head")
    assert report.count("converted") == 4 and report.share == 1 - 96 * 64 / (96 * 64 + 12 * 64**2)
    assert torch.equal(backward(model)[0], exact)
    with te_mx.autocast():
        logits, ours = backward(model)
    assert 0 < relative(logits, exact) < 0.05
    assert all(relative(ours[name], g) < 0.12 for name, g in gradients.items() if g.dim() == 2)
    te_mx.revert_model(model)
    report = te_mx.convert_model(model, fuse=True)
    notes = {name: note for name, status, _, note in report.layers if status == "skipped"}
    assert "c_fc is a Conv1D" in notes["transformer.h.0.mlp"]
    assert "no nn.Linear that is converted" in notes["transformer.h.0.ln_1"]


def test_conv1d_says_what_is_wrong():
    class Other(transformers.pytorch_utils.Conv1D):
        pass

    model = nn.ModuleList([Other(48, 40), conv1d().double(), conv1d()])
    reasons = te_mx.convert_model(model).skipped
    assert "a subclass of Conv1D" in reasons["0"] and "torch.float64" in reasons["1"]
    with te_mx.autocast(), pytest.raises(ValueError, match="in_features=40, got inp of shape"):
        model[2](torch.randn(3, 48))
