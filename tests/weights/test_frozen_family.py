"""freeze_weights on the modules other than te_mx.Linear: the same options, errors and state_dicts.

Every case is a module, and a call that gives its rows to it.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from norm_modules import filled
from torch import Tensor, nn

import te_mx
from te_mx.autograd import grouped, linear_recipe
from te_mx.recipe import MXFP8BlockScaling
from te_mx.weights.source import Cached

FLOOR = MXFP8BlockScaling(scale_rule="floor")
IN, ROWS = 70, 45
SPLITS = [7, 0, 31]


def layernorm_linear(**options) -> nn.Module:
    return filled(te_mx.LayerNormLinear(IN, 33, **options))


def layernorm_mlp(**options) -> nn.Module:
    return filled(te_mx.LayerNormMLP(IN, 48, **options))


def grouped_linear(**options) -> nn.Module:
    return te_mx.GroupedLinear(3, IN, 33, **options)


FAMILY: dict[str, Callable[..., nn.Module]] = {
    "LayerNormLinear": layernorm_linear,
    "RMSNorm": lambda **o: layernorm_linear(normalization="RMSNorm", bias=False, **o),
    "LayerNormMLP": layernorm_mlp,
    "swiglu": lambda **o: layernorm_mlp(activation="swiglu", **o),
    "no norm": lambda **o: layernorm_mlp(normalization=None, activation="relu", **o),
    "GroupedLinear": grouped_linear,
    "stacked": lambda **o: grouped_linear(single_grouped_weight=True, **o),
}
every = pytest.mark.parametrize("kind", FAMILY)
CODES = {  # names in the state_dict of the weights and their scales, without masters
    "LayerNormLinear": ["weight"],
    "RMSNorm": ["weight"],
    "LayerNormMLP": ["fc1_weight", "fc2_weight"],
    "swiglu": ["fc1_weight", "fc2_weight"],
    "no norm": ["fc1_weight", "fc2_weight"],
    "GroupedLinear": ["weight0", "weight1", "weight2"],
    "stacked": ["weight"],
}


def call(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, te_mx.GroupedLinear):
        return module(x, SPLITS)
    return module(x)


def run(module: nn.Module, x: Tensor, recipe=None) -> Tensor:
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        return call(module, x)


@pytest.mark.usefixtures("family")
@every
@pytest.mark.parametrize("drop_master", [False, True])
def test_frozen_equals_unfrozen(kind, drop_master, monkeypatch):
    model, x = FAMILY[kind](), torch.randn(ROWS, IN)
    expected = run(model, x)
    assert te_mx.freeze_weights(model, drop_master=drop_master) == 1
    # No weight is quantized again.
    monkeypatch.setattr(linear_recipe, "plan_weight", None)
    for module in (grouped, grouped):
        monkeypatch.setattr(module, "quantize_weights", None)
    for _ in range(2):
        assert torch.equal(run(model, x), expected)


@every
def test_masters_are_kept_for_high_precision(kind):
    model, x = FAMILY[kind](), torch.randn(ROWS, IN)
    expected, before = call(model, x), list(model.state_dict())
    flags = [p.requires_grad for p in model.parameters()]
    te_mx.freeze_weights(model)
    assert torch.equal(call(model, x), expected)
    assert list(model.state_dict()) == before
    assert repr(model).endswith(", frozen)")
    assert {row.weight for row in te_mx.audit(model)} == {"frozen"}
    assert not any(p.requires_grad for p in model.parameters())
    assert te_mx.unfreeze_weights(model) == 1 and te_mx.unfreeze_weights(model) == 0
    assert [p.requires_grad for p in model.parameters()] == flags
    assert "frozen" not in repr(model)


@pytest.mark.usefixtures("family")
@every
def test_gradients_flow_through_to_the_input(kind):
    model, x = FAMILY[kind](), torch.randn(ROWS, IN, requires_grad=True)
    with te_mx.autocast():
        (expected,) = torch.autograd.grad(call(model, x).sum(), x)
        te_mx.freeze_weights(model)
        for _ in range(2):
            (got,) = torch.autograd.grad(call(model, x).sum(), x)
            assert torch.equal(got, expected)


@pytest.mark.usefixtures("family")
@every
def test_changes_of_kept_masters_are_seen(kind):
    model, other, x = FAMILY[kind](), FAMILY[kind](), torch.randn(ROWS, IN)
    before = run(model, x)
    te_mx.freeze_weights(model)
    for name in CODES[kind]:  # each by itself
        with torch.no_grad():
            model.get_parameter(name).mul_(3)
        after = run(model, x)
        te_mx.unfreeze_weights(model)
        assert torch.equal(after, run(model, x))
        te_mx.freeze_weights(model)
    assert not torch.equal(after, before)
    model.load_state_dict(other.state_dict())
    assert torch.equal(run(model, x), run(other, x))


@every
def test_recipes(kind):
    """Kept masters follow the recipe of the region; dropped ones stay as they were quantized."""
    model, x = FAMILY[kind](), torch.randn(ROWS, IN)
    floor, rceil = run(model, x, FLOOR), run(model, x)
    te_mx.freeze_weights(model)
    assert torch.equal(run(model, x, FLOOR), floor) and torch.equal(run(model, x), rceil)
    te_mx.freeze_weights(model, drop_master=True, recipe=FLOOR)  # the first recipe stays
    assert torch.equal(run(model, x), rceil)


# --------------------------------------------------------------------------- without the masters
@every
def test_only_codes_and_scales_stay(kind):
    model = FAMILY[kind](dtype=torch.bfloat16)
    weights = {name: p for name, p in model.named_parameters() if name in CODES[kind]}
    expected = {name: te_mx.quantize(p.flatten(0, -2)) for name, p in weights.items()}
    te_mx.freeze_weights(model, drop_master=True)
    assert repr(model).endswith(", frozen, no master)")
    assert not weights.keys() & dict(model.named_parameters()).keys()
    state = model.state_dict()
    held = sum(b.numel() * b.element_size() for b in model.buffers())
    saved = [state[name + end] for name in weights for end in ("", "_scale")]
    assert held == sum(t.numel() for t in saved)
    for name, weight in weights.items():
        codes, scales = state[name], state[f"{name}_scale"]
        assert codes.dtype == torch.float8_e4m3fn and codes.shape == weight.shape
        assert scales.dtype == torch.uint8 and scales.shape == (*weight.shape[:-1], 3 - (
            weight.shape[-1] == 48
        ))  # fmt: skip
        codes, scales = codes.view(torch.uint8).flatten(0, -2), scales.flatten(0, -2)
        assert torch.equal(codes, expected[name].rowwise_data.view(torch.uint8))
        assert torch.equal(scales, expected[name].rowwise_scale.view(torch.uint8))


@every
def test_runs_in_mxfp8_outside_autocast_too(kind):
    model, x = FAMILY[kind](), torch.randn(ROWS, IN)
    expected = run(model, x)
    te_mx.freeze_weights(model, drop_master=True)
    with torch.no_grad():
        assert torch.equal(call(model, x), expected)
    with te_mx.autocast(enabled=False):
        assert torch.equal(call(model, x), expected)
    for row in te_mx.audit(model):
        assert row.fprop not in ("high precision", "never ran")
        assert row.weight == "frozen, no master"


@every
def test_input_is_checked(kind):
    model = FAMILY[kind]()
    te_mx.freeze_weights(model, drop_master=True)
    with pytest.raises(ValueError, match=r"must be .*=70, got inp of shape"):
        call(model, torch.randn(ROWS, IN + 1))


@every
@pytest.mark.parametrize("bias", [True, False])
def test_return_bias(kind, bias):
    model, x = FAMILY[kind](return_bias=True), torch.randn(ROWS, IN)
    with torch.no_grad(), te_mx.autocast():
        expected, held = call(model, x)
        te_mx.freeze_weights(model, drop_master=True)
        got, same = call(model, x)
    assert torch.equal(got, expected)
    assert same is held or all(a is b for a, b in zip(same, held, strict=True))


@every
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_state_dict_loads_into_a_new_model(kind, assign, meta):
    model, x = nn.ModuleDict({"block": FAMILY[kind]()}), torch.randn(ROWS, IN)
    te_mx.freeze_weights(model, drop_master=True)
    expected, buffer = run(model["block"], x), io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    fresh = nn.ModuleDict({"block": FAMILY[kind](device="meta" if meta and assign else None)})
    fresh.load_state_dict(state, strict=True, assign=assign)
    assert torch.equal(run(fresh["block"], x), expected)
    assert {row.weight for row in te_mx.audit(fresh)} == {"frozen, no master"}
    assert not any(p.requires_grad for p in fresh.parameters())
    assert list(fresh.state_dict()) == list(model.state_dict())
    fresh.load_state_dict(state)  # and into one that is frozen so already
    assert torch.equal(run(fresh["block"], x), expected)


@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_codes_of_groups_load_stacked_and_apart(source, frozen):
    ours = grouped_linear(single_grouped_weight=source)
    other, x = grouped_linear(single_grouped_weight=not source), torch.randn(ROWS, IN)
    te_mx.freeze_weights(ours, drop_master=True)
    if frozen:
        te_mx.freeze_weights(other, drop_master=True)
    other.load_state_dict(ours.state_dict())
    assert torch.equal(run(other, x), run(ours, x))
    assert [n for n in other.state_dict() if "scale" in n] == (
        [f"weight{i}_scale" for i in range(3)] if source else ["weight_scale"]
    )


@every
def test_unfreezing_needs_to_be_asked_for(kind):
    model, x = FAMILY[kind](dtype=torch.bfloat16), torch.randn(ROWS, IN, dtype=torch.bfloat16)
    expected, names = run(model, x), list(model.state_dict())
    first = CODES[kind][0]
    values = te_mx.quantize(model.get_parameter(first).flatten(0, -2)).dequantize(torch.bfloat16)
    te_mx.freeze_weights(model, drop_master=True)
    with pytest.raises(RuntimeError, match=r"1 layers were dropped.*dequantize=True"):
        te_mx.unfreeze_weights(model)
    assert te_mx.unfreeze_weights(model, dequantize=True) == 1
    assert sorted(model.state_dict()) == sorted(names)
    assert torch.equal(model.get_parameter(first).flatten(0, -2), values)
    assert all(p.requires_grad for p in model.parameters()) and not list(model.buffers())
    assert torch.equal(run(model, x), expected)  # quantizing quantized values changes nothing
    with te_mx.autocast():
        call(model, x).sum().backward()
    assert model.get_parameter(first).grad is not None


@pytest.mark.usefixtures("family")
@every
@pytest.mark.parametrize("drop_master", [False, True])
def test_deepcopy_and_pickle(kind, drop_master):
    model, x = FAMILY[kind](), torch.randn(ROWS, IN)
    te_mx.freeze_weights(model, drop_master=drop_master)
    expected = run(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other._source.kept
        assert torch.equal(run(other, x), expected)
        te_mx.unfreeze_weights(other, dequantize=True)
    assert model._source.standing


@every
@pytest.mark.parametrize("drop_master", [False, True])
def test_compiled(kind, drop_master):
    torch._dynamo.reset()
    model, x = FAMILY[kind](), torch.randn(ROWS, IN)
    expected = run(model, x)
    te_mx.freeze_weights(model, drop_master=drop_master)
    grouped_call = isinstance(model, te_mx.GroupedLinear)
    args = (x, torch.tensor(SPLITS)) if grouped_call else (x,)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), te_mx.autocast():
        assert torch.equal(compiled(*args), expected)


@every
def test_wrong_quantized_checkpoints_are_refused(kind):
    model = FAMILY[kind]()
    plain = model.state_dict()
    te_mx.freeze_weights(model, drop_master=True)
    last = CODES[kind][-1]
    state = model.state_dict()
    shape = tuple(state[last].shape)
    wrong = [
        (last, torch.zeros(shape), "must be float8_e4m3fn, got torch.float32"),
        (f"{last}_scale", torch.zeros(shape), "must be uint8 .E8M0 bytes., got torch.float32"),
        (f"{last}_scale", state[f"{last}_scale"][..., :1], "one scale per 32 columns"),
    ]
    for key, value, says in wrong:
        changed = {**state, key: value}
        if kind == "GroupedLinear":  # what is told apart are parts that differ
            says = f"weight0.* must have one {'shape' if value.shape[-1] == 1 else 'dtype'}"
        if kind == "GroupedLinear" and value.dtype == torch.float32 and key != last:
            says = "weight0_scale.* must have one shape"
        for target in (FAMILY[kind](), copy.deepcopy(model)):
            with pytest.raises(RuntimeError, match=says):
                target.load_state_dict(changed)
    with pytest.raises(RuntimeError, match=r"unfreeze_weights.model, dequantize=True"):
        model.load_state_dict(plain)


@pytest.mark.parametrize("kind", ["LayerNormMLP", "GroupedLinear"])
def test_weights_are_frozen_together(kind):
    model = FAMILY[kind]()
    te_mx.freeze_weights(model, drop_master=True)
    state = model.state_dict()
    del state[f"{CODES[kind][-1]}_scale"]
    with pytest.raises(RuntimeError, match=f"{CODES[kind][-1]}_scale: missing beside"):
        FAMILY[kind]().load_state_dict(state)


def test_weights_without_a_place_of_their_own():
    for model, x in (
        (layernorm_linear(parameters_split={"q": 11, "kv": 22}), torch.randn(ROWS, IN)),
        (nn.utils.parametrizations.weight_norm(layernorm_mlp(), "fc2_weight"), torch.randn(2, IN)),
        (nn.utils.parametrizations.weight_norm(grouped_linear(), "weight1"), torch.randn(ROWS, IN)),
    ):
        with pytest.raises(ValueError, match=r"root.*parametrization or split into parameters"):
            te_mx.freeze_weights(model, drop_master=True)
        expected = run(model, x)
        te_mx.freeze_weights(model)
        assert torch.equal(run(model, x), expected)
    quantized = layernorm_linear()
    te_mx.freeze_weights(quantized, drop_master=True)
    target = layernorm_linear(parameters_split=("a", "b", "c"))
    with pytest.raises(RuntimeError, match="does not load into a layer with parameters_split"):
        target.load_state_dict(quantized.state_dict())


@every
def test_meta_weights_are_refused(kind):
    with pytest.raises(ValueError, match="on the meta device and has no values"):
        te_mx.freeze_weights(FAMILY[kind](device="meta"))


def test_nothing_is_frozen_where_one_module_cannot_be():
    model = nn.Sequential(layernorm_mlp(), te_mx.Linear(IN, 4, device="meta"))
    with pytest.raises(ValueError, match=r"^1: weight is on the meta device"):
        te_mx.freeze_weights(model)
    assert not model[0]._source.standing


def test_micro_batches_end_where_freezing_begins():
    model, x = layernorm_mlp(), torch.randn(ROWS, IN)
    with torch.no_grad(), te_mx.autocast():
        model(x, is_first_microbatch=True)
        model.fc1_weight.mul_(3)
        te_mx.freeze_weights(model)
        assert not isinstance(model._source, Cached)
        got = model(x, is_first_microbatch=False)
        te_mx.unfreeze_weights(model)
        assert torch.equal(got, model(x))


def test_fused_modules_go_back_only_when_unfrozen():
    model = nn.Sequential(nn.LayerNorm(IN), nn.Linear(IN, 8))
    te_mx.convert_model(model, fuse=True)
    te_mx.freeze_weights(model, drop_master=True)
    assert "unfreeze_weights" in te_mx.revert_model(model).skipped["0"]
    te_mx.unfreeze_weights(model, dequantize=True)
    te_mx.revert_model(model)
    assert type(model[0]) is nn.LayerNorm and type(model[1]) is nn.Linear
