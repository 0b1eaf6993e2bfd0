"""Formats that Hopper's kernels do not know beside those that they pack: what one call made is not
read as something else by another. On any machine, with a stand-in for the native code."""

from __future__ import annotations

import pytest
import torch
from as_on_hopper import hopper_with_groups

import te_mx
from te_mx import _ops as ops
from te_mx._ops.grouped_quantize import quantize_grouped, quantize_weights
from te_mx.dispatch import run
from te_mx.dispatch.calls import GroupedRows, Groups
from te_mx.recipe import BlockScaling, MXFP8BlockScaling

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")

M, K, N = 300, 70, 41
SPLITS = [100, 0, 200]
DEFAULT, EXACT = MXFP8BlockScaling(), MXFP8BlockScaling(precision="exact")
FP4_X = BlockScaling(x="mxfp4")
FP6_G = BlockScaling(g="mxfp6_e3m2")


@pytest.fixture
def hopper():
    with hopper_with_groups() as calls:
        yield calls


def step(layer, x: torch.Tensor, recipe, **more) -> list[torch.Tensor]:
    given = (SPLITS,) if isinstance(layer, te_mx.GroupedLinear) else ()
    x = x.clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = layer(x, *given, **more)
    y.backward(y.detach() / 8)
    return [y.detach(), x.grad]


@pytest.mark.parametrize("kind", [te_mx.Linear, te_mx.GroupedLinear])
def test_codes_without_masters_under_another_recipe(kind, hopper):
    """Their format is not the one of the recipe that runs."""
    fmt = "mxfp8_e5m2"
    layer = kind(3, K, N) if kind is te_mx.GroupedLinear else kind(K, N)
    given = (SPLITS,) if kind is te_mx.GroupedLinear else ()
    te_mx.freeze_weights(layer, drop_master=True, recipe=BlockScaling(w=fmt))
    x = torch.randn(M, K)
    made = []
    for recipe in (DEFAULT, BlockScaling(w=fmt)):
        with torch.no_grad(), te_mx.autocast(recipe=recipe):
            made.append(layer(x, *given))
    assert torch.equal(*made) and not hopper


@pytest.mark.parametrize("first", [DEFAULT, EXACT, FP4_X, FP6_G], ids=str)
@pytest.mark.parametrize("kind", [te_mx.Linear, te_mx.GroupedLinear])
def test_kept_weights_under_another_recipe(kind, first, hopper):
    """A packed copy serves those recipes only that would ask for it."""
    layer = kind(3, K, N) if kind is te_mx.GroupedLinear else kind(K, N)
    x = torch.randn(M, K)
    with torch.no_grad():
        for weight in (p for p in layer.parameters() if p.dim() == 2):
            weight[:, 32:] *= 2.0**-6  # what packing rounds
            weight[32:] *= 2.0**-6
    step(layer, x, first, is_first_microbatch=True)
    for recipe in (DEFAULT, FP4_X, FP6_G, EXACT, first):
        for got, expected in zip(
            step(layer, x, recipe, is_first_microbatch=False), step(layer, x, recipe), strict=True
        ):
            assert torch.equal(got, expected), recipe


def test_tokens_that_are_packed_meet_weights_in_another_format(hopper):
    tokens, weights = torch.randn(M, K), list(torch.randn(3, N, K))
    groups = Groups(torch.tensor([100, 100, 300]))
    packed = quantize_grouped(tokens, groups, "mxfp8_e4m3@sm90_rows:8", rule="rceil").row
    for fmt in ("mxfp8_e5m2", "mxfp8_e4m3", "mxfp4", "mxfp6_e3m2"):
        stack, _ = quantize_weights(weights, f"{fmt}@rows", rule="rceil")
        out = torch.full((M, N), torch.nan)
        run.reference("gemm_rows").run(GroupedRows(packed, stack, groups, None, out, ops.Mode()))
        values = te_mx.quantize(tokens).dequantize()
        for i, (start, end) in enumerate(((0, 100), (100, 100), (100, 300))):
            exact = values[start:end] @ stack.group(i).values().t()
            torch.testing.assert_close(out[start:end], exact, rtol=2e-3, atol=2e-2)


def test_a_conversion_keeps_the_format():
    operand = ops.quantize_2d(torch.randn(8, 64), "mxfp8_e4m3@rows").row
    with pytest.raises(ValueError, match="keeps the format, got mxfp8_e4m3@rows to mxfp4@cols"):
        ops.convert_2d(operand, "mxfp4@cols")


def test_a_tensor_is_packed_for_partners_that_are_packed_too(hopper):
    """The bits of a product do not depend on how often its operands were used before."""
    w = torch.randn(N, K)
    w[:, 32:] *= 2.0**-6  # what packing rounds
    A, B = te_mx.quantize(w), te_mx.quantize(torch.randn(M, K), fmt="mxfp6_e3m2")
    other = te_mx.quantize(torch.randn(M, K), fmt="e5m2")
    expected = te_mx.gemm(A, B, out_dtype=torch.float32).out
    for _ in range(4):
        assert torch.equal(te_mx.gemm(A, B, out_dtype=torch.float32).out, expected)
        te_mx.gemm(A, other)
    assert [form.spec for _, form in A._packs.values()] == ["mxfp8_e4m3@sm90:8"]
    assert not B._packs


@pytest.mark.parametrize("fmts", [("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")], ids=str)
def test_e5m2_tensors_have_the_same_product_however_often(hopper, fmts):
    """From the left packed for the tensor cores, from the right as it is: nothing is packed beside
    it."""
    w = torch.randn(N, K)
    w[:, 32:] *= 2.0**-6
    A, B = (te_mx.quantize(x, fmt=fmt) for x, fmt in zip((w, torch.randn(M, K)), fmts, strict=True))
    expected = te_mx.gemm(A, B, out_dtype=torch.float32).out
    for _ in range(3):
        assert torch.equal(te_mx.gemm(A, B, out_dtype=torch.float32).out, expected)
    packed = [form.spec for t in (A, B) for _, form in t._packs.values()]
    left_alone = ["mxfp8_e4m3@sm90:8", "mxfp8_e5m2@sm90:8"]
    assert packed == (left_alone if fmts[0] == "e4m3" else [])


@pytest.mark.parametrize("kind", [te_mx.Linear, te_mx.GroupedLinear])
def test_weights_in_e5m2_are_multiplied_exactly(kind, hopper):
    """Their products alone: wgrad of their layer has none of them."""
    layer = kind(3, K, N) if kind is te_mx.GroupedLinear else kind(K, N)
    x, recipe = torch.randn(M, K), BlockScaling(w="mxfp8_e5m2")
    adaptive = step(layer, x, recipe)
    found = te_mx.audit(layer)["(root)"]
    assert (found.fprop, found.dgrad) == ("sm90_exact", "sm90_exact")
    assert found.wgrad == "sm90_adaptive"
    exact = step(layer, x, BlockScaling(w="mxfp8_e5m2", precision="exact"))
    for got, want in zip(adaptive, exact, strict=True):
        assert torch.equal(got, want)
