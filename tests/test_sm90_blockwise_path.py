"""Blockwise FP8 on the way to Hopper's kernels, with a stand-in for the native code: layouts,
records and modules. tests/gpu/test_sm90_blockwise.py holds the kernels to the same."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from as_on_hopper import HOPPER, hopper, hopper_with_groups

import te_mx
from te_mx import layouts, ops
from te_mx.dispatch import registry
from te_mx.dispatch.problem import Place, Problem
from te_mx.recipe import DeepSeekV3, Float8BlockScaling, Format

M, K, N = 140, 70, 200  # tails of 16, and of 128
LOW, SQUARE = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
RECIPES = {
    "pow2": Float8BlockScaling(amax_epsilon=1e-12),
    "fp32": DeepSeekV3(),
    "hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "weights 1x128": Float8BlockScaling(w_block_scaling_dim=1),
    "one copy": Float8BlockScaling(one_copy_weights=True),
}
MODULES = {
    "linear": lambda: te_mx.Linear(K, N),
    "norm": lambda: te_mx.LayerNormLinear(K, N),
    "mlp": lambda: te_mx.LayerNormMLP(K, N),
    "groups": lambda: te_mx.GroupedLinear(3, K, N),
}


@pytest.fixture
def on_hopper():
    with hopper():
        yield


def step(module, x: torch.Tensor, recipe: Float8BlockScaling) -> list[torch.Tensor]:
    given = ([100, 0, M - 100],) if isinstance(module, te_mx.GroupedLinear) else ()
    x = x.clone().requires_grad_()
    module.zero_grad()
    with te_mx.autocast(recipe=recipe):
        y = module(x, *given)
    y.backward(y.detach() / 8)
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_modules_have_the_bits_of_the_reference(kind, name):
    """It runs precision "exact", on plain operands: the stand-in multiplies as it does."""
    with hopper_with_groups() if kind == "groups" else hopper() as calls:
        _assert_bits_of_the_reference(kind, name)
        assert kind != "groups" or not calls


def _assert_bits_of_the_reference(kind: str, name: str) -> None:
    torch.manual_seed(1)
    module, recipe = MODULES[kind](), RECIPES[name]
    x = torch.randn(M, K)
    x[:, ::9] *= 100
    with warnings.catch_warnings():
        # Groups loop over native products of their own.
        warnings.simplefilter("ignore" if kind == "groups" else "error", te_mx.FallbackWarning)
        made = step(module, x, recipe)
    if kind == "linear":
        assert te_mx.audit(module)["(root)"][2:5] == ("sm90_blockwise",) * 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", te_mx.FallbackWarning)
        want = step(module, x, dataclasses.replace(recipe, precision="exact"))
    assert all(torch.equal(*pair) for pair in zip(made, want, strict=True))


def test_plain_operands_are_reordered(on_hopper):
    B, A = te_mx.quantize(torch.randn(M, K), fmt=LOW), te_mx.quantize(torch.randn(N, K), fmt=SQUARE)
    want = B.dequantize() @ A.dequantize().t()
    with warnings.catch_warnings():
        warnings.simplefilter("error", te_mx.FallbackWarning)
        for _ in range(3):
            made = te_mx.gemm(A, B, out_dtype=torch.float32).out
            torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-4)
    col = ops.quantize_2d(torch.randn(K, M), col=f"{LOW}@cols", rule="pow2").col
    packed = ops.convert_2d(col, f"{LOW}@sm90_factors")
    assert packed.codes.stride() == (80, 1)
    assert torch.equal(packed.values(), col.values())


def test_sums_of_the_left_side(on_hopper):
    lhs, rhs = (
        ops.quantize_2d(torch.randn(rows, K), row=f"{fmt}@sm90_factors", rule="fp32").row
        for rows, fmt in ((M, LOW), (N, SQUARE))
    )
    made = ops.gemm_2d(
        lhs, rhs, ops.Epilogue(bias_grad="operand"), out_dtype=torch.float32
    ).bias_grad
    torch.testing.assert_close(made, lhs.values(torch.float64).sum(1).float(), rtol=0, atol=0)


def test_what_the_layout_holds():
    layout = layouts.SM90_FACTORS
    assert layout.shapes(layouts.formats.get(LOW), 300, 260) == ((300, 260), (3, 4, 128))
    assert layout.shapes(layouts.formats.get(SQUARE), 700, 260) == ((700, 260), (3, 8))
    for fmt in ("mxfp8_e4m3", "fp8_e4m3fnuz_1x128", "fp8_e4m3_128x1"):
        with pytest.raises(ValueError, match=f"'sm90_factors' does not take .*got {fmt}"):
            layouts.spec_of(f"{fmt}@sm90_factors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precision": "exact"}, "is for precision 'adaptive', this asks for 'exact'"),
        ({"lhs": f"{SQUARE}@rows"}, f"takes blocks of 1x128 on the left, not {SQUARE}"),
        ({"rhs": "fp8_e4m3fnuz_1x128@rows"}, "not fp8_e4m3fnuz_1x128"),
        ({"rhs": "mxfp8_e4m3@rows"}, "not mxfp8_e4m3"),
        ({"m": 1 << 31}, "counts sizes up to"),
    ],
    ids=str,
)
def test_products_that_its_kernel_leaves_to_the_reference(change, said, on_hopper):
    problem = Problem(
        "gemm", Place(HOPPER.type, HOPPER.index), f"{LOW}@rows", f"{LOW}@cols", M, N, K
    )
    assert registry.choose(problem)[0].name == "sm90_blockwise"
    kernel, declined = registry.choose(problem._replace(**change))
    assert kernel.name == "reference" and said in dict(declined)["sm90_blockwise"]
