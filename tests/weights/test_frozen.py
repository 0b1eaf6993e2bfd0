"""freeze_weights and unfreeze_weights."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import te_mx
from te_mx.recipe import MXFP8BlockScaling

FLOOR = MXFP8BlockScaling(scale_rule="floor")


def mlp(dtype=torch.float32) -> nn.Sequential:
    layers = te_mx.Linear(70, 64, dtype=dtype), nn.ReLU(), te_mx.Linear(64, 9, dtype=dtype)
    return nn.Sequential(*layers)


def run(model, x, recipe=None):
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        return model(x)


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("drop_master", [False, True])
def test_frozen_equals_unfrozen(drop_master, rows):
    model, x = mlp(), torch.randn(rows, 70)
    expected = run(model, x)
    assert te_mx.freeze_weights(model, drop_master=drop_master) == 2
    assert torch.equal(run(model, x), expected)
    assert torch.equal(run(model, x), expected)


@pytest.mark.usefixtures("family")
def test_the_weight_is_quantized_once(monkeypatch):
    from te_mx.dispatch import run as dispatch

    model, x = mlp(), torch.randn(17, 70)
    te_mx.freeze_weights(model)
    shapes = []
    quantize = dispatch.quantize

    def record(what):
        shapes.append(tuple(what.x.shape))
        return quantize(what)

    monkeypatch.setattr(dispatch, "quantize", record)
    run(model, x)
    assert shapes == [(17, 70), (17, 64)]


def test_master_is_kept_for_high_precision():
    model, x = mlp(), torch.randn(3, 70)
    expected = model(x)
    before = list(model.state_dict())
    te_mx.freeze_weights(model)
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == before
    assert repr(model[0]).endswith(", frozen)")


def test_parameters_stop_training_and_start_again():
    model = mlp()
    model[0].bias.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    te_mx.freeze_weights(model)
    assert not any(p.requires_grad for p in model.parameters())
    assert te_mx.unfreeze_weights(model) == 2
    assert [p.requires_grad for p in model.parameters()] == flags
    assert te_mx.unfreeze_weights(model) == 0


def test_gradients_flow_through_to_the_input():
    model, x = mlp(), torch.randn(3, 70, requires_grad=True)
    with te_mx.autocast():
        (expected,) = torch.autograd.grad(model(x).sum(), x)
        te_mx.freeze_weights(model)
        for _ in range(2):
            (got,) = torch.autograd.grad(model(x).sum(), x)
            assert torch.equal(got, expected)


def test_frozen_in_inference_mode_then_differentiated():
    model, x = mlp(), torch.randn(3, 70, requires_grad=True)
    with torch.inference_mode():
        te_mx.freeze_weights(model)
        with te_mx.autocast():
            model(x.detach())
    with te_mx.autocast():
        model(x).sum().backward()
    assert x.grad is not None


@pytest.mark.usefixtures("family")
def test_load_state_dict_is_seen():
    model, other, x = mlp(), mlp(), torch.randn(3, 70)
    te_mx.freeze_weights(model)
    run(model, x)
    model.load_state_dict(other.state_dict())
    assert torch.equal(run(model, x), run(other, x))
    assert model[0]._source.kept  # of the new values
    te_mx.unfreeze_weights(model)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert not torch.equal(run(model, x), run(other, x))


def test_a_change_of_recipe_requantizes_where_there_is_a_master():
    model, x = mlp(), torch.randn(3, 70)
    floor = run(model, x, FLOOR)
    rceil = run(model, x)
    te_mx.freeze_weights(model)
    assert torch.equal(run(model, x, FLOOR), floor)
    assert torch.equal(run(model, x), rceil)
    te_mx.unfreeze_weights(model)
    te_mx.freeze_weights(model, recipe=FLOOR)
    assert model[0]._source.kept["weight"].settings.scale_rule == "floor"
    te_mx.unfreeze_weights(model)
    with te_mx.autocast(recipe=FLOOR):
        te_mx.freeze_weights(model, drop_master=True)
    expected = te_mx.quantize(mlp()[0].weight, scale_rule="floor")
    assert model[0].weight_scale.shape == expected.rowwise_scale.shape


# -------------------------------------------------------------------------------- drop_master
def test_only_codes_and_scales_stay():
    layer = te_mx.Linear(1024, 256, dtype=torch.bfloat16)
    elements = layer.weight.numel()
    te_mx.freeze_weights(layer, drop_master=True)
    assert layer.weight is None and [name for name, _ in layer.named_parameters()] == ["bias"]
    held = [t for name, t in layer.named_buffers()]
    assert sum(t.numel() * t.element_size() for t in held) == elements + elements // 32
    assert not layer._source.kept  # no packed copy
    assert repr(layer).endswith("frozen, no master)")


def test_codes_are_those_of_quantize():
    layer = te_mx.Linear(70, 9)
    expected = te_mx.quantize(layer.weight)
    te_mx.freeze_weights(layer, drop_master=True)
    state = layer.state_dict()
    assert list(state) == ["weight", "weight_scale", "bias"]
    assert state["weight"].dtype == torch.float8_e4m3fn and state["weight"].shape == (9, 70)
    assert state["weight_scale"].dtype == torch.uint8 and state["weight_scale"].shape == (9, 3)
    assert torch.equal(state["weight"].view(torch.uint8), expected.rowwise_data.view(torch.uint8))
    assert torch.equal(state["weight_scale"], expected.rowwise_scale.view(torch.uint8))


def test_runs_in_mxfp8_outside_autocast_too():
    model, x = mlp(), torch.randn(3, 70)
    expected = run(model, x)
    te_mx.freeze_weights(model, drop_master=True)
    assert torch.equal(model(x), expected)
    with te_mx.autocast(enabled=False):
        assert torch.equal(model(x), expected)
    assert te_mx.audit(model)["0"].fprop not in ("high precision", "never ran")


def test_return_bias_and_torch_autocast():
    layer = te_mx.Linear(70, 9, return_bias=True)
    x = torch.randn(3, 70)
    with te_mx.autocast(), torch.autocast("cpu", torch.bfloat16):
        expected, _ = layer(x)
        te_mx.freeze_weights(layer, drop_master=True)
        y, bias = layer(x)
    assert torch.equal(y, expected) and bias is layer.bias


def test_input_is_checked():
    layer = te_mx.Linear(70, 9)
    te_mx.freeze_weights(layer, drop_master=True)
    with pytest.raises(ValueError, match="in_features=70"):
        layer(torch.randn(3, 71))


def test_dtype_and_device_moves_keep_the_codes():
    model, x = mlp(), torch.randn(3, 70)
    expected = run(model, x)
    te_mx.freeze_weights(model, drop_master=True)
    model.to(torch.bfloat16).to(torch.float32)
    assert model[0].weight_codes.dtype == torch.uint8
    model[0].bias.data.copy_(model[0].bias)  # rounded to bf16 meanwhile
    torch.testing.assert_close(run(model, x), expected, atol=0.01, rtol=0.01)


@pytest.mark.usefixtures("family")
def test_state_dict_loads_into_a_new_model():
    model, x = mlp(), torch.randn(3, 70)
    te_mx.freeze_weights(model, drop_master=True)
    expected = run(model, x)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    for assign in (False, True):
        fresh = mlp()
        fresh.load_state_dict(state, strict=True, assign=assign)
        assert torch.equal(run(fresh, x), expected)
        assert te_mx.audit(fresh)["0"].weight.startswith("frozen, no master")
        assert not fresh[0].bias.requires_grad
    shared = fresh[0].weight_codes.data_ptr() == state["0.weight"].data_ptr()
    assert shared
    again = mlp()
    te_mx.freeze_weights(again, drop_master=True)
    again.load_state_dict(state)
    assert torch.equal(run(again, x), expected)
    with torch.device("meta"):
        empty = mlp()
    empty.load_state_dict(state, assign=True)
    assert torch.equal(run(empty, x), expected)


def test_scales_may_be_e8m0():
    model, x = mlp(), torch.randn(3, 70)
    te_mx.freeze_weights(model, drop_master=True)
    state = model.state_dict()
    for key in ("0.weight_scale", "2.weight_scale"):
        state[key] = state[key].view(torch.float8_e8m0fnu)
    fresh = mlp()
    fresh.load_state_dict(state)
    assert torch.equal(run(fresh, x), run(model, x))


def _broken(state, key, value):
    state = dict(state)
    if value is None:
        del state[key]
    else:
        state[key] = value
    return state


def test_wrong_quantized_checkpoints_are_refused():
    layer = te_mx.Linear(70, 9)
    te_mx.freeze_weights(layer, drop_master=True)
    state = layer.state_dict()
    wrong = [
        ("weight", torch.zeros(9, 70), "float8_e4m3fn, got torch.float32"),
        ("weight_scale", torch.zeros(9, 3), "uint8 .E8M0 bytes., got torch.float32"),
        ("weight_scale", torch.zeros(9, 2, dtype=torch.uint8), r"got \(9, 70\) and \(9, 2\)"),
        ("weight", None, "needs a weight of codes"),
    ]  # fmt: skip
    for key, value, says in wrong:
        for target in (te_mx.Linear(70, 9), copy.deepcopy(layer)):
            with pytest.raises(RuntimeError, match=says):
                target.load_state_dict(_broken(state, key, value))


def test_high_precision_does_not_load_into_dropped():
    layer, plain = te_mx.Linear(70, 9), te_mx.Linear(70, 9)
    te_mx.freeze_weights(layer, drop_master=True)
    with pytest.raises(RuntimeError, match=r"unfreeze_weights.model, dequantize=True"):
        layer.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight", "weight_scale"'):
        layer.load_state_dict({"bias": plain.bias})
    te_mx.unfreeze_weights(layer, dequantize=True)
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer.weight, plain.weight)


def test_unfreezing_needs_to_be_asked_for():
    model, x = mlp(torch.bfloat16), torch.randn(3, 70, dtype=torch.bfloat16)
    expected = run(model, x)
    values = te_mx.quantize(model[0].weight).dequantize(torch.bfloat16)
    te_mx.freeze_weights(model, drop_master=True)
    with pytest.raises(RuntimeError, match=r"2 layers were dropped.*'0'.*dequantize=True"):
        te_mx.unfreeze_weights(model)
    assert te_mx.unfreeze_weights(model, dequantize=True) == 2
    assert torch.equal(model[0].weight, values) and model[0].weight.requires_grad
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(run(model, x), expected)  # quantizing quantized values changes nothing
    with te_mx.autocast():
        model(x).sum().backward()


def test_freezing_further_and_again():
    model, x = mlp(), torch.randn(3, 70)
    expected = run(model, x)
    for drop_master in (False, False, True, True, False):
        te_mx.freeze_weights(model, drop_master=drop_master)
        assert torch.equal(run(model, x), expected)
    assert te_mx.audit(model)["0"].weight == "frozen, no master"


@pytest.mark.parametrize("drop_master", [False, True])
def test_deepcopy_and_pickle(drop_master):
    model, x = mlp(), torch.randn(3, 70)
    te_mx.freeze_weights(model, drop_master=drop_master)
    expected = run(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, x), expected)
        te_mx.unfreeze_weights(other, dequantize=True)
    assert model[0]._source.standing


def test_errors():
    with pytest.raises(ValueError, match=r"no te_mx module in Linear.*convert_model"):
        te_mx.freeze_weights(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="meta device"):
        te_mx.freeze_weights(te_mx.Linear(4, 4, device="meta"))
    layer = nn.utils.parametrizations.weight_norm(te_mx.Linear(40, 8))
    with pytest.raises(ValueError, match="parametrization"):
        te_mx.freeze_weights(layer, drop_master=True)
    x = torch.randn(2, 40)
    expected = run(layer, x)
    te_mx.freeze_weights(layer)
    assert torch.equal(run(layer, x), expected)
