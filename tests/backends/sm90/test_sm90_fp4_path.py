"""Modules in MXFP4 on Hopper's kernels, on any machine: a stand-in runs the native calls, and what
would fall back warns, which fails a test."""

from __future__ import annotations

import warnings

import pytest
import torch
from as_on_hopper import hide_splits, hopper, hopper_with_groups

import te_mx
from te_mx import _ops as ops
from te_mx.backends.reference.quantize import quantize as reference_quantize
from te_mx.recipe import BlockScaling, MXFP4BlockScaling

M, K, N = 100, 72, 41
FP4, E4M3 = "mxfp4", "mxfp8_e4m3"
RECIPES = {
    "both": {"x": FP4, "w": FP4},
    "weights": {"x": E4M3, "w": FP4},
    "inputs": {"x": FP4, "w": E4M3},
    "all": {"x": FP4, "w": FP4, "g": FP4},
}
# What its wgrad and dgrad read of x and w is in a format of its own.
GROUPED = {name: BlockScaling(**fmts) for name, fmts in RECIPES.items()} | {
    "two formats": MXFP4BlockScaling()
}
MODULES = {
    "Linear": lambda: te_mx.Linear(K, N),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(K, N, normalization="RMSNorm"),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(K, N, activation="swiglu"),
}
SPLITS = [60, 0, 40]


def step(module, x, recipe, *splits) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = module(x, *splits)
    y.backward(y.detach().cos().to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("kind", list(MODULES))
@pytest.mark.parametrize("keep", [True, False])
def test_modules_run_without_a_fallback(kind, recipe, keep, threads):
    """In what backward keeps and what it makes anew; near the exact products of the same codes."""
    threads(1)
    torch.manual_seed(0)
    x = torch.randn(M, K, dtype=torch.bfloat16)
    fields = {**RECIPES[recipe], "keep_weight_columns": keep}
    with hopper():
        module = MODULES[kind]().bfloat16()
        got = step(module, x, BlockScaling(**fields))
        ran = {kernel for layer in te_mx.audit(module) for kernel in layer[2:5]}
        assert ran == {"sm90_adaptive"}
        exact = step(module, x, BlockScaling(**fields, precision="exact"))
    for mine, theirs in zip(got, exact, strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < 1e-2


@pytest.mark.parametrize("recipe", list(GROUPED))
def test_groups_equal_a_loop(recipe, threads):
    threads(1)
    torch.manual_seed(0)
    x = torch.randn(M, K)
    fmts = GROUPED[recipe]
    with hopper_with_groups() as calls:
        layer = te_mx.GroupedLinear(3, K, N)
        got = step(layer, x, fmts, SPLITS)
        assert set(calls) == {"quantize_grouped", "quantize_stacked", "gemm_rows", "gemm_k"}
        start = 0
        for i, size in enumerate(SPLITS):
            one = te_mx.Linear(K, N)
            with torch.no_grad():
                one.weight.copy_(getattr(layer, f"weight{i}"))
                one.bias.copy_(getattr(layer, f"bias{i}"))
            if size:
                want = step(one, x[start : start + size], fmts)
                for mine, theirs in zip(got, want[:2], strict=False):
                    torch.testing.assert_close(mine[start : start + size], theirs)
            start += size


RHT = "+rht32:0x1234abcd"


@pytest.mark.parametrize("layout", ["sm90:8", "rows"])
@pytest.mark.parametrize(
    ("row", "col", "rule"),
    [
        (FP4, FP4, "rceil+sr"),
        (FP4, FP4 + RHT, "rceil+sr"),
        (FP4, FP4 + "+rht16:0x0f0f1234", "even"),
        (FP4 + RHT, "", "floor+sr"),
        ("", FP4 + RHT, "rceil+sr"),  # of fp32, whose sums take a launch of their own
        (E4M3, E4M3 + RHT, "rceil"),
    ],
)
def test_random_quantizers_run_without_a_fallback(row, col, rule, layout, threads):
    threads(1)
    x = torch.randn(75, 130)
    seed = torch.tensor([7]) if rule.endswith("+sr") else None
    specs = [f"{fmt}@{layout}" if fmt else "" for fmt in (row, col)]
    sums = "rht" not in row
    what = ops.Quantize(x, *specs, rule, sums, seed=seed)
    want = reference_quantize(what)
    with hopper():
        got = ops.quantize_2d(x, *specs, rule=rule, col_sum=sums, seed=seed)
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        if theirs is not None:
            assert mine.spec == theirs.spec
            assert torch.equal(mine.codes, theirs.codes)
            assert torch.equal(mine.scales, theirs.scales)
    assert not sums or torch.equal(got.col_sum, want.col_sum)


def test_gradients_in_4_bits_run_on_the_kernels(threads):
    """Rounded stochastically, and transformed on both sides of wgrad."""
    threads(1)
    x = torch.randn(M, K, dtype=torch.bfloat16)
    with hopper():
        layer = te_mx.Linear(K, N).bfloat16()
        step(layer, x, MXFP4BlockScaling(g=FP4))
        assert te_mx.audit(layer)["(root)"][2:5] == ("sm90_adaptive",) * 3


@pytest.mark.parametrize(
    ("fields", "launches"),  # of the quantizer: in bfloat16, in fp32
    [
        ({}, (2, 4)),
        ({"hadamard": 0}, (2, 2)),
        ({"stochastic_rounding": False, "hadamard": 16}, (2, 4)),
        ({"x_wgrad": E4M3, "w_dgrad": E4M3}, (3, 4)),  # x: in a format of its own each direction
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_random_gradients_of_groups(dtype, fields, launches, threads, monkeypatch):
    """All groups in a launch, or one for each direction, wherever the splits are known."""
    threads(1)
    x, recipe = torch.randn(sum(SPLITS), K, dtype=dtype), MXFP4BlockScaling(g=FP4, **fields)
    made = []
    with hopper_with_groups() as calls, warnings.catch_warnings():
        warnings.simplefilter("error", te_mx.FallbackWarning)
        layer = te_mx.GroupedLinear(3, K, N, dtype=dtype)
        for known in (True, False):
            if not known:
                hide_splits(monkeypatch)
            calls.clear()
            torch.manual_seed(5)
            made.append(step(layer, x, recipe, torch.tensor(SPLITS)))
            assert calls.count("quantize_grouped") == launches[dtype == torch.float32]
            assert [name for name in calls if name.startswith("gemm")] == [
                "gemm_rows", "gemm_rows", "gemm_k"
            ]  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))
