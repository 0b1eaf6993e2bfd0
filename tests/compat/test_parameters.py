"""Parameters as Transformer Engine's callers expect them: their order, and made real from meta."""

from __future__ import annotations

import pytest
import torch

import te_mx

MODULES = {
    "Linear": lambda **given: te_mx.Linear(8, 6, **given),
    "Linear split": lambda **given: te_mx.Linear(8, 6, parameters_split=("q", "k"), **given),
    "LayerNormLinear": lambda **given: te_mx.LayerNormLinear(8, 6, **given),
    "LayerNormMLP": lambda **given: te_mx.LayerNormMLP(8, 6, **given),
    "GroupedLinear": lambda **given: te_mx.GroupedLinear(2, 8, 6, **given),
    "GroupedLinear stacked": lambda **given: te_mx.GroupedLinear(
        2, 8, 6, single_grouped_weight=True, **given
    ),
}
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


@pytest.mark.parametrize(
    ("stacked_weight", "stacked_bias", "names"),
    [
        (False, False, "weight0 bias0 weight1 bias1 weight2 bias2"),
        (True, True, "weight bias"),
        (True, False, "bias0 bias1 bias2 weight"),
        (False, True, "weight0 weight1 weight2 bias"),
    ],
)
def test_the_order_of_grouped_parameters(stacked_weight, stacked_bias, names):
    """States of an optimizer are found by position."""
    arguments = {"single_grouped_weight": stacked_weight, "single_grouped_bias": stacked_bias}
    layer = te_mx.GroupedLinear(3, 8, 6, **arguments)
    assert [name for name, _ in layer.named_parameters()] == names.split()
    te_mx.freeze_weights(layer, drop_master=True)
    te_mx.unfreeze_weights(layer, dequantize=True)
    assert [name for name, _ in layer.named_parameters()] == names.split()


def test_a_state_dict_of_any_order_loads():
    layer, other = (te_mx.GroupedLinear(3, 8, 6) for _ in range(2))
    state = dict(sorted(layer.state_dict().items()))  # biases first
    assert list(state)[:2] == ["bias0", "bias1"]
    other.load_state_dict(state)
    for (name, a), (_, b) in zip(layer.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@every_module
def test_meta_parameters_become_real(make):
    expected, layer = make(dtype=torch.bfloat16), make(device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta for p in layer.parameters())
    first = next(iter(layer.parameters()))
    first.requires_grad_(False).tensor_model_parallel = True  # a mark
    layer.reset_parameters(defer_init=True)
    assert all(p.is_meta for p in layer.parameters())
    for module in (layer, expected):
        torch.manual_seed(3)
        module.reset_parameters()
    named = list(layer.named_parameters())
    for (name, got), (expected_name, p) in zip(named, expected.named_parameters(), strict=True):
        assert name == expected_name and got.dtype == torch.bfloat16
        assert torch.equal(got, p), name
    assert not named[0][1].requires_grad and named[1][1].requires_grad
    assert named[0][1].tensor_model_parallel is True


@every_module
def test_to_empty_and_reset_as_for_layers_of_torch(make):
    expected = make()
    with torch.device("meta"):
        layer = make()
        layer.reset_parameters()  # the default device is meta: nothing to make real
        assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    held = list(layer.parameters())
    for module in (layer, expected):
        torch.manual_seed(3)
        module.reset_parameters()
    assert all(a is b for a, b in zip(held, layer.parameters(), strict=True))
    for p, q in zip(held, expected.parameters(), strict=True):
        assert torch.equal(p, q)


@every_module
def test_constructors_leave_the_meta_device_alone(make):
    called = []
    layer = make(device="meta", init_method=called.append)
    assert not called and all(p.is_meta for p in layer.parameters())
    layer.reset_parameters()
    assert called and not any(p.is_meta for p in called)


@every_module
def test_reset_of_frozen_modules(make):
    layer = make()
    te_mx.freeze_weights(layer)
    splits = {"m_splits": [1, 3]} if hasattr(layer, "num_gemms") else {}
    x = torch.randn(4, 8)
    with torch.no_grad(), te_mx.autocast():
        layer(x, **splits)
        layer.reset_parameters()
        fresh = make()
        fresh.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x, **splits), fresh(x, **splits))
    te_mx.unfreeze_weights(layer)
    if not getattr(layer, "_split", None):
        te_mx.freeze_weights(layer, drop_master=True)
        with pytest.raises(RuntimeError, match="frozen without its high-precision weights"):
            layer.reset_parameters()


def test_a_subclass_initializes_as_it_likes():
    class Ones(te_mx.LayerNormLinear):
        def reset_parameters(self):
            super().reset_parameters()
            torch.nn.init.ones_(self.weight)

    assert bool((Ones(4, 4).weight == 1).all())


def test_a_converted_layer_too():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta"))
    te_mx.convert_model(model)
    model[0].reset_parameters()
    assert model[0].weight.device.type == "cpu" and model[0].weight.abs().max() > 0
