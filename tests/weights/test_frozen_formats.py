"""Frozen weights in every format: freezing, checkpoints, and checkpoints of earlier versions."""

from __future__ import annotations

import re

import pytest
import torch

import te_mx
from te_mx import formats
from te_mx.recipe import BlockScaling, Format, MXFP8BlockScaling

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
KINDS = {
    "Linear": lambda: te_mx.Linear(70, 33),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(70, 33),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(70, 33),
    "GroupedLinear": lambda: te_mx.GroupedLinear(3, 70, 33),
    "stacked": lambda: te_mx.GroupedLinear(3, 70, 33, single_grouped_weight=True),
}
every = pytest.mark.parametrize("kind", KINDS)
NAMES = [name for name in formats.names() if not name.startswith("fp8_")]
# Every block and element of weights once.
NAMES += ["fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e5m2fnuz_128x128", "fp8_e4m3fnuz_128x1"]
NAMES += ["nvfp4", "nvfp4_16x16"]
named = pytest.mark.parametrize("name", NAMES)


def recipe_of(name: str) -> BlockScaling:
    """Weights of a format; tokens too, but in blocks of one row."""
    rule = formats.get(name).scaling.rules[0]
    tokens = re.sub(r"_128x\d+$", "_1x128", name).removesuffix("_16x16")
    return BlockScaling(x=tokens, w=name, g=tokens, scale_rule=rule)


def run(layer, x, recipe=None):
    args = [[2, 0, 3]] if isinstance(layer, te_mx.GroupedLinear) else []
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        return layer(x, *args)


def dropped(kind, recipe):
    layer = KINDS[kind]()
    te_mx.freeze_weights(layer, drop_master=True, recipe=recipe)
    return layer


@every
@named
def test_frozen_equals_unfrozen(kind, name):
    layer, x, recipe = KINDS[kind](), torch.randn(5, 70), recipe_of(name)
    expected = run(layer, x, recipe)
    te_mx.freeze_weights(layer, recipe=recipe)
    assert torch.equal(run(layer, x, recipe), expected)
    te_mx.freeze_weights(layer, drop_master=True)
    assert torch.equal(run(layer, x, recipe), expected)
    fmt = formats.get(name)
    for key in layer._weight_keys:
        rows, k = layer._shape_of(key)[-2:]
        codes, scales = layer._codes(key)[:2]
        assert codes.shape[-2:] == fmt.codes_shape(rows, k)
        assert scales.shape[-2:] == fmt.scales_shape(rows, k)
    te_mx.unfreeze_weights(layer, dequantize=True)
    assert torch.equal(run(layer, x, recipe), expected)


@every
@named
def test_a_checkpoint_names_its_format(kind, name, tmp_path):
    source, x = dropped(kind, recipe_of(name)), torch.randn(5, 70)
    torch.save(source.state_dict(), tmp_path / "layer.pt")
    state = torch.load(tmp_path / "layer.pt", weights_only=True)
    for layer in (KINDS[kind](), dropped(kind, None), dropped(kind, recipe_of("mxfp4"))):
        layer.load_state_dict(state)
        assert layer._source.settings == recipe_of(name).settings
        assert torch.equal(run(layer, x, recipe_of(name)), run(source, x, recipe_of(name)))


@every
@named
def test_tensors_alone(kind, name):
    """As safetensors holds them: the module's own format, or what shapes and names say."""
    source, x = dropped(kind, recipe_of(name)), torch.randn(5, 70)
    state = dict(source.state_dict())
    layer = dropped(kind, recipe_of(name))
    layer.load_state_dict(state)
    assert layer._source.settings == recipe_of(name).settings
    assert torch.equal(run(layer, x, recipe_of(name)), run(source, x, recipe_of(name)))
    plain = KINDS[kind]()
    if name == "mxfp8_e4m3":
        for layer in (plain, dropped(kind, recipe_of("mxfp4"))):
            layer.load_state_dict(state)
            assert layer._source.settings == te_mx.get_default_recipe().settings
    elif name.startswith("fp8_e4m3_"):
        plain.load_state_dict(state)
        assert plain._source.settings.w == name and plain._source.settings.scale_rule == "fp32"
        assert torch.equal(run(plain, x, recipe_of(name)), run(source, x, recipe_of(name)))
    elif formats.get(name).element.bits < 8:
        for layer in (plain, dropped(kind, recipe_of("mxfp8_e5m2")), dropped(kind, recipe_of(
            "mxfp6_e3m2" if name != "mxfp6_e3m2" else "mxfp6_e2m3"
        ))):  # fmt: skip
            layer.load_state_dict(state)
            assert layer._source.settings.w == name
            assert torch.equal(run(layer, x, recipe_of(name)), run(source, x, recipe_of(name)))
    else:
        with pytest.raises(RuntimeError, match="codes must be float8_e4m3fn, got torch"):
            plain.load_state_dict(state)
        assert not plain._source.standing


def test_six_bits_under_a_name_that_does_not_say_which():
    state = dict(dropped("Linear", recipe_of("mxfp6_e2m3")).state_dict())
    state["weight_scale"] = state.pop("weight_scale_e2m3")
    with pytest.raises(RuntimeError, match="codes must be float8_e4m3fn"):
        te_mx.Linear(70, 33).load_state_dict(state)
    with pytest.raises(RuntimeError, match="whose scales are called weight_scale_e2m3"):
        dropped("Linear", recipe_of("mxfp6_e2m3")).load_state_dict(state)


@every
def test_a_checkpoint_of_an_earlier_version(kind):
    recipe = MXFP8BlockScaling(fp8_format=Format.HYBRID, scale_rule="floor")
    source, x = dropped(kind, recipe), torch.randn(5, 70)
    state = source.state_dict()
    saved = state._metadata[""]["te_mx_recipe"]
    for role in ("x", "w", "g"):
        del saved[role]
    saved |= {"fwd_fmt": "e4m3", "bwd_fmt": "e5m2"}
    layer = KINDS[kind]()
    layer.load_state_dict(state)
    assert layer._source.settings == recipe.settings
    assert torch.equal(run(layer, x), run(source, x))


@pytest.mark.parametrize("change", [{"w": "mxfp4"}, {"w": "mxfp8_e5m2"}])
def test_codes_of_another_format(change):
    state = dropped("Linear", None).state_dict()
    state._metadata[""]["te_mx_recipe"] |= change
    with pytest.raises(RuntimeError, match=r"codes must be \w+, got torch.float8_e4m3fn"):
        te_mx.Linear(70, 33).load_state_dict(state)


@pytest.mark.parametrize("activations", ["mxfp8", "bf16"])
@every
def test_fp32_scales_beside_inputs_in_mxfp8(kind, activations, tmp_path):
    """Formats of different scale rules, each with its own: the values of the codes decide."""
    layer, x = KINDS[kind](), torch.randn(5, 70)
    how = {"fmt": "fp8_e4m3_128x128", "activations": activations}
    with pytest.raises(ValueError, match="drop_master=True"):
        te_mx.freeze_weights(layer, **how)
    te_mx.freeze_weights(layer, drop_master=True, **how)
    made = run(layer, x)
    values = KINDS[kind]()
    values.load_state_dict(layer.state_dict())
    assert torch.equal(run(values, x), made)  # a checkpoint
    te_mx.unfreeze_weights(values, dequantize=True)
    with te_mx.autocast(enabled=False), torch.no_grad():
        plain = values(x, *([[2, 0, 3]] if isinstance(layer, te_mx.GroupedLinear) else []))
    assert (made - plain).norm() < (0.07 if activations == "mxfp8" else 1e-5) * plain.norm()
    for region in (True, False):
        its = x.clone().requires_grad_()
        args = [[2, 0, 3]] if isinstance(layer, te_mx.GroupedLinear) else []
        with te_mx.autocast(enabled=region):
            layer(its, *args).sum().backward()
        assert its.grad.isfinite().all() and its.grad.norm() > 0


@every
def test_kept_masters_in_a_region_whose_scale_rule_the_format_does_not_know(kind):
    layer, x = KINDS[kind](), torch.randn(5, 70)
    te_mx.freeze_weights(layer, fmt="mxfp4")
    with pytest.raises(ValueError, match=r"te_mx\..*frozen to mxfp4, .* 'even', .* has 'pow2'"):
        run(layer, x, te_mx.recipe.Float8BlockScaling())
    run(layer, x, MXFP8BlockScaling(scale_rule="floor"))


def test_codes_of_deepseek_meet_inputs_in_mxfp8():
    layer, x = dropped("Linear", te_mx.recipe.DeepSeekV3()), torch.randn(5, 70)
    te_mx.freeze_weights(layer, activations="mxfp8")
    made = run(layer, x)
    q = te_mx.quantize(x)
    te_mx.freeze_weights(layer, activations="bf16")
    torch.testing.assert_close(made, run(layer, q.dequantize()), rtol=1e-5, atol=1e-5)
