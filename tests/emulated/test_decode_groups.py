"""Frozen te_mx.GroupedLinear on few rows: all groups in one call of the decode kernel of Hopper."""

from __future__ import annotations

import pytest
import torch
from as_on_hopper import hide_splits
from emulated_hopper import PRODUCTS

import te_mx
from te_mx.recipe import BlockScaling, Float8BlockScaling
from te_mx.runtime.kernel_log import LAST_RUN

pytestmark = pytest.mark.usefixtures("on_hopper")

N, K = 40, 136
SPLITS = [3, 0, 5, 1]
BEHIND = 2  # rows of no group
RECIPES = {
    "mxfp8": BlockScaling(x="mxfp8_e4m3", w="mxfp8_e4m3", g="mxfp8_e5m2"),
    "mxfp4": BlockScaling(x="mxfp8_e4m3", w="mxfp4", g="mxfp8_e5m2"),
    "fp8_block": Float8BlockScaling(),
}


def frozen(recipe, drop=False, **kwargs):
    torch.manual_seed(3)
    layer = te_mx.GroupedLinear(len(SPLITS), K, N, dtype=torch.bfloat16, **kwargs)
    before = [t.detach().clone() for t in (*layer.weights(), *layer.biases())]
    te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe)
    return layer, before


def loop(before, x, recipe):
    """The same by frozen te_mx.Linear, group after group."""
    out, at, count = x.new_zeros((len(x), N)), 0, len(SPLITS)
    for i, rows in enumerate(SPLITS):
        layer = te_mx.Linear(K, N, bias=len(before) > count, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(before[i])
            if layer.bias is not None:
                layer.bias.copy_(before[count + i])
        te_mx.freeze_weights(layer, recipe=recipe)
        if rows:
            out[at : at + rows] = run(layer, x[at : at + rows], recipe)
        at += rows
    return out


def run(layer, x, recipe, *splits):
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        return layer(x, *splits)


def rows(dtype=torch.bfloat16):
    return torch.randn(sum(SPLITS) + BEHIND, K, dtype=dtype)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("how", [{}, {"single_grouped_weight": True}, {"bias": False}], ids=str)
def test_groups_are_a_loop_of_frozen_linears(name, drop, how):
    layer, before = frozen(RECIPES[name], drop, **how)
    x = rows()
    y = run(layer, x, RECIPES[name], SPLITS)
    assert [(len(y), N, K)] == PRODUCTS
    assert LAST_RUN[layer._tag] == ("sm90_mxfp4" if name == "mxfp4" else "sm90_decode")
    assert torch.equal(y, loop(before, x, RECIPES[name]))


def test_splits_of_a_device_are_not_looked_at(monkeypatch):
    hide_splits(monkeypatch)
    layer, before = frozen(RECIPES["mxfp8"])
    x = rows()
    y = run(layer, x, RECIPES["mxfp8"], torch.tensor(SPLITS, dtype=torch.int32))
    assert len(PRODUCTS) == 1
    assert torch.equal(y, loop(before, x, RECIPES["mxfp8"]))


def test_biases_that_are_returned_are_not_added():
    layer, before = frozen(RECIPES["mxfp8"], return_bias=True)
    x = rows()
    y, biases = run(layer, x, RECIPES["mxfp8"], SPLITS)
    assert len(PRODUCTS) == 1
    assert all(map(torch.equal, biases, before[len(SPLITS) :]))
    assert torch.equal(y, loop(before[: len(SPLITS)], x, RECIPES["mxfp8"]))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_inputs_as_they_are(name):
    torch.manual_seed(3)
    layer = te_mx.GroupedLinear(len(SPLITS), K, N, dtype=torch.bfloat16)
    te_mx.freeze_weights(layer, drop_master=True, recipe=RECIPES[name], activations="bf16")
    for dtype, runs in ((torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 0)):
        PRODUCTS.clear()
        x = rows(dtype)
        with torch.no_grad():
            y = layer(x, SPLITS)
            again = torch.cat([layer(x, SPLITS)[:1] for _ in range(2)])
        assert len(PRODUCTS) == 3 * runs
        assert torch.equal(again, y[:1].expand(2, N)) and not y[sum(SPLITS) :].any()


def test_the_form_follows_the_weights():
    layer, _ = frozen(RECIPES["mxfp8"], bias=False)
    x = rows()
    before = run(layer, x, RECIPES["mxfp8"], SPLITS)
    with torch.no_grad():
        layer.weight2.mul_(2)
    after = run(layer, x, RECIPES["mxfp8"], SPLITS)
    assert len(PRODUCTS) == 2
    third = slice(3, 8)
    assert torch.equal(after[third], 2 * before[third])
    assert torch.equal(after[:3], before[:3]) and torch.equal(after[8:], before[8:])


def test_what_it_does_not_take_runs_elsewhere():
    layer, _ = frozen(RECIPES["mxfp8"])
    many = torch.randn(65, K, dtype=torch.bfloat16)
    assert run(layer, many, RECIPES["mxfp8"], [65, 0, 0, 0]).shape == (65, N)
    x = rows().requires_grad_()
    with te_mx.autocast(recipe=RECIPES["mxfp8"]):
        layer(x, SPLITS).sum().backward()
    assert x.grad is not None and not PRODUCTS
    with torch.no_grad():
        layer.bias1 = torch.nn.Parameter(torch.zeros(N - 1, dtype=torch.bfloat16), False)
    with pytest.raises(ValueError, match="bias1"):
        run(layer, x, RECIPES["mxfp8"], SPLITS)


def test_more_rows_for_more_groups():
    """Up to 8 rows for each group, where these are more than 64."""
    layer = te_mx.GroupedLinear(9, 32, 16, dtype=torch.bfloat16)
    te_mx.freeze_weights(layer, recipe=RECIPES["mxfp8"])
    for m in (72, 73):
        run(layer, torch.randn(m, 32).bfloat16(), RECIPES["mxfp8"], [8] * 9)
    assert PRODUCTS == [(72, 16, 32)]
