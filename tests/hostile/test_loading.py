"""A state_dict loads into a layer as what it is, or not at all: codes are no values, and a layer
that something does not fit keeps what it had.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_mx
from te_mx.recipe import Format, MXFP8BlockScaling

KINDS = {
    "Linear": lambda: te_mx.Linear(70, 33),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(70, 33),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(70, 64),
    "GroupedLinear": lambda: te_mx.GroupedLinear(3, 70, 33),
    "stacked": lambda: te_mx.GroupedLinear(3, 70, 33, single_grouped_weight=True),
}
every = pytest.mark.parametrize("kind", KINDS)


def call(layer, x):
    args = [[2, 0, 3]] if isinstance(layer, te_mx.GroupedLinear) else []
    with torch.no_grad(), te_mx.autocast():
        return layer(x, *args)


def dropped(layer, recipe=None):
    te_mx.freeze_weights(layer, drop_master=True, recipe=recipe)
    return layer


def refused(target, state, says, strict=True):
    """Loading raises, also inside of a model, and changes nothing of the layer."""
    for layer, given in (
        (target, state),
        (nn.ModuleDict({"in": target}), {f"in.{key}": value for key, value in state.items()}),
    ):
        before = {name: (t, t.clone()) for name, t in _held(layer)}
        shown = str(layer)
        with pytest.raises(RuntimeError, match=says):
            layer.load_state_dict(given, strict=strict)
        assert str(layer) == shown
        after = dict(_held(layer))
        assert after.keys() == before.keys()
        for name, (tensor, value) in before.items():
            assert after[name] is tensor and torch.equal(tensor, value), name


def _held(layer):
    yield from layer.named_parameters()
    yield from layer.named_buffers()


# ----------------------------------------------------------------------------- codes are no values
@every
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("target", ["plain", "frozen", "dropped"])
def test_codes_without_scales(kind, strict, target):
    state = dropped(KINDS[kind]()).state_dict()
    alone = {key: value for key, value in state.items() if not key.endswith("_scale")}
    layer = KINDS[kind]()
    if target != "plain":
        te_mx.freeze_weights(layer, drop_master=target == "dropped")
    refused(layer, alone, r"weight\d? holds codes .torch.float8_e4m3fn.*weight\d?_scale is missing",
            strict)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_one_byte_holds_no_value(name, dtype):
    layer = te_mx.Linear(70, 33)
    state = layer.state_dict()
    state[name] = torch.zeros_like(state[name]).to(dtype)
    refused(layer, state, f"{name} holds codes .{dtype}", strict=False)
    refused(nn.utils.parametrizations.weight_norm(te_mx.Linear(70, 33)),
            {"parametrizations.weight.original1": torch.zeros(33, 70).to(dtype)},
            "original1 holds codes", strict=False)  # fmt: skip


def test_codes_in_high_precision_parts():
    split = te_mx.Linear(70, 33, parameters_split=("a", "b", "c"))
    state = split.state_dict()
    state["b_weight"] = state["b_weight"].to(torch.float8_e4m3fn)
    refused(split, state, "b_weight holds codes")


# ----------------------------------------------------------------------------- names of the scales
@every
@pytest.mark.parametrize("e8m0", [False, True])
def test_inverse_scales_are_scales(kind, e8m0):
    """They are what codes are multiplied by, under both names."""
    source, x = dropped(KINDS[kind]()), torch.randn(5, 70)
    state = {}
    for key, value in source.state_dict().items():
        if key.endswith("_scale"):
            key, value = f"{key}_inv", value.view(torch.float8_e8m0fnu) if e8m0 else value
        state[key] = value
    for layer in (KINDS[kind](), dropped(KINDS[kind]())):
        layer.load_state_dict(state, strict=True)
        assert torch.equal(call(layer, x), call(source, x))
        assert list(layer.state_dict()) == list(source.state_dict())


def test_inverse_scales_of_groups_load_stacked_and_apart():
    x = torch.randn(5, 70)
    for source, target in (("GroupedLinear", "stacked"), ("stacked", "GroupedLinear")):
        ours, other = dropped(KINDS[source]()), KINDS[target]()
        state = {k.replace("_scale", "_scale_inv"): v for k, v in ours.state_dict().items()}
        other.load_state_dict(state)
        assert torch.equal(call(other, x), call(ours, x))


@pytest.mark.parametrize("stacked", [True, False])
def test_one_group(stacked):
    source = dropped(te_mx.GroupedLinear(1, 70, 33, single_grouped_weight=stacked))
    name, shape = ("weight", (1, 33, 70)) if stacked else ("weight0", (33, 70))
    assert source.state_dict()[name].shape == shape
    for other in (stacked, not stacked):
        layer, x = te_mx.GroupedLinear(1, 70, 33, single_grouped_weight=other), torch.randn(5, 70)
        layer.load_state_dict(source.state_dict())
        with torch.no_grad():
            assert torch.equal(layer(x, [5]), source(x, [5]))


@every
def test_scales_of_other_formats(kind):
    """Blocks of 32x16, a scale for each pair of channels, one for the tensor. (One of 128x128 or
    1x128 that holds all of a side is a scale of the tensor or the channel, and loads.)"""
    state = dropped(KINDS[kind]()).state_dict()
    names = [key for key in state if key.endswith("_scale")]
    for shape in ((2, 5), (17, 1), ()):
        changed = {key: value for key, value in state.items() if key not in names}
        changed |= {f"{key}_inv": torch.ones(shape) for key in names}
        refused(KINDS[kind](), changed, r"_scale_inv.*float32.*128x128 or 1x128 blocks.*dequantize")
        changed = {**state, **{key: torch.ones(shape, dtype=torch.bfloat16) for key in names}}
        refused(KINDS[kind](), changed, r"_scale: .*uint8 .E8M0 bytes., got torch.bfloat16")


def test_both_names_at_once():
    state = dropped(te_mx.Linear(70, 33)).state_dict()
    state["weight_scale_inv"] = state["weight_scale"]
    refused(te_mx.Linear(70, 33), state, "weight_scale and .*weight_scale_inv are both there")


# ---------------------------------------------------------------------------------- all or nothing
@every
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("strict", [True, False])
def test_one_entry_that_does_not_fit(kind, quantized, strict):
    source = KINDS[kind]()
    state = (dropped(source) if quantized else source).state_dict()
    for key, value in state.items():
        refused(KINDS[kind](), {**state, key: value[..., :-1]}, key.rstrip("0123456789"), strict)
        refused(KINDS[kind](), {**state, key: "a file name"}, "must be.* tensor", strict)


@every
def test_high_precision_into_codes(kind):
    refused(dropped(KINDS[kind]()), KINDS[kind]().state_dict(), "unfreeze_weights.*dequantize=True")


def test_parts_of_a_checkpoint_come_one_after_the_other():
    """Files of a checkpoint are loaded by calls that each have a part and ignore what is missing,
    as loaders of sharded checkpoints do."""
    layer, source, errors = te_mx.Linear(70, 33), te_mx.Linear(70, 33), []
    for key, value in source.state_dict().items():
        layer._load_from_state_dict({f"x.{key}": value}, "x.", {}, True, [], [], errors)
    assert not errors and torch.equal(layer.weight, source.weight)
    codes = dropped(source)
    codes.load_state_dict({"bias": torch.ones(33)}, strict=False)
    assert codes.bias.sum() == 33


def test_hooks_that_rename_run_first_and_once():
    layer, source, seen = te_mx.Linear(70, 33), dropped(te_mx.Linear(70, 33)), []

    def rename(module, state, prefix, *rest):
        seen.append(prefix)
        for key in list(state):
            state[key.replace("kernel", "weight")] = state.pop(key)

    layer.register_load_state_dict_pre_hook(rename)
    state = {k.replace("weight", "kernel"): v for k, v in source.state_dict().items()}
    layer.load_state_dict(state)
    assert seen == [""] and len(layer._load_state_dict_pre_hooks) == 1
    x = torch.randn(5, 70)
    assert torch.equal(call(layer, x), call(source, x))


# -------------------------------------------------------------------------------------- the recipe
FLOOR = MXFP8BlockScaling(scale_rule="floor", fp8_format=Format.HYBRID, precision="exact",
                          alignment_spread=3, one_copy_weights=True)  # fmt: skip


@every
def test_codes_come_with_their_recipe(kind, tmp_path):
    source, x = nn.Sequential(dropped(KINDS[kind](), FLOOR)), torch.randn(5, 70)
    torch.save(source.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    for layer in (KINDS[kind](), dropped(KINDS[kind]())):
        model = nn.Sequential(layer)
        model.load_state_dict(state)
        assert layer._frozen.settings == FLOOR.settings
    args = [[2, 0, 3]] if isinstance(layer, te_mx.GroupedLinear) else []
    with torch.no_grad():
        assert torch.equal(layer(x, *args), source[0](x, *args))
    without = KINDS[kind]()  # tensors alone, as safetensors holds them, or of an earlier version
    without.load_state_dict({key[2:]: value for key, value in state.items()})
    assert without._frozen.settings == te_mx.get_default_recipe().settings


@pytest.mark.parametrize("change", [{"unknown": 1}, {"scale_rule": "up"}, {"fwd_fmt": "e2m1"},
                                    {"w": "e2m1"}])  # fmt: skip
def test_a_recipe_that_is_not_known(change):
    state = dropped(te_mx.Linear(70, 33)).state_dict()
    state._metadata[""]["te_mx_recipe"] |= change
    layer = te_mx.Linear(70, 33)
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match="a recipe that this version of te_mx does not know"):
        layer.load_state_dict(state)
    assert layer._frozen is None and torch.equal(layer.weight, before)
