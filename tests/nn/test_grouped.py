"""te_mx.GroupedLinear is a loop of te_mx.Linear, bit for bit: splits, dtypes, recipes, caches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from grouped_cases import (
    FEATURES,
    RECIPES,
    SPLITS,
    assert_same_as_loop,
    equal,
    loop_of,
    parameters,
    run_loop,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, FINITE_KINDS, SEEDS, tensor
from torch import nn

import te_mx
from te_mx.autograd import grouped as autograd
from te_mx.autograd import grouped_loop
from te_mx.weights.source import WeightSource

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # NVFP4 on the CPU


@given(
    splits=SPLITS, behind=st.integers(0, 40), k=FEATURES, n=FEATURES, dtype=DTYPES, seed=SEEDS,
    kind=st.sampled_from(FINITE_KINDS), recipe=st.sampled_from(sorted(RECIPES)),
    stacked=st.booleans(), bias=st.booleans(), as_tensor=st.booleans(),
)  # fmt: skip
def test_equals_a_loop(
    splits: list[int], behind: int, k: int, n: int, dtype: torch.dtype, seed: int, kind: str,
    recipe: str, stacked: bool, bias: bool, as_tensor: bool,
) -> None:  # fmt: skip
    layer = te_mx.GroupedLinear(len(splits), k, n, bias, dtype=dtype, single_grouped_weight=stacked)
    x = tensor(kind, sum(splits) + behind, k, seed, dtype)
    m_splits = torch.tensor(splits, dtype=torch.int32) if as_tensor else None
    with te_mx.autocast(recipe=RECIPES[recipe]):
        assert_same_as_loop(layer, loop_of(layer), x, splits, m_splits)


@pytest.mark.parametrize("recipe", ["e4m3", "blockwise", "fp32_scales"])
@pytest.mark.parametrize(
    "splits", [[40, 0, 3, 90], [0, 0, 133, 0], [16, 17, 1, 33], [129, 0, 256, 127]]
)
def test_equals_a_loop_at_every_level(isa: str, splits: list[int], recipe: str, guarded) -> None:
    layer = te_mx.GroupedLinear(4, 160, 144, dtype=torch.bfloat16)  # over blocks of 128
    x = torch.randn(sum(splits) + 5, 160, dtype=torch.bfloat16)
    with te_mx.autocast(recipe=RECIPES[recipe]):
        assert_same_as_loop(layer, loop_of(layer), x, splits)


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_bits_do_not_depend_on_threads(count: int, threads) -> None:
    layer = te_mx.GroupedLinear(5, 256, 192, dtype=torch.bfloat16)
    x = torch.randn(700, 256, dtype=torch.bfloat16)
    threads(count)
    with te_mx.autocast():
        assert_same_as_loop(layer, loop_of(layer), x, [300, 7, 0, 393, 0])


def test_reference_backend_equals_a_loop(no_native) -> None:
    layer = te_mx.GroupedLinear(3, 40, 33)
    x = torch.randn(90, 40)
    with te_mx.autocast(), pytest.warns(te_mx.FallbackWarning):
        assert_same_as_loop(layer, loop_of(layer), x, [50, 0, 33])


@given(splits=SPLITS, behind=st.integers(0, 9), dtype=DTYPES, stacked=st.booleans())
@settings(max_examples=20)
def test_is_a_loop_of_nn_linear_outside_autocast(
    splits: list[int], behind: int, dtype: torch.dtype, stacked: bool
) -> None:
    layer = te_mx.GroupedLinear(len(splits), 24, 40, dtype=dtype, single_grouped_weight=stacked)
    x = torch.randn(sum(splits) + behind, 24).to(dtype)
    assert_same_as_loop(layer, loop_of(layer, nn.Linear), x, splits)


def test_initialization_is_that_of_nn_linear_group_by_group() -> None:
    torch.manual_seed(3)
    expected = [nn.Linear(20, 12) for _ in range(3)]
    for stacked in (False, True):
        torch.manual_seed(3)
        layer = te_mx.GroupedLinear(3, 20, 12, single_grouped_weight=stacked)
        equal(parameters(layer, "weight"), torch.stack([m.weight.detach() for m in expected]))
        equal(parameters(layer, "bias"), torch.stack([m.bias.detach() for m in expected]))


def test_init_method_sees_every_weight() -> None:
    for stacked in (False, True):
        layer = te_mx.GroupedLinear(
            3, 4, 5, init_method=nn.init.ones_, single_grouped_weight=stacked
        )
        assert bool((parameters(layer, "weight") == 1).all())


def test_rows_behind_the_groups_touch_nothing() -> None:
    layer = te_mx.GroupedLinear(2, 64, 32)
    x = torch.randn(100, 64)
    x[70:] = torch.nan
    for enabled in (True, False):
        layer.zero_grad()
        inp = x.clone().requires_grad_()
        with te_mx.autocast(enabled=enabled):
            y = layer(inp, [30, 40])
        assert bool((y[70:] == 0).all())
        y.backward(torch.full_like(y, 2.0))
        assert bool((inp.grad[70:] == 0).all())
        assert bool(parameters(layer, "weight.grad").isfinite().all())


def test_leading_dimensions_are_flattened() -> None:
    layer = te_mx.GroupedLinear(2, 32, 16)
    x = torch.randn(2, 3, 5, 32)
    with te_mx.autocast():
        y = layer(x, [10, 20])
        equal(y, layer(x.view(30, 32), [10, 20]).view(2, 3, 5, 16))


@pytest.mark.parametrize("stacked", [False, True])
def test_return_bias(stacked: bool) -> None:
    layer = te_mx.GroupedLinear(2, 32, 16, return_bias=True, single_grouped_weight=stacked)
    x = torch.randn(30, 32)
    for enabled in (True, False):
        with te_mx.autocast(enabled=enabled):
            y, biases = layer(x, [10, 20])
            plain = loop_of(layer, te_mx.Linear)
            for one in plain:
                one.bias.data.zero_()
            equal(y, run_loop(plain, x, [10, 20]))
        assert torch.equal(biases if stacked else torch.stack(biases), parameters(layer, "bias"))
    assert te_mx.GroupedLinear(2, 4, 4, bias=False, return_bias=True)(torch.ones(2, 4), [1, 1])[
        1
    ] is None  # fmt: skip


@pytest.mark.parametrize("needed", ["x", "weight1", "bias0", "bias1 weight0", "x bias1"])
def test_only_what_needs_a_gradient_gets_one(needed: str) -> None:
    layer = te_mx.GroupedLinear(2, 64, 48)
    for name, p in layer.named_parameters():
        p.requires_grad_(name in needed.split())
    x = torch.randn(50, 64, requires_grad="x" in needed.split())
    layers = loop_of(layer)
    theirs = x.detach().clone().requires_grad_()
    with te_mx.autocast():
        y, expected = layer(x, [20, 30]), run_loop(layers, theirs, [20, 30])
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    if "x" in needed:
        equal(x.grad, theirs.grad)
    for name, p in layer.named_parameters():
        if not p.requires_grad:
            assert p.grad is None
        elif name.startswith("weight"):
            equal(p.grad, layers[int(name[-1])].weight.grad)
        elif needed.startswith("bias0"):  # nothing else is asked: torch sums the rows
            equal(p.grad, grad[:20].sum(0))
        else:
            equal(p.grad, layers[int(name[-1])].bias.grad)


@pytest.mark.parametrize("stacked", [False, True])
def test_weights_that_stand_still(stacked: bool, isa: str) -> None:
    layer = te_mx.GroupedLinear(3, 64, 96, dtype=torch.bfloat16, single_grouped_weight=stacked)
    x = torch.randn(80, 64, dtype=torch.bfloat16)
    splits = [20, 8, 50]
    with te_mx.autocast():
        fresh = layer(x, splits)
        for first in (True, False, False):
            equal(layer(x.requires_grad_(), splits, is_first_microbatch=first), fresh)
        kept = layer._source.kept["weight"]
        assert kept.col is not None
        with torch.no_grad():
            for name, p in layer.named_parameters():
                if name.startswith("weight"):
                    p.mul_(2)
        equal(layer(x, splits, is_first_microbatch=False), fresh)  # still the old ones
        assert layer._source.kept["weight"] is kept
        assert not torch.equal(layer(x, splits, is_first_microbatch=True), fresh)


def test_gradients_of_kept_weights(isa: str) -> None:
    layer = te_mx.GroupedLinear(3, 64, 96, dtype=torch.bfloat16)
    layers = loop_of(layer)
    x = torch.randn(80, 64, dtype=torch.bfloat16)
    with te_mx.autocast():
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        layer(ours, [20, 8, 50], is_first_microbatch=True).sum().backward()
        run_loop(layers, theirs, [20, 8, 50]).sum().backward()
    equal(ours.grad, theirs.grad)
    equal(parameters(layer, "weight.grad"), torch.stack([m.weight.grad for m in layers]))


def test_frozen_weights() -> None:
    layer = te_mx.GroupedLinear(3, 64, 48)
    x = torch.randn(60, 64)
    with te_mx.autocast():
        expected = layer(x, [20, 0, 40])
        assert te_mx.freeze_weights(layer) == 1
        assert not any(p.requires_grad for p in layer.parameters())
        with torch.no_grad():
            equal(layer(x, [20, 0, 40]), expected)
            layer.weight0.mul_(3)
            tripled = layer(x, [20, 0, 40])
            equal(tripled[20:], expected[20:])
            assert not torch.equal(tripled[:20], expected[:20])  # its codes are made anew
        inp = x.clone().requires_grad_()
        layer(inp, [20, 0, 40]).sum().backward()
        assert inp.grad is not None
        assert "frozen" in repr(layer) and te_mx.audit(layer)["(root)"].weight == "frozen"
        copied = pickle.loads(pickle.dumps(layer))
        assert not copied._source.kept
        assert te_mx.unfreeze_weights(layer) == 1
        assert all(p.requires_grad for p in layer.parameters())
        assert not torch.equal(layer(x, [20, 0, 40]), expected)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_recipes_with_another_backward_loop_over_the_groups(
    stacked: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "by_steps", lambda settings: False)
    layer = te_mx.GroupedLinear(4, 64, 48, single_grouped_weight=stacked)
    x = torch.randn(70, 64)
    with te_mx.autocast():
        if frozen:
            layers, inp = loop_of(layer), x.clone().requires_grad_()
            te_mx.freeze_weights(layer)
            theirs = x.clone().requires_grad_()
            layer(inp, [20, 0, 7, 40]).sum().backward()
            run_loop(layers, theirs, [20, 0, 7, 40]).sum().backward()
            equal(inp.grad, theirs.grad)
        else:
            assert_same_as_loop(layer, loop_of(layer), x, [20, 0, 7, 40])
        monkeypatch.setattr(grouped_loop, "readable", lambda offs: False)
        with pytest.raises(NotImplementedError, match="m_splits as a list or on the CPU"):
            layer(x.requires_grad_(), [20, 0, 7, 40])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("save_x", [False, True])
def test_gradients_can_go_elsewhere_and_x_be_saved(stacked: bool, save_x: bool) -> None:
    layer = te_mx.GroupedLinear(3, 64, 1, dtype=torch.bfloat16, single_grouped_weight=stacked)
    x = torch.randn(60, 64, dtype=torch.bfloat16, requires_grad=True)
    with te_mx.autocast():
        layer(x, [20, 0, 33]).sum().backward()
    expected = parameters(layer, "weight.grad")
    taken = []

    class Sink:
        def take(self, wgrad, dtype: torch.dtype, node: object = None) -> torch.Tensor:
            into = torch.ones(3, 1, 64)
            taken.append(wgrad(into, torch.float32, True))
            return wgrad(None, dtype, False)

    layer.zero_grad()
    named = sorted(layer.named_parameters(), key=lambda item: item[0].startswith("bias"))
    parts = tuple(p for _, p in named)
    settings = RECIPES["e4m3"].settings
    offs = torch.tensor([20, 20, 53])
    for grad_target in (Sink(), None):
        call = autograd.GroupedCall(
            0, settings, torch.bfloat16, True, save_x=save_x, grad_target=grad_target
        )
        y = autograd.grouped_linear(x, offs, parts, call)
        y.sum().backward()
        equal(parameters(layer, "weight.grad"), expected)
        layer.zero_grad()
    torch.testing.assert_close(taken[0].view(3, 1, 64), expected.float() + 1, rtol=1e-2, atol=1e-2)


def test_deepcopy_starts_without_caches() -> None:
    layer = te_mx.GroupedLinear(2, 32, 16)
    with te_mx.autocast():
        layer(torch.randn(4, 32), [2, 2], is_first_microbatch=True)
    copied = copy.deepcopy(layer)
    assert type(copied._source) is WeightSource and copied._tag == -1


def test_recomputation_uses_the_recipe_of_the_forward() -> None:
    layer = te_mx.GroupedLinear(2, 32, 16)
    x = torch.randn(40, 32, requires_grad=True)
    with te_mx.autocast():
        expected = torch.autograd.grad(layer(x, [13, 27]).square().sum(), x)[0]
        y = torch.utils.checkpoint.checkpoint(layer, x, [13, 27], use_reentrant=False)
    equal(torch.autograd.grad(y.square().sum(), x)[0], expected)


def test_double_backward_is_refused() -> None:
    layer = te_mx.GroupedLinear(2, 32, 16)
    x = torch.randn(40, 32, requires_grad=True)
    with te_mx.autocast():
        (grad,) = torch.autograd.grad(layer(x, [13, 27]).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_torch_autocast_decides_the_dtype() -> None:
    layer = te_mx.GroupedLinear(2, 32, 16)
    x = torch.randn(40, 32)
    with torch.autocast("cpu", torch.bfloat16):
        for enabled in (True, False):
            with te_mx.autocast(enabled=enabled):
                y = layer(x, [13, 27])
                assert y.dtype == torch.bfloat16
                equal(y, run_loop(loop_of(layer), x, [13, 27]))


def test_audit_and_explain_name_the_kernels(isa: str) -> None:
    layer = te_mx.GroupedLinear(3, 96, 80, name="experts")
    assert te_mx.audit(layer)["(root)"].fprop == "never ran"
    with te_mx.autocast():
        layer(torch.randn(60, 96, requires_grad=True), [20, 0, 40]).sum().backward()
        found = te_mx.audit(layer)["(root)"]
        assert found.kind == "te_mx.GroupedLinear" and found.fprop == te_mx.explain(
            m=80, n=40, k=96
        ).kernel  # fmt: skip
        layer(torch.randn(60, 96, requires_grad=True), [8, 0, 40]).sum().backward()
    found = te_mx.audit(layer)["(root)"]
    told = te_mx.explain_grouped([8, 0, 40], in_features=96, out_features=80)
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert set(getattr(found, gemm).split(" + ")) == set(getattr(told, gemm).split(" + "))
    assert " + " in found.fprop and "one parallel region" in str(told)
    layer(torch.randn(3, 96), [1, 1, 1])
    assert te_mx.audit(layer)["(root)"].fprop == "high precision"
    assert te_mx.explain_grouped([0], in_features=4, out_features=4).fprop == "zero_size"


CASES = [
    ((torch.ones(4, 8), [2, 2]), ValueError, r"'e'.*last dimension.*in_features=16.*\(4, 8\)"),
    ((torch.ones(4, 16), [2, 2, 0]), ValueError, r"one entry for each of 2 groups, got 3"),
    ((torch.ones(4, 16), [2, 3]), ValueError, r"add up to 5 rows, inp has 4; pass"),
    ((torch.ones(4, 16), [-1, 3]), ValueError, r"must be 0 or more, got \[-1, 3\]"),
    ((torch.ones(4, 16), torch.tensor([2, 3])), ValueError, r"add up to 5 rows"),
    ((torch.ones(4, 16), torch.tensor([-2, 3])), ValueError, r"0 or more"),
    ((torch.ones(4, 16), torch.tensor([2.0, 2.0])), TypeError, r"int32 or int64.*\.long\(\)"),
    ((torch.ones(4, 16), torch.tensor([[2, 2]])), ValueError, r"got shape \(1, 2\)"),
    ((torch.ones(4, 16).double(), [2, 2]), TypeError, r"got inp torch.float64.*convert"),
    ((torch.ones(4, 16, device="meta"), [2, 2]), ValueError, r"inp is on meta.*move"),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES)
def test_errors_say_what_is_wrong(call: tuple, error: type, message: str) -> None:
    layer = te_mx.GroupedLinear(2, 16, 8, name="e")
    with te_mx.autocast(), pytest.raises(error, match=message):
        layer(*call)


def test_constructor_errors() -> None:
    with pytest.raises(ValueError, match="num_gemms must be 1 or more, got 0"):
        te_mx.GroupedLinear(0, 4, 4)
    with pytest.raises(ValueError, match="disagree"):
        te_mx.GroupedLinear(1, 4, 4, dtype=torch.float32, params_dtype=torch.bfloat16)
    layer = te_mx.GroupedLinear(2, 4, 3, params_dtype=torch.bfloat16)
    assert layer.weight1.dtype == torch.bfloat16
    assert [n for n, _ in layer.named_parameters()] == ["weight0", "bias0", "weight1", "bias1"]
