"""Blockwise FP8 on the way to Hopper's kernels, with a stand-in for the native code: layouts,
records and modules. tests/gpu/test_sm90_blockwise.py holds the kernels to the same."""

from __future__ import annotations

import dataclasses
import warnings

import fake_sm90
import pytest
import torch
from as_on_hopper import HOPPER, hide_splits, hopper, hopper_with_groups

import te_mx
from te_mx import _ops as ops
from te_mx import formats
from te_mx._ops import grouped_quantize
from te_mx.autograd import linear as autograd_one_call
from te_mx.backends.sm90.layouts import SM90_FACTOR_K, SM90_FACTOR_ROWS, SM90_FACTORS
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.dispatch import registry, run
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.problem import Place, Problem
from te_mx.layouts import spec_of
from te_mx.recipe import DeepSeekV3, Float8BlockScaling, Format

M, K, N = 140, 70, 200  # tails of 16, and of 128
LOW, SQUARE = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
# With a spread of 0, aligned columns are multiplied as they were rounded.
RECIPES = {
    "pow2": Float8BlockScaling(amax_epsilon=1e-12, alignment_spread=0),
    "fp32": DeepSeekV3(),
    "hybrid": Float8BlockScaling(fp8_format=Format.HYBRID, alignment_spread=0),
    "weights 1x128": Float8BlockScaling(w_block_scaling_dim=1, alignment_spread=0),
    "weights 1x128 fp32": Float8BlockScaling(w_block_scaling_dim=1, use_f32_scales=True),
    "one copy": Float8BlockScaling(one_copy_weights=True, alignment_spread=0),
    "kept columns": Float8BlockScaling(keep_weight_columns=True, alignment_spread=0),
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
        if kind == "groups":
            assert set(calls) == {"quantize_grouped", "quantize_stacked", "gemm_rows", "gemm_k"}


def _assert_bits_of_the_reference(kind: str, name: str) -> None:
    torch.manual_seed(1)
    module, recipe = MODULES[kind](), RECIPES[name]
    x = torch.randn(M, K)
    x[:, ::9] *= 100
    with warnings.catch_warnings():
        warnings.simplefilter("error", te_mx.FallbackWarning)
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


def noted(name, native, calls):
    def note(*args):
        calls.append(name)
        return native(*args)

    return note


@pytest.mark.parametrize("one_call", [True, False])
def test_native_calls_of_a_step(one_call):
    """Each matrix is quantized once."""
    with hopper() as patch:
        calls = []
        for name in ("quantize", "gemm", "linear_forward", "linear_backward"):
            patch.setattr(fake_sm90, name, noted(name, getattr(fake_sm90, name), calls))
        if not one_call:
            patch.setattr(autograd_one_call, "plan_of", lambda *args: None)
        linear, x = te_mx.Linear(K, N), torch.randn(M, K)
        step(linear, x, dataclasses.replace(RECIPES["pow2"], keep_weight_columns=True))
    forward, backward = [*2 * ["quantize"], "gemm"], ["quantize", *2 * ["gemm"]]
    both = ["linear_forward"] * one_call, ["linear_backward"] * one_call
    assert calls == [*both[0], *forward, *both[1], *backward]


def test_two_matrices_at_a_time(on_hopper):
    x, w = torch.randn(M, K), torch.randn(N, K)
    square = f"{SQUARE}@sm90_factors"
    calls = [
        Quantize(w, square, square, "pow2"),
        Quantize(x, f"{LOW}@sm90_factors", f"{LOW}@sm90:8", "pow2", True),
    ]
    for made, call in zip(run.quantize_two(*calls), calls, strict=True):
        want = run.reference("quantize").run(call)
        for one, other in zip(made[:2], want[:2], strict=True):
            assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
        assert made.col_sum is None or torch.equal(made.col_sum, want.col_sum)


# ------------------------------------------------------------------------------- aligned columns
def wide(kind: str) -> torch.Tensor:
    """[300, 200], with columns that differ by 2^4, or by 2^20; of great numbers, or with NaN and
    zeros."""
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(3))
    if kind == "huge":
        return x * 2.0**80
    x[:, ::7] *= 2.0 ** {"near": 4, "far": 20, "special": 2}[kind]
    if kind == "special":
        x[40, 5], x[:, 9], x[:128, 30] = torch.nan, 0.0, -0.0
    return x


@pytest.mark.parametrize(
    ("kind", "classes"), [("near", {0}), ("far", {1}), ("special", {0}), ("huge", {3})]
)
def test_aligned_columns_stand_for_what_was_rounded(kind, classes, on_hopper):
    x = wide(kind)
    row, col, _ = ops.quantize_2d(x, f"{LOW}@sm90_factors", f"{LOW}@sm90:8", rule="pow2")
    plain = ops.quantize_2d(x, f"{LOW}@rows", f"{LOW}@rows", rule="pow2")
    torch.testing.assert_close(row.values(), plain.row.values(), rtol=0, atol=0, equal_nan=True)
    assert set(sm90_tiles.classes(col).unique().tolist()) == classes
    made, want = col.values(torch.float64), plain.col.values(torch.float64)
    # Codes that become subnormal move by at most half the smallest one of their tile.
    tile = torch.exp2(col.scales[:, :2, 129].double() - 127)  # [steps, tiles]
    limit = 2.0**-10 * tile.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200].t()
    nan = want.isnan()
    assert torch.equal(made.isnan(), nan) and int(nan.sum()) == 128 * (kind == "special")
    moved = (made - want).abs().masked_fill(nan, 0)
    assert bool((moved <= limit).all()) and (classes == {0}) == bool((moved > 0).any())
    factors = ops.convert_2d(col, f"{LOW}@sm90_factors")
    torch.testing.assert_close(factors.values(torch.float64), made, rtol=0, atol=0, equal_nan=True)


def test_only_powers_of_two_are_aligned(on_hopper):
    x, spec = torch.randn(M, K), f"{LOW}@sm90:8"
    problem = Problem("quantize", Place(HOPPER.type, HOPPER.index), rhs=spec, m=M, n=K, rule="fp32")
    kernel, declined = registry.choose(problem)
    assert kernel.name == "reference"
    assert dict(declined)["sm90_blockwise"] == "aligns scales of the rule pow2, not fp32"
    with (
        pytest.warns(te_mx.FallbackWarning),
        pytest.raises(ValueError, match="scales must be powers of two to be aligned"),
    ):
        ops.quantize_2d(x, col=spec, rule="fp32")


# ---------------------------------------------------------------------------------------- groups
@pytest.mark.parametrize("name", ["pow2", "fp32", "weights 1x128"])
@pytest.mark.parametrize("capacity", [0, 60])
def test_groups_whose_ends_the_device_knows(name, capacity, monkeypatch):
    """One launch each, and nobody looks at them; masked groups too."""
    torch.manual_seed(2)
    weights = torch.randn(3, N, K)
    x, recipe = torch.randn(180, K), RECIPES[name]

    def once():
        given, stack = x.clone().requires_grad_(), weights.clone().requires_grad_()
        rows = given.view(3, 60, K) if capacity else given
        splits = {"masked_m": torch.tensor([50, 0, 7])} if capacity else {}
        splits = splits or {"offs": torch.tensor([50, 50, 171], dtype=torch.int32)}
        with te_mx.autocast(recipe=recipe):
            y = te_mx.grouped_linear(rows, stack, **splits)
        y.backward(y.detach() / 8)
        return y.detach(), given.grad, stack.grad

    with hopper_with_groups() as calls, warnings.catch_warnings():
        warnings.simplefilter("error", te_mx.FallbackWarning)
        want = once()
        hide_splits(monkeypatch)
        made = once()
    assert calls.count("gemm_rows") == 4 and calls.count("gemm_k") == 2
    assert all(torch.equal(*pair) for pair in zip(made, want, strict=True))


def test_weights_that_lie_turned_are_not_copied():
    weights, spec = torch.randn(3, K, N).transpose(1, 2), f"{SQUARE}@sm90_factors"
    for col in ("", spec):
        with hopper_with_groups():
            made = grouped_quantize.quantize_weights(weights, spec, col, rule="pow2")
            want = grouped_quantize.quantize_weights(weights.contiguous(), spec, col, rule="pow2")
        for one, other in zip(made, want, strict=True):
            if one is not None:
                assert one[2:] == other[2:]
                assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)


def test_kept_weights_of_groups():
    """Frozen ones too, whose bytes are kept plain."""
    module, x = te_mx.GroupedLinear(3, K, N), torch.randn(M, K)
    splits, recipe = [100, 0, M - 100], RECIPES["pow2"]
    with hopper_with_groups(), torch.no_grad(), te_mx.autocast(recipe=recipe):
        want = module(x, splits)
        for first in (True, False):
            assert torch.equal(module(x, splits, is_first_microbatch=first), want)
        te_mx.freeze_weights(module, recipe=recipe)
        assert torch.equal(module(x, splits), want)


def test_what_the_layouts_hold():
    layout = SM90_FACTORS
    assert layout.shapes(formats.get(LOW), 300, 260) == ((300, 260), (3, 4, 128))
    assert layout.shapes(formats.get(SQUARE), 700, 260) == ((700, 260), (3, 8))
    one = formats.get(LOW)
    assert SM90_FACTOR_ROWS.grouped_shapes(one, 300, 260, 2) == (
        (300, 260),
        (3, 4, 128),
    )
    assert SM90_FACTOR_K.grouped_shapes(one, 260, 300, 2) == ((260, 512), (4, 4, 128))
    for fmt in ("mxfp8_e4m3", "fp8_e4m3fnuz_1x128", "fp8_e4m3_128x1"):
        with pytest.raises(ValueError, match=f"'sm90_factors' does not take .*got {fmt}"):
            spec_of(f"{fmt}@sm90_factors")


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
