"""state_dicts between te_mx.Linear, nn.Linear and Transformer Engine's Linear."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import te_mx


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_to_and_from_nn_linear_strictly():
    ours, plain, x = te_mx.Linear(40, 8), nn.Linear(40, 8), torch.randn(3, 40)
    with te_mx.autocast():
        ours(x)
        ours(x, is_first_microbatch=True)
    state = through_a_file(ours.state_dict())
    assert list(state) == ["weight", "bias"]
    plain.load_state_dict(state, strict=True)
    assert torch.equal(plain(x), ours(x))
    other = te_mx.Linear(40, 8)
    other.load_state_dict(through_a_file(plain.state_dict()), strict=True)
    assert torch.equal(other(x), plain(x))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("extra", [torch.empty(0, dtype=torch.uint8), None, io.BytesIO(b"pickled")])
def test_extra_state_of_transformer_engine(nested, extra):
    layer = te_mx.Linear(40, 8)
    model = nn.ModuleDict({"block": nn.Sequential(layer)}) if nested else layer
    prefix = "block.0." if nested else ""
    source = nn.Linear(40, 8)
    state = {prefix + key: value for key, value in source.state_dict().items()}
    state[prefix + "_extra_state"] = extra
    result = model.load_state_dict(state, strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(layer.weight, source.weight)
    assert prefix + "_extra_state" not in model.state_dict()


def test_strict_loading_still_finds_mistakes():
    layer = te_mx.Linear(40, 8)
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        layer.load_state_dict({**state, "other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        layer.load_state_dict({"weight": state["weight"]})
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({**state, "weight": torch.zeros(8, 41)})


def test_assign_and_meta():
    source = te_mx.Linear(40, 8)
    with torch.device("meta"):
        layer = te_mx.Linear(40, 8)
    layer.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, 40)
    with te_mx.autocast():
        assert torch.equal(layer(x), source(x))


@pytest.mark.usefixtures("family")
def test_optimizer_and_model_resume_bit_equal():
    def fresh():
        torch.manual_seed(1)
        model = nn.Sequential(te_mx.Linear(40, 32), nn.ReLU(), te_mx.Linear(32, 8))
        return model, torch.optim.AdamW(model.parameters(), 1e-2)

    def step(model, optimizer, seed):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(seed))
        with te_mx.autocast():
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    model, optimizer = fresh()
    losses = [step(model, optimizer, i) for i in range(3)]
    state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    losses += [step(model, optimizer, i) for i in range(3, 6)]

    resumed, resumed_optimizer = fresh()
    resumed.load_state_dict(state["model"])
    resumed_optimizer.load_state_dict(state["optimizer"])
    assert [step(resumed, resumed_optimizer, i) for i in range(3, 6)] == losses[3:]
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True)
    )
