"""NVFP4 on a GPU: the bytes of the CPU by every rule, products of what bf16 holds, and the numbers
of the recipe."""

from __future__ import annotations

import pytest
import torch

import te_mx
from te_mx import _ops as ops
from te_mx import formats
from te_mx.backends.sm90.layouts import SM90_VALUES
from te_mx.backends.sm90.nvfp4 import PRODUCT
from te_mx.backends.sm90.nvfp4_grouped import GemmK, GemmRows, quantize_groups, quantize_weights
from te_mx.dispatch import run
from te_mx.dispatch.calls import (
    Epilogue,
    GroupedK,
    GroupedRows,
    Groups,
    Mode,
    QuantizeGroups,
    QuantizeWeights,
)
from te_mx.recipe import NVFP4BlockScaling

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
RHT = "nvfp4+rht16:0xd7e8d7e8"


def matrix(rows, k, dtype=torch.float32):
    return (torch.randn(rows, k) * torch.exp(3 * torch.randn(rows, 1))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16", "nvfp4_rows", RHT])
def test_the_bytes_of_the_cpu(name, dtype):
    fmt, x = formats.get(name), matrix(129, 400, dtype)
    seeds = torch.tensor([5]), torch.tensor([5], device="cuda")
    for rule in fmt.scaling.rules:
        for one, other in zip(fmt.quantize(x, rule), fmt.quantize(x.cuda(), rule), strict=True):
            assert torch.equal(one, other.cpu()), rule
    specs = f"{name}@rows", f"{name}@cols"
    drawn = [
        ops.quantize_2d(on, *specs, rule="te+sr", seed=seed)
        for on, seed in zip((x, x.cuda()), seeds, strict=True)
    ]
    for side in range(2):
        for part in (0, 1, 6):
            assert torch.equal(drawn[0][side][part], drawn[1][side][part].cpu())


@pytest.mark.parametrize(
    ("lhs", "rhs"), [("nvfp4", "nvfp4_16x16"), ("nvfp4_rows", "nvfp4"), ("mxfp8_e4m3", "nvfp4")]
)
@pytest.mark.parametrize("k", [1000, 4096])
def test_products(lhs, rhs, k):
    a, b = (
        te_mx.quantize(torch.randn(n, k, device="cuda"), fmt=f) for n, f in ((333, lhs), (200, rhs))
    )
    made = te_mx.gemm(b, a, out_dtype=torch.float32).out.double()
    values, weights = a.dequantize(torch.float64), b.dequantize(torch.float64)
    bound = 4 * (k + 2) * 2.0**-24 * (values.abs() @ weights.abs().t())
    assert ((made - values @ weights.t()).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear"])
def test_the_recipe(kind):
    made = {
        "Linear": lambda: te_mx.Linear(512, 384),
        "LayerNormMLP": lambda: te_mx.LayerNormMLP(512, 768, activation="swiglu"),
        "GroupedLinear": lambda: te_mx.GroupedLinear(3, 512, 384),
    }[kind]()
    x, args = torch.randn(96, 512), [[32, 0, 64]] if kind == "GroupedLinear" else []
    recipe, found = NVFP4BlockScaling(disable_stochastic_rounding=True), []
    for device in ("cpu", "cuda"):
        made = made.to(device)
        made.zero_grad()
        inp = x.to(device).detach().requires_grad_()
        with te_mx.autocast(recipe=recipe):
            y = made(inp, *args)
        if device == "cuda":
            assert {one.fprop for one in te_mx.audit(made)} == {"sm90_nvfp4"}
        y.square().sum().backward()
        grads = (inp.grad, *(p.grad for p in made.parameters()))
        found.append([t.detach().double().cpu() for t in (y, *grads)])
    for one, other in zip(*found, strict=True):
        # Sums differ in their last bits, so that a few codes of what follows are neighbours.
        assert (one - other).norm() <= 0.02 * one.norm()


@pytest.mark.parametrize("sizes", [(40, 0, 136, 16), (1, 2, 3), (0, 300, 0)], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_of_groups_are_those_of_each(sizes, out_dtype):
    k, n, groups = 136, 200, len(sizes)
    x, g = (torch.randn(sum(sizes) + 5, one, device="cuda").bfloat16() for one in (k, n))
    w = torch.randn(groups, n, k, device="cuda").bfloat16()
    bias = torch.randn(groups, n, device="cuda").bfloat16()
    offs, values = torch.tensor(sizes).cumsum(0), [one.name for one in SM90_VALUES]
    of = Groups(offs, 0)
    row = quantize_groups(QuantizeGroups(x, of, f"nvfp4@{values[0]}", "", "te")).row
    held = quantize_weights(QuantizeWeights(w, f"nvfp4_16x16@{values[0]}", "", "te"))[0]
    out = torch.full((len(x), n), torch.nan, dtype=out_dtype, device="cuda")
    assert GemmRows().run(GroupedRows(row, held, of, bias, out, Mode())) == PRODUCT
    kept = quantize_groups(QuantizeGroups(x, of, "", f"{RHT}@grouped_cols", "te")).col
    cols = quantize_groups(QuantizeGroups(g, of, "", f"{RHT}@{values[1]}", "te")).col
    dw = torch.randn(groups, n, k, device="cuda", dtype=out_dtype)
    before = dw.clone()
    for accumulate in (False, True):
        dw.copy_(before)
        assert GemmK().run(GroupedK(cols, kept, of, dw, accumulate, Mode())) == PRODUCT
        start = 0
        for i, size in enumerate(sizes):
            end, wanted = start + size, torch.empty(n, k, dtype=out_dtype, device="cuda")
            wanted.copy_(before[i]) if accumulate else wanted.zero_()
            if size:
                sides = cols.group(start, end, i), kept.group(start, end, i)
                run.gemm(*sides, Epilogue(accumulate=accumulate), wanted, None, Mode())
                y = torch.empty(size, n, dtype=out_dtype, device="cuda")
                one = row.group(start, end, i)
                run.gemm(one, held.group(i), Epilogue(bias=bias[i]), y, None, Mode())
                assert torch.equal(out[start:end], y)
            assert torch.equal(dw[i], wanted)
            start = end
    assert not out[sum(sizes) :].any()


@pytest.mark.filterwarnings("error::te_mx.FallbackWarning")
@pytest.mark.parametrize("sizes", [(40, 0, 136, 16), (1, 2, 3), (700, 300, 24)], ids=str)
def test_groups_whose_ends_the_device_knows(sizes):
    layer = te_mx.GroupedLinear(len(sizes), 136, 200, params_dtype=torch.bfloat16, device="cuda")
    x, g = (torch.randn(sum(sizes), one, device="cuda").bfloat16() for one in (136, 200))
    recipe, found = NVFP4BlockScaling(disable_stochastic_rounding=True), []
    for splits in (list(sizes), torch.tensor(sizes, device="cuda")):
        layer.zero_grad(set_to_none=True)
        inp = x.detach().requires_grad_()
        with te_mx.autocast(recipe=recipe):
            y = layer(inp, splits)
        y.backward(g)
        ran = te_mx.audit(layer).layers[0]
        assert "reference" not in (ran.fprop, ran.dgrad, ran.wgrad), ran
        found.append(
            [t.detach().double() for t in (y, inp.grad, *(p.grad for p in layer.parameters()))]
        )
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 2e-3 * one.norm()
