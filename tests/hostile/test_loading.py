"""A state_dict loads into a layer as what it is, or not at all: codes are no values, and a layer
that something does not fit keeps what it had.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import te_mx
from te_mx.recipe import Float8BlockScaling, Format, MXFP4BlockScaling, MXFP8BlockScaling

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
    refused(split, state, "b_weight holds codes.*no scales for them")
    for end in ("_scale", "_scale_inv"):  # they are there
        beside = {**state, f"b_weight{end}": torch.ones(11, 3)}
        refused(split, beside, f"b_weight holds codes.*b_weight{end}.*without parameters_split")


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


@pytest.mark.parametrize("target", ["plain", "dropped"])
@pytest.mark.parametrize("assign", [False, True])
def test_scales_of_one_column_have_any_strides(target, assign):
    """A tensor of one column is contiguous whatever its strides are, and bytes of it are no view.
    So is one that is a view of the negative of others."""
    recipe, x = Float8BlockScaling(True), torch.randn(4, 100)
    source = dropped(te_mx.Linear(100, 256), recipe)
    scales = source.state_dict()["weight_scale_inv"]
    for given in (
        torch.empty_strided((2, 1), (1, 2)).copy_(scales),
        torch.complex(scales, -scales).conj().imag,
    ):
        layer = te_mx.Linear(100, 256)
        layer = dropped(layer, recipe) if target == "dropped" else layer
        layer.load_state_dict({**source.state_dict(), "weight_scale_inv": given}, assign=assign)
        assert torch.equal(call(layer, x), call(source, x))


class _Failing(torch.Tensor):
    """A tensor that nothing can be copied from."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            args[0].view(-1)[:1].fill_(7)  # half done
            raise RuntimeError("the file ends here")
        return super().__torch_function__(func, types, args, kwargs or {})


def _column_major(value):
    return torch.empty_strided(value.shape, (1, *value.shape[:-1])[: value.dim()]).to(value.dtype)


_VALUES = [
    lambda v: v[..., :-1], lambda v: v[:0], lambda v: v[None], lambda v: v.flatten(),
    lambda v: v.t() if v.dim() == 2 else v.flip(0), lambda v: v.sum().to(v.dtype),
    lambda v: v.float(), lambda v: v.double(), lambda v: v.bfloat16(), lambda v: v.long(),
    lambda v: v.bool(), lambda v: v.to(torch.complex64), lambda v: v.to(torch.int8),
    lambda v: v.to(torch.uint16), lambda v: v.contiguous().view(torch.uint8),
    lambda v: v.float().to(torch.float8_e5m2), lambda v: v.float().to(torch.float8_e8m0fnu),
    lambda v: v.float().to_sparse(), lambda v: v.to("meta"), lambda v: None,
    lambda v: "a file name", lambda v: v.float().tolist(), lambda v: np.zeros(v.shape), lambda v: 1,
    lambda v: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda v: torch.quantize_per_tensor(v.float(), 0.1, 0, torch.qint32),
    lambda v: v.float().as_subclass(_Failing), lambda v: v.as_subclass(_Failing),
    lambda v: torch.zeros(v.shape, dtype=torch.bits16), lambda v: v.repeat_interleave(2, -1),
    lambda v: v.float().expand(2, *v.shape), lambda v: v[..., ::2],
    lambda v: v.float().neg().to(torch.complex64).conj().imag,
    lambda v: _column_major(v), lambda v: nn.Parameter(v.float()), lambda v: v.float() * torch.nan,
]  # fmt: skip
_ENDS = ("", "_scale", "_scale_inv", "_scale_e2m3", "_packed", "_blocks", "_scales", "0", "1")
_METADATA = [
    lambda saved: {}, lambda saved: None, lambda saved: {**saved, "w": "mxfp4"},
    lambda saved: {**saved, "w": "fp8_e4m3_128x128"}, lambda saved: {**saved, "unknown": 1},
    lambda saved: {**saved, "scale_rule": "up"}, lambda saved: {**saved, "x": 3}, lambda saved: [1],
    lambda saved: {**saved, "precision": torch.ones(2)}, lambda saved: {**saved, "weight_only": 3},
]  # fmt: skip
_RECIPES = (MXFP8BlockScaling(), MXFP4BlockScaling(), Float8BlockScaling(True))


def _mutated(state, draw):
    """A state_dict with one, two or three things wrong."""
    metadata, made = dict(state._metadata[""]), []
    state = state.copy()
    state._metadata = {"": metadata}
    for _ in range(draw.choice((1, 1, 2, 3))):
        key = draw.choice(list(state) or ["weight"])
        if (what := draw.random()) < 0.7 and key in state and isinstance(state[key], torch.Tensor):
            number = draw.randrange(len(_VALUES))
            made.append((key, "value", number))
            try:
                state[key] = _VALUES[number](state[key])
            except (RuntimeError, TypeError, IndexError, NotImplementedError):
                made[-1] += ("not made",)  # torch itself has no such tensor
        elif what < 0.9 and key in state:
            name = key.partition("_scale")[0].rstrip("0123456789") + draw.choice(_ENDS)
            made.append((key, "renamed", name))
            state[name] = state.pop(key) if draw.random() < 0.5 else state[key]
        elif metadata:
            name, number = draw.choice(list(metadata)), draw.randrange(len(_METADATA))
            made.append((name, "metadata", number))
            said = metadata[name] if isinstance(metadata[name], dict) else {}
            metadata[name] = _METADATA[number](said)
    return state, made


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_five_hundred_state_dicts_that_are_wrong():
    """Each loads, and the layer runs, or it raises what load_state_dict raises and the layer is as
    it was."""
    draw, failed = random.Random(0), 0
    kinds = {**KINDS, "parts": lambda: te_mx.Linear(70, 33, parameters_split=("a", "b", "c"))}
    states = []
    for recipe in _RECIPES:
        for kind, make in kinds.items():
            states.append((kind, make().state_dict()))
            if kind != "parts":
                states.append((kind, dropped(make(), recipe).state_dict()))
    x = torch.randn(5, 70)
    for _ in range(500):
        kind, state = draw.choice(states)
        layer, target = kinds[kind](), draw.choice(("plain", "frozen", "dropped"))
        if target != "plain":
            drop = target == "dropped" and kind != "parts"
            te_mx.freeze_weights(layer, drop, recipe=draw.choice(_RECIPES))
        state, made = _mutated(state, draw)
        before = {name: (t, t.clone()) for name, t in _held(layer)}
        trained, shown = [t.requires_grad for _, t in layer.named_parameters()], str(layer)
        settings = (layer._source.settings, layer._source.fixed)
        how = {"strict": draw.random() < 0.5, "assign": draw.random() < 0.3}
        try:
            layer.load_state_dict(state, **how)
        except RuntimeError as error:
            assert "loading state_dict" in str(error), made
            only_names = [line for line in str(error).split("\n")[1:] if "key(s)" not in line]
            failed += 1
            if only_names:  # missing and unexpected names alone keep nothing from being loaded
                after = dict(_held(layer))
                assert after.keys() == before.keys(), made
                for name, (tensor, value) in before.items():
                    assert after[name] is tensor and torch.equal(tensor, value), (name, made)
                assert trained == [t.requires_grad for _, t in layer.named_parameters()], made
                assert str(layer) == shown
                assert settings == ((layer._source.settings, layer._source.fixed)), made
        else:
            held = [t for _, t in _held(layer)]
            if not any(t.is_meta or t.dtype not in (torch.float32, torch.uint8) for t in held):
                assert call(layer, x).shape[0] == 5, made
    assert 250 < failed < 490


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
        assert layer._source.settings == FLOOR.settings
    args = [[2, 0, 3]] if isinstance(layer, te_mx.GroupedLinear) else []
    with torch.no_grad():
        assert torch.equal(layer(x, *args), source[0](x, *args))
    without = KINDS[kind]()  # tensors alone, as safetensors holds them, or of an earlier version
    without.load_state_dict({key[2:]: value for key, value in state.items()})
    assert without._source.settings == te_mx.get_default_recipe().settings


@pytest.mark.parametrize("change", [{"unknown": 1}, {"scale_rule": "up"}, {"fwd_fmt": "e2m1"},
                                    {"w": "e2m1"}])  # fmt: skip
def test_a_recipe_that_is_not_known(change):
    state = dropped(te_mx.Linear(70, 33)).state_dict()
    state._metadata[""]["te_mx_recipe"] |= change
    layer = te_mx.Linear(70, 33)
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match="a recipe that this version of te_mx does not know"):
        layer.load_state_dict(state)
    assert not layer._source.standing and torch.equal(layer.weight, before)
