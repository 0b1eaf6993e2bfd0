"""NVFP4 on a GPU: the bytes of the CPU by every rule, products of what bf16 holds, and the numbers
of the recipe."""

from __future__ import annotations

import pytest
import torch

import te_mx
from te_mx import _ops as ops
from te_mx import formats
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
