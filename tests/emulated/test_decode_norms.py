"""Frozen te_mx.LayerNormLinear and te_mx.LayerNormMLP on few rows: their products run on the decode
kernel of Hopper, with the numbers of a normalization, te_mx.Linear and an activation in turn."""

from __future__ import annotations

import pytest
import torch
from emulated_hopper import PRODUCTS

import te_mx
from te_mx.nn import activations
from te_mx.recipe import BlockScaling, Float8BlockScaling

pytestmark = pytest.mark.usefixtures("on_hopper")

H, F = 72, 136
BF16 = torch.bfloat16
RECIPES = {
    "mxfp4": BlockScaling(x="mxfp8_e4m3", w="mxfp4", g="mxfp8_e5m2"),
    "fp8_block": Float8BlockScaling(),
}


def run(layer, x, recipe):
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        return layer(x)


def linear(weight, bias, recipe, **kwargs):
    """A frozen te_mx.Linear with this weight and bias."""
    n, k = weight.shape
    layer = te_mx.Linear(k, n, bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    te_mx.freeze_weights(layer, drop_master=True, recipe=recipe, **kwargs)
    return layer


def held(layer):
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if "norm" in name or "bias" in name:
                value.uniform_(-1, 1)
    return {name: value.detach().clone() for name, value in layer.named_parameters()}


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_normalization_and_a_linear(name, drop):
    recipe = RECIPES[name]
    layer = te_mx.LayerNormLinear(
        H, F, dtype=BF16, normalization="RMSNorm", return_layernorm_output=True
    )
    before = held(layer)
    te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe)
    y, z = run(layer, torch.randn(2, 3, H, dtype=BF16), recipe)
    assert PRODUCTS == [(6, F, H)]
    assert torch.equal(y, run(linear(before["weight"], before["bias"], recipe), z, recipe))
    report = te_mx.audit(layer)
    assert ("sm90_mxfp4" if name == "mxfp4" else "sm90_decode") in str(report)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("act", ["gelu", "gelu_erf", "relu", "srelu", "qgelu", "silu"])
def test_activations_run_inside_of_the_first_product(act, drop):
    """They see its fp32 sums."""
    recipe = RECIPES["mxfp4"]
    layer = te_mx.LayerNormMLP(H, F, dtype=BF16, activation=act, return_layernorm_output=True)
    before = held(layer)
    te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe)
    y, z = run(layer, torch.randn(5, H, dtype=BF16), recipe)
    assert PRODUCTS == [(5, F, H), (5, H, F)]
    one = linear(before["fc1_weight"].float(), before["fc1_bias"].float(), recipe)
    h = run(one, z.float(), recipe)
    a = activations.plain(h, layer._act).to(BF16)
    two = linear(before["fc2_weight"], before["fc2_bias"], recipe)
    assert torch.equal(y, run(two, a, recipe))


@pytest.mark.parametrize("act", ["swiglu", "geglu", "clamped_swiglu"])
def test_gated_activations_run_between_the_products(act):
    recipe = RECIPES["fp8_block"]
    layer = te_mx.LayerNormMLP(
        H, F, dtype=BF16, activation=act, bias=False, return_layernorm_output=True
    )
    before = held(layer)
    te_mx.freeze_weights(layer, recipe=recipe)
    y, z = run(layer, torch.randn(5, H, dtype=BF16), recipe)
    assert PRODUCTS == [(5, 2 * F, H), (5, H, F)]
    h = run(linear(before["fc1_weight"], None, recipe), z, recipe)
    a = activations.plain(h.float(), layer._act).to(BF16)
    assert torch.equal(y, run(linear(before["fc2_weight"], None, recipe), a, recipe))


def test_inputs_as_they_are():
    recipe, x = RECIPES["mxfp4"], torch.randn(5, H, dtype=BF16)
    layer = te_mx.LayerNormMLP(H, F, dtype=BF16, activation="relu", return_layernorm_output=True)
    before = held(layer)
    te_mx.freeze_weights(layer, drop_master=True, recipe=recipe, activations="bf16")
    with torch.no_grad():
        y, z = layer(x)
        assert PRODUCTS == [(5, F, H), (5, H, F)]
        first, second = (
            linear(before[f"{i}_weight"], before[f"{i}_bias"], recipe, activations="bf16")
            for i in ("fc1", "fc2")
        )
        assert torch.equal(y, second(first(z).relu()))


def test_what_needs_gradients_or_has_more_rows_runs_elsewhere():
    recipe = RECIPES["fp8_block"]
    for layer in (te_mx.LayerNormLinear(H, F, dtype=BF16), te_mx.LayerNormMLP(H, F, dtype=BF16)):
        te_mx.freeze_weights(layer, recipe=recipe)
        x = torch.randn(5, H, dtype=BF16, requires_grad=True)
        with te_mx.autocast(recipe=recipe):
            layer(x).sum().backward()
        assert x.grad is not None
        run(layer, torch.randn(300, H, dtype=BF16), recipe)
        te_mx.unfreeze_weights(layer)
        run(layer, x, recipe)
    assert not PRODUCTS
