"""Sums over the tokens are fp32 in every module, on every path: 10^5 rows against fp64."""

from __future__ import annotations

import pytest
import torch
from bias_sums import (
    MODULES,
    RECIPES,
    ROWS,
    SIZE,
    SPLITS,
    assert_summed_in_fp32,
    biases_of,
    build,
    exact_for,
    gradient,
    in_groups,
    run,
)

import te_mx
from te_mx.autograd import grouped
from te_mx.autograd.grouped import Groups, col_sums
from te_mx.backends.reference import grouped as reference
from te_mx.dispatch.calls import QuantizeGroups
from te_mx.dispatch.groups import col_sums_on_device


@pytest.mark.parametrize("path", RECIPES)
@pytest.mark.parametrize("module", MODULES)
def test_every_module(module: str, path: str):
    g = gradient(torch.bfloat16)
    layer = build(module, torch.bfloat16, "main_grad" in path)
    assert_summed_in_fp32(run(layer, RECIPES[path], g), exact_for(module, g))


@pytest.mark.parametrize("module", ["Linear", "GroupedLinear"])
def test_fp32_parameters_get_the_fp32_sums(module: str):
    """With main_grad the layer itself sums, outside te_mx.autocast too: bf16 gradients into fp32
    biases."""
    g = gradient(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        made = run(build(module, torch.float32, fused=True), None, g)
    assert_summed_in_fp32(made, exact_for(module, g))


@pytest.mark.parametrize(
    ("act", "recipe"),
    [("gelu", "mxfp8"), ("relu", "mxfp8"), ("swiglu", "high precision backward")],
)
def test_sums_inside_a_block(act: str, recipe: str):
    """Biases and norm parameters in front of the last linear step, against the sums of many calls
    with few rows (multiples of 32, so that all blocks are the same)."""
    layer = te_mx.LayerNormMLP(SIZE, SIZE, activation=act)
    inner = [layer.fc1_bias, layer.layer_norm_weight, layer.layer_norm_bias]
    x, g = torch.randn(ROWS, SIZE).bfloat16(), gradient(torch.bfloat16)
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in inner]
    with te_mx.autocast(recipe=RECIPES[recipe]):
        whole = torch.autograd.grad(layer(x), inner, g)
        for part, part_g in zip(x.split(3200), g.split(3200), strict=True):
            made = torch.autograd.grad(layer(part), inner, part_g)
            for total, one in zip(sums, made, strict=True):
                total += one
    for got, exact in zip(whole, sums, strict=True):
        assert_summed_in_fp32(got, exact)


# --------------------------------------------------------------- splits that only a device knows
@pytest.mark.parametrize(
    ("kernel", "module"),
    [(False, "GroupedLinear"), (True, "GroupedLinear"), (True, "GroupedLinear stacked")],
)
def test_plain_with_splits_on_a_device(monkeypatch, kernel: bool, module: str):
    """One masked product a group, or torch._grouped_mm."""
    monkeypatch.setattr(grouped, "readable", lambda offs: False)
    monkeypatch.setattr(grouped, "_has_grouped_mm", lambda *problem: kernel)
    g, layer = gradient(torch.bfloat16), build(module, torch.bfloat16)
    x = torch.randn(ROWS, SIZE).bfloat16()
    expected = layer(x, SPLITS).detach()
    y = layer(x, torch.tensor(SPLITS))
    torch.testing.assert_close(y, expected)
    y.backward(g)
    assert_summed_in_fp32(biases_of(layer), in_groups(g))


def test_quantized_with_splits_on_a_device():
    g = gradient(torch.bfloat16)
    ends = torch.tensor(SPLITS).cumsum(0)
    starts = ends - torch.tensor(SPLITS)
    tokens = QuantizeGroups(g, Groups(ends), "mxfp8_e4m3@rows", "", "rceil", True)
    made = reference.quantize(tokens, starts, ends)
    assert_summed_in_fp32(made.col_sum, in_groups(g))
    assert_summed_in_fp32(col_sums_on_device(g, starts, ends), in_groups(g))
    assert_summed_in_fp32(col_sums(g, Groups(ends)), in_groups(g))
