"""torchtitan's model configs with te_mx layers in them (torchtitan 0.3 and later)."""

from __future__ import annotations

import pytest
import torch
from beside_te import import_or_skip

import te_mx

import_or_skip("torchtitan")
pytest.importorskip("torchtitan.components.quantization")
llama3 = pytest.importorskip("torchtitan.models.llama3")
from te_mx.integrations import torchtitan_converter as converter  # noqa: E402


def model(*converters):
    spec = llama3.model_registry("debugmodel", converters=list(converters) or None)
    torch.manual_seed(0)
    made = spec.model.build()
    made.init_states(buffer_device=torch.device("cpu"))
    return made


def test_linear_layers_are_te_mx_layers_with_the_weights_of_before():
    recipe = te_mx.recipe.MXFP8BlockScaling(scale_rule="floor")
    ours, plain = model(converter.MXConverter.Config(recipe=recipe)), model()
    linear = {n: m for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear)}
    kept = {n for n in linear if not isinstance(ours.get_submodule(n), te_mx.Linear)}
    assert linear and all(name in ("output", "lm_head") for name in kept)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_they_run_with_the_recipe_without_a_region():
    ours = model(converter.MXConverter.Config())
    name, layer = next((n, m) for n, m in ours.named_modules() if isinstance(m, te_mx.Linear))
    x = torch.randn(64, layer.in_features, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    expected = te_mx.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    expected.load_state_dict(layer.state_dict())
    with te_mx.autocast():
        assert torch.equal(expected(x), y)
    row = te_mx.audit(ours)[name]
    assert not {row.fprop, row.dgrad, row.wgrad} & {"never ran", "high precision"}


def test_refusals():
    with pytest.raises(ValueError, match=r"no Linear\.Config to convert"):
        model(converter.MXConverter.Config(skip=["layers", "output", "lm_head"]))
    with pytest.raises((TypeError, ValueError), match="recipe"):
        converter.MXConverter.Config(recipe="fp8").build()


def test_a_custom_recipe_is_asked_about_the_names_of_the_model():
    recipe = te_mx.recipe.overrides("mxfp8", {"layers.0.*": None, "*.w2": "mxfp4"})
    ours = model(converter.MXConverter.Config(recipe=recipe))
    linear = {n: m for n, m in ours.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, layer in linear.items():
        if name.startswith("layers.0."):
            assert not isinstance(layer, te_mx.Linear)
        elif name.endswith(".w2"):
            assert layer._bound == te_mx.recipe.resolve_recipe("mxfp4").settings
