"""parameters_split, arguments that te_mx refuses, and what conversion and freezing make of them."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SEEDS, SIZES
from test_knobs_linear import RECIPES, assert_same, case, run, twin
from torch import nn

import te_mx
from te_mx.nn import arguments

QKV = {"query": 17, "key": 9, "value": 7}


# ----------------------------------------------------------------------------- parameters_split
@pytest.mark.parametrize(
    ("given_split", "names"),
    [
        (("query_", "key", "value"), ["query", "key", "value"]),
        (["a"], ["a"]),
        ("a", ["a"]),
        ({"up_": 10, "gate_": 23}, ["up", "gate"]),
    ],
)
def test_names_are_those_of_transformer_engine(given_split, names):
    layer = te_mx.Linear(70, 33, parameters_split=given_split)
    keys = [f"{name}_weight" for name in names] + [f"{name}_bias" for name in names]
    assert list(layer.state_dict()) == keys == [name for name, _ in layer.named_parameters()]
    assert layer.weight is None and layer.bias is None
    assert layer.whole_weight().shape == (33, 70) and layer.whole_bias().shape == (33,)
    assert "parameters_split" in repr(layer)
    sizes = [layer.get_parameter(key).shape[0] for key in keys[: len(names)]]
    assert sizes == (list(given_split.values()) if isinstance(given_split, dict) else
                     [33 // len(names)] * len(names))  # fmt: skip


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4), SIZES, SIZES.filter(bool), st.booleans(),
    st.sampled_from(RECIPES), SEEDS,
)  # fmt: skip
def test_split_equals_whole(sizes, m, k, bias, recipe, seed):
    torch.manual_seed(seed)
    whole = te_mx.Linear(k, sum(sizes), bias)
    layer = twin(whole, parameters_split={f"p{i}": size for i, size in enumerate(sizes)})
    assert (layer.whole_bias() is not None) == bias
    x, grad = torch.randn(m, k), torch.randn(m, sum(sizes))
    assert_same(run(layer, x, grad, recipe), run(whole, x, grad, recipe))
    for kind in ("weight", "bias") if bias else ("weight",):
        parts = [layer.get_parameter(f"p{i}_{kind}").grad for i in range(len(sizes))]
        assert torch.equal(torch.cat(parts), getattr(whole, kind).grad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_split_with_the_other_knobs(recipe, delay, fuse):
    whole, x, grad = case()
    layer = twin(
        whole, parameters_split=QKV, delay_wgrad_compute=delay, fuse_wgrad_accumulation=fuse,
        save_original_input=True,
    )  # fmt: skip
    weights = [layer.get_parameter(f"{name}_weight") for name in QKV]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    weights[2].grad_added_to_main_grad = False
    weights[1].overwrite_main_grad = True
    for _ in range(2):
        assert_same(run(layer, x, grad, recipe), run(whole, x, grad, recipe))
        if delay:
            layer.backward_dw()
    expected = list(whole.weight.grad.split(list(QKV.values())))
    if fuse:
        expected[1] = expected[1] / 2  # written over
        assert_same([weight.main_grad for weight in weights], expected)
        assert weights[2].grad_added_to_main_grad
    else:
        assert_same([weight.grad for weight in weights], expected)
        got = [weight.grad.untyped_storage().nbytes() for weight in weights]
        assert got == [weight.numel() * 4 for weight in weights] or not delay


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_parts_that_do_not_train(delay, fuse):
    whole, x, grad = case()
    run(whole, x, grad)
    layer = twin(
        whole, parameters_split=QKV, delay_wgrad_compute=delay, fuse_wgrad_accumulation=fuse
    )
    layer.key_weight.requires_grad_(False)
    layer.key_weight.grad_added_to_main_grad = False
    for weight in (layer.query_weight, layer.value_weight):
        weight.main_grad = torch.zeros_like(weight)
    run(layer, x, grad)
    if delay:
        layer.backward_dw()
    name = "main_grad" if fuse else "grad"
    assert torch.equal(getattr(layer.query_weight, name), whole.weight.grad[:17])
    assert torch.equal(getattr(layer.value_weight, name), whole.weight.grad[26:])
    assert layer.key_weight.grad is None and not layer.key_weight.grad_added_to_main_grad


def test_split_parameters_have_memory_of_their_own():
    layer = te_mx.Linear(70, 33, parameters_split=QKV)
    for parameter in layer.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = te_mx.Linear(70, 33, parameters_split=QKV)
    state = {**torch.load(buffer), "_extra_state": torch.empty(0, dtype=torch.uint8)}
    other.load_state_dict(state, strict=True)
    assert torch.equal(other.whole_weight(), layer.whole_weight())


def test_split_initialization():
    torch.manual_seed(0)
    layer = te_mx.Linear(100, 300, parameters_split=("a", "b", "c"))
    for name, value in layer.named_parameters():
        assert 0.09 < value.abs().max() <= 0.1, name
    seen = []

    def init(weight):
        seen.append(tuple(weight.shape))
        nn.init.ones_(weight)

    layer = te_mx.Linear(100, 300, init_method=init, parameters_split={"a": 200, "b": 100})
    assert seen == [(200, 100), (100, 100)]
    assert torch.equal(layer.whole_weight(), torch.ones(300, 100))
    nn.init.zeros_(layer.a_weight)
    layer.reset_parameters()
    assert torch.equal(layer.whole_weight(), torch.ones(300, 100))
    assert 0.09 < layer.b_bias.abs().max() <= 0.1
    meta = te_mx.Linear(100, 300, device="meta", init_method=init, parameters_split=("a", "b"))
    meta = meta.to_empty(device="cpu")
    meta.reset_parameters()
    assert torch.equal(meta.whole_weight(), torch.ones(300, 100))


def test_split_layers_return_the_whole_bias_and_compile():
    torch._dynamo.reset()
    whole, x, grad = case()
    layer = twin(whole, parameters_split=QKV, return_bias=True)
    with te_mx.autocast():
        y, bias = layer(x)
    assert torch.equal(bias, whole.bias)
    whole_without = te_mx.Linear(70, 33, bias=False)
    whole_without.load_state_dict({"weight": whole.weight.detach()})
    assert torch.equal(y, run(whole_without, x, grad)[0])
    plain = twin(whole, parameters_split=QKV)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    assert_same(run(plain, x, grad, forward=compiled), run(whole, x, grad))
    assert torch.equal(plain.query_weight.grad, whole.weight.grad[:17])


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ((), ValueError, "must be names or a dict"),
        ({}, ValueError, "must be names or a dict"),
        ((1, 2), TypeError, "must be names or a dict"),
        (("a", "b"), ValueError, r"add up to out_features=33, got \[16, 16\]"),
        ({"a": 30, "b": 4}, ValueError, r"out_features=33, got \[30, 4\]"),
        ({"a": 33.0}, TypeError, "must be ints"),
        ({"a": 34, "b": -1}, TypeError, "must be ints"),
        (("a", "a_", "b"), ValueError, "must be different identifiers"),
        (("a.b", "c", "d"), ValueError, "must be different identifiers"),
    ],
)
def test_wrong_splits_are_refused(value, error, says):
    with pytest.raises(error, match=says):
        te_mx.Linear(70, 33, parameters_split=value)


def test_split_layers_freeze_but_keep_their_parameters():
    whole, x, grad = case()
    layer = twin(whole, parameters_split=QKV)
    layer.key_weight.requires_grad_(False)
    expected = run(whole, x, grad)
    te_mx.freeze_weights(layer)
    assert not any(p.requires_grad for p in layer.parameters())
    assert_same(run(layer, x, grad), expected)
    with pytest.raises(ValueError, match="split into parameters"):
        te_mx.freeze_weights(layer, drop_master=True)
    te_mx.unfreeze_weights(layer)
    assert [p.requires_grad for p in layer.parameters()] == [True, False, *[True] * 4]
    te_mx.freeze_weights(whole, drop_master=True)
    with pytest.raises(RuntimeError, match="does not load into a layer with parameters_split"):
        layer.load_state_dict(whole.state_dict())


# ------------------------------------------------------------------------------- conversion
@pytest.mark.parametrize(
    "kwargs",
    [
        {"fuse_wgrad_accumulation": True},
        {"delay_wgrad_compute": True},
        {"parameters_split": ("a", "b", "c")},
        {"return_bias": True},
    ],
)
def test_revert_leaves_what_nn_linear_has_not(kwargs):
    model = nn.Sequential(te_mx.Linear(70, 33, **kwargs), te_mx.Linear(33, 33))
    report = te_mx.revert_model(model)
    assert list(report.skipped) == ["0"] and next(iter(kwargs)) in report.skipped["0"]
    assert type(model[1]) is nn.Linear


def test_converted_layers_have_the_knobs_at_their_defaults_and_take_them_later():
    model = te_mx.convert_model(nn.Sequential(nn.Linear(40, 8))).model
    x, grad = torch.randn(5, 40), torch.randn(5, 8)
    layer = model[0]
    expected = run(layer, x, grad)
    wgrad = layer.weight.grad.clone()
    layer.save_original_input = True
    layer.zero_grad()
    assert_same(run(layer, x, grad), expected)
    assert torch.equal(layer.weight.grad, wgrad)
    layer.backward_dw()
    assert not layer.need_backward_dw()
    layer.delay_wgrad_compute = True
    layer.zero_grad()
    assert_same(run(layer, x, grad), expected)
    assert layer.weight.grad is None
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, wgrad)
    layer.delay_wgrad_compute = False
    te_mx.revert_model(model)
    assert "save_original_input" not in layer.__dict__ and type(layer) is nn.Linear


# ------------------------------------------------------- arguments of Transformer Engine alone
@pytest.mark.parametrize("name", sorted(arguments.CONSTRUCTORS["Linear"]))
def test_absent_arguments_are_taken_at_their_defaults_only(name):
    default = arguments.ABSENT[name].default
    te_mx.Linear(40, 8, **{name: default})
    for value in (True, 2, "column", object()):
        with pytest.raises(NotImplementedError, match=rf"te_mx.Linear: {name}=.*leave it at"):
            te_mx.Linear(40, 8, **{name: value})


def test_unknown_arguments_are_type_errors():
    with pytest.raises(TypeError, match="unexpected keyword argument 'ub_overlap'"):
        te_mx.Linear(40, 8, ub_overlap=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'seq_length'"):
        te_mx.Linear(40, 8, seq_length=None)


@pytest.mark.parametrize("name", ["fp8_output", "fp8_grad"])
def test_quantized_outputs_are_refused(name):
    layer = te_mx.Linear(40, 8)
    with te_mx.autocast():
        layer(torch.randn(3, 40), None, False, False)
        with pytest.raises(NotImplementedError, match=f"{name}=True is not supported"):
            layer(torch.randn(3, 40), **{name: True})
