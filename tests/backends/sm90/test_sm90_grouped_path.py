"""Grouped layers on operands packed for Hopper, on any machine: once as plain torch describes them,
once on the calls of the native module, which fake_sm90.py stands in for.
"""

from __future__ import annotations

import pytest
import torch
from as_on_hopper import hide_splits, hopper_with_groups, hoppers_forms
from grouped_cases import RECIPES, SPLITS, assert_same_as_loop, equal, loop_of, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, SEEDS, tensor
from torch import Tensor

import te_mx

E4M3 = "mxfp8_e4m3"
LARGE = st.lists(st.sampled_from([0, 0, 1, 31, 127, 128, 129, 300]), min_size=1, max_size=6)


@pytest.fixture
def hopper_forms(threads):
    threads(1)  # many small operators
    with hoppers_forms():
        yield


@pytest.fixture
def hopper(threads):
    threads(1)
    with hopper_with_groups() as calls:
        yield calls


def check_layer(
    splits: list[int], behind: int, k: int, n: int, dtype: torch.dtype, recipe: str, stacked: bool,
    bias: bool, seed: int,
) -> None:  # fmt: skip
    layer = te_mx.GroupedLinear(len(splits), k, n, bias, dtype=dtype, single_grouped_weight=stacked)
    x = tensor("normal", sum(splits) + behind, k, seed, dtype)
    with te_mx.autocast(recipe=RECIPES[recipe]):
        assert_same_as_loop(layer, loop_of(layer), x, splits)


CASES = {
    "splits": st.one_of(SPLITS, LARGE), "behind": st.integers(0, 40),
    "k": st.sampled_from([1, 33, 64, 130]), "n": st.sampled_from([1, 17, 64, 140]),
    "dtype": DTYPES, "recipe": st.sampled_from(sorted(RECIPES.keys() - {"nvfp4"})),
    "stacked": st.booleans(), "bias": st.booleans(), "seed": SEEDS,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # of the reference
@given(**CASES)
@settings(max_examples=20)
def test_described_layers_equal_a_loop(hopper_forms, **case) -> None:
    check_layer(**case)


@given(**CASES)
@settings(max_examples=20)
def test_native_layers_equal_a_loop(hopper, **case) -> None:
    check_layer(**case)


@pytest.mark.parametrize("keep", [False, True])
def test_one_call_each(hopper, keep) -> None:
    calls = hopper
    layer = te_mx.GroupedLinear(3, 64, 48, dtype=torch.bfloat16)
    x = torch.randn(60, 64, dtype=torch.bfloat16, requires_grad=True)
    with te_mx.autocast(recipe=te_mx.recipe.MXFP8BlockScaling(keep_weight_columns=keep)):
        layer(x, [20, 0, 33]).sum().backward()
    assert calls == [
        "quantize_grouped", "quantize_stacked", "gemm_rows",
        "quantize_grouped", *([] if keep else ["quantize_stacked"]), "gemm_rows", "gemm_k",
    ]  # fmt: skip
    found = te_mx.audit(layer)["(root)"]
    assert {found.fprop, found.dgrad, found.wgrad} == {"sm90_adaptive"}
    calls.clear()
    with te_mx.autocast():
        for first in (True, False, False):
            layer(x, [20, 0, 33], is_first_microbatch=first).sum().backward()
    assert calls.count("quantize_stacked") == 1
    (kept,) = layer._source.kept.values()
    assert kept.row.spec == f"{E4M3}@sm90:8"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("sizes", [(64, 48), (64, 64), (70, 44)], ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_exact_layers_run_one_group_after_the_other(hopper, stacked: bool, sizes, keep) -> None:
    """On plain operands, each in cuBLAS; only the weights of all groups are quantized at once: both
    directions in forward, or one each way."""
    layer = te_mx.GroupedLinear(3, *sizes, single_grouped_weight=stacked)
    x = torch.randn(60, sizes[0], requires_grad=True)
    recipe = te_mx.recipe.MXFP8BlockScaling(precision="exact", keep_weight_columns=keep)
    with te_mx.autocast(recipe=recipe):
        assert_same_as_loop(layer, loop_of(layer), x.detach(), [20, 0, 33])
        assert hopper == ["quantize_stacked"] * (1 if keep else 2)
        found = te_mx.audit(layer)["(root)"]
        assert {found.fprop, found.dgrad, found.wgrad} == {"sm90_exact"}
        for first in (True, False):
            layer(x, [20, 0, 33], is_first_microbatch=first)
    (kept,) = layer._source.kept.values()
    assert (kept.row.spec, kept.col.spec) == (f"{E4M3}@rows", f"{E4M3}@cols")


@pytest.mark.filterwarnings("ignore:te_mx runs quantize on:te_mx.FallbackWarning")
def test_a_rule_that_the_quantizer_does_not_know(hopper, monkeypatch) -> None:
    """Tokens then lie plain, and groups run one after the other."""
    monkeypatch.setattr("te_mx.backends.native.RULES", ("rceil", "floor"))
    layer, x = te_mx.GroupedLinear(3, 70, 48), torch.randn(60, 70)
    with te_mx.autocast(recipe=te_mx.recipe.BlockScaling(scale_rule="even")):
        assert_same_as_loop(layer, loop_of(layer), x, [20, 0, 33])
    assert hopper == []
    found = te_mx.audit(layer)["(root)"]
    assert {found.fprop, found.dgrad, found.wgrad} == {"sm90_adaptive"}


def test_ends_on_the_device_are_used_as_they_are(hopper, monkeypatch) -> None:
    layer = te_mx.GroupedLinear(3, 70, 48)
    x = torch.randn(60, 70)
    grads = torch.randn(60, 48)
    splits = [20, 0, 33]

    def run(m_splits: object) -> list[Tensor]:
        layer.zero_grad()
        inp = x.clone().requires_grad_()
        with te_mx.autocast():
            y = layer(inp, m_splits)
        y.backward(grads)
        return [y, inp.grad, parameters(layer, "weight.grad"), parameters(layer, "bias.grad")]

    want = run(splits)
    hide_splits(monkeypatch)
    for dtype in (torch.int32, torch.int64):
        for mine, theirs in zip(run(torch.tensor(splits, dtype=dtype)), want, strict=True):
            equal(mine, theirs)


def test_saved_tensors_that_come_back_otherwise(hopper) -> None:
    """From the CPU they come contiguous, where packed rows are padded; hooks may do anything."""
    layer, x = te_mx.GroupedLinear(3, 70, 44), torch.randn(60, 70)

    def run(unpack) -> list[Tensor]:
        inp = x.clone().requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack)
        with te_mx.autocast(), hooks:
            y = layer(inp, torch.tensor([20, 0, 33]))
        return list(torch.autograd.grad(y.square().sum(), [inp, *layer.parameters()]))

    want = run(lambda t: t)
    for unpack in (lambda t: t.clone().contiguous(), lambda t: torch.stack([t, t], -1)[..., 0]):
        for mine, theirs in zip(run(unpack), want, strict=True):
            equal(mine, theirs)


def test_accumulation_and_main_grad(hopper) -> None:
    layer = te_mx.GroupedLinear(
        3, 64, 48, single_grouped_weight=True, fuse_wgrad_accumulation=True, dtype=torch.bfloat16
    )
    plain = te_mx.GroupedLinear(3, 64, 48, single_grouped_weight=True, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    before = torch.randn(3, 48, 64)
    layer.weight.main_grad = before.clone()
    x = torch.randn(60, 64, dtype=torch.bfloat16)
    with te_mx.autocast():
        layer(x, [20, 0, 33]).sum().backward()
        plain(x, [20, 0, 33]).sum().backward()
    added = layer.weight.main_grad - before
    assert bool((added[1] == 0).all())
    torch.testing.assert_close(added.bfloat16(), plain.weight.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("frozen", [False, True])
def test_kept_weights_follow_the_recipe(hopper, frozen: bool) -> None:
    layer = te_mx.GroupedLinear(2, 64, 48)
    x = torch.randn(50, 64, requires_grad=True)
    one, other = (te_mx.recipe.MXFP8BlockScaling(alignment_spread=s) for s in (8, 2))
    if frozen:
        te_mx.freeze_weights(layer, recipe=one)
    for recipe in (one, other):
        with te_mx.autocast(recipe=recipe):
            fresh = te_mx.GroupedLinear(2, 64, 48)
            fresh.load_state_dict(layer.state_dict())
            want = fresh(x, [20, 30])
            for _ in range(2):
                equal(layer(x, [20, 30], is_first_microbatch=False), want)


def test_layers_without_rows_or_columns(hopper) -> None:
    layer = te_mx.GroupedLinear(2, 64, 48)
    with te_mx.autocast():
        x = torch.randn(0, 64, requires_grad=True)
        layer(x, [0, 0]).sum().backward()
        assert x.grad.shape == (0, 64) and bool((parameters(layer, "weight.grad") == 0).all())
        layer(torch.randn(9, 64), [4, 5], is_first_microbatch=True)
        assert layer(torch.randn(0, 64), [0, 0], is_first_microbatch=False).shape == (0, 48)
