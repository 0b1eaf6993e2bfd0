"""Normalization and activations that end in a quantizer: the same bytes as one step after the
other."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, FINITE_KINDS, KINDS, SEEDS, SIZES, matrices, tensor

from te_mx._ops import quantize_2d, quantized
from te_mx._ops.fused import act_quantize_2d, norm_backward_2d, norm_quantize_2d
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.reference import fused
from te_mx.dispatch import run
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.fused import ACTIVATIONS, NORMS, Activation, ActStep, Norm, NormStep, Target
from te_mx.nn import activations

BOTH = Target("mxfp8_e4m3@rows", "mxfp8_e4m3@cols", "rceil")
WIDE = Target("fp8_e4m3_1x128@rows", "fp8_e4m3_1x128@cols", "pow2")
FAMILIES = pytest.mark.parametrize("both", [BOTH, WIDE], ids=["mxfp8", "fp8_1x128"])
TARGETS = st.builds(
    lambda row, col, fmt: Target(row and fmt[0] + row, col and fmt[0] + col, fmt[1]),
    st.sampled_from(["", "@rows"]),
    st.sampled_from(["", "@cols", "@rows"]),
    st.sampled_from(
        [
            ("mxfp8_e4m3", "rceil"),
            ("mxfp8_e5m2", "floor"),
            ("fp8_e4m3_1x128", "pow2"),
            ("fp8_e5m2_1x128", "fp32:1e-3"),
            ("fp8_e4m3fnuz_1x128", "fp32"),
            ("fp8_e4m3_128x128", "pow2:1e-3"),
        ]
    ),
)
EXACT = ("relu", "reglu", "srelu", "sreglu")
native = pytest.mark.skipif(cpu.native() is None, reason="needs the native module")


def same(got, expected):
    """Equal bits where there are any; every NaN is the same."""
    assert (got is None) == (expected is None)
    if got is None:
        return
    assert got.dtype == expected.dtype and got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def listed(made):
    """The tensors of a quantized matrix, None where there is none."""
    sides = [(None, None) if side is None else side[:2] for side in made[:2]]
    return [*sides[0], *sides[1], made.col_sum]


def norm_parts(made):
    return [*made[:3], *listed(made.quantized)]


def assert_same_sums(got, expected, x):
    """fp32 sums of the columns of x in two orders: near the exact one where that is finite."""
    size = x.abs().sum(0)
    finite = size < torch.finfo(torch.float32).max
    limit = (len(x) + 2) * 2.0**-24 * size
    for sums in (got, expected):
        assert ((sums.double() - x.sum(0)).abs() <= limit)[finite].all()
    torch.testing.assert_close(got[~finite], expected[~finite], equal_nan=True)


def composed(op, step):
    """One step after the other, which is the specification."""
    return run.reference(op).run(step)


def test_the_lane_sum_is_a_sum():
    x = torch.randn(7, 1000)
    torch.testing.assert_close(fused.lane_sum(x)[:, 0], x.double().sum(1).float())


@pytest.mark.parametrize("kind", NORMS)
def test_normalization_is_torchs(kind):
    x, weight = torch.randn(5, 300) * 3 + 2, torch.randn(300)
    bias = torch.randn(300) if kind == "LayerNorm" else None
    _, _, z = fused.normalize(x, weight, bias, Norm(kind, 1e-5), torch.float32)
    if kind == "LayerNorm":
        expected = torch.nn.functional.layer_norm(x, (300,), weight, bias, 1e-5)
    else:
        expected = torch.nn.functional.rms_norm(x, (300,), weight, 1e-5)
    torch.testing.assert_close(z, expected, rtol=2e-6, atol=2e-6)


@native
@given(matrices(), st.sampled_from(NORMS), DTYPES, TARGETS, st.booleans(), st.booleans())
def test_native_normalization_is_the_reference(x, kind, dtype, target, keep, with_bias):
    weight = torch.randn(x.shape[1])
    bias = torch.randn(x.shape[1]) if with_bias and kind == "LayerNorm" else None
    step = NormStep(x, weight, bias, Norm(kind, 1e-6), dtype, keep, target)
    got = norm_quantize_2d(step)
    expected = composed("norm_quantize", step)
    for mine, theirs in zip(norm_parts(got), norm_parts(expected), strict=True):
        same(mine, theirs)
    dz = tensor("normal", *x.shape, 5, dtype)
    back = (dz, x, weight, expected.mean, expected.rstd, x.dtype)
    dx, dweight, dbias = norm_backward_2d(*back)
    r_dx, r_dweight, r_dbias = fused.normalize_backward(*back)
    same(dx, r_dx)
    magnitude = (dz.float().abs() * 40).sum(0) + 1
    assert dbias.shape == r_dbias.shape and ((dbias - r_dbias).abs() <= 1e-6 * magnitude).all()
    if torch.isfinite(r_dweight).all():
        assert ((dweight - r_dweight).abs() <= 1e-5 * (r_dweight.abs() + magnitude)).all()


@native
@pytest.mark.parametrize("kind", NORMS)
@FAMILIES
@pytest.mark.parametrize("shape", [(1, 1), (33, 65), (64, 257), (257, 128), (5, 17000)])
def test_normalization_at_every_level(isa, kind, shape, both):
    x = tensor("outliers", *shape, 1, torch.bfloat16)
    weight = torch.randn(shape[1])
    bias = torch.randn(shape[1]) if kind == "LayerNorm" else None
    step = NormStep(x, weight, bias, Norm(kind, 1e-5), torch.bfloat16, True, both)
    got = norm_quantize_2d(step)
    expected = composed("norm_quantize", step)
    for mine, theirs in zip(norm_parts(got), norm_parts(expected), strict=True):
        same(mine, theirs)
    dz = tensor("normal", *shape, 5, torch.bfloat16)
    back = (dz, x, weight, got.mean, got.rstd, torch.float32)
    same(norm_backward_2d(*back)[0], fused.normalize_backward(*back)[0])


@pytest.mark.parametrize("kind", NORMS)
def test_normalization_gradients_are_autograds(kind):
    x = torch.randn(6, 70, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(70, dtype=torch.float64, requires_grad=True)
    dz = torch.randn(6, 70, dtype=torch.float64)
    norm = Norm(kind, 1e-5)
    if kind == "LayerNorm":
        z = torch.nn.functional.layer_norm(x, (70,), weight, None, norm.eps)
    else:
        z = torch.nn.functional.rms_norm(x, (70,), weight, norm.eps)
    dx, dweight = torch.autograd.grad(z, (x, weight), dz)
    args = x.detach().float(), weight.detach().float()
    made = norm_quantize_2d(NormStep(*args, None, norm, torch.float32, False, BOTH))
    assert made.z is None
    got = norm_backward_2d(dz.float(), *args, made.mean, made.rstd, torch.float32)
    torch.testing.assert_close(got[0].double(), dx, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1].double(), dweight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[2].double(), dz.sum(0), rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------- activations
def halves(name, rows, cols, kind="normal", dtype=torch.float32, seed=2):
    act = Activation(name, limit=1.5)
    return act, tensor(kind, rows, cols * (2 if act.gated else 1), seed, dtype)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_formulas_are_differentiated_right(name):
    act, h = halves(name, 9, 33)
    h = (2 * h).double().requires_grad_()
    grad = torch.randn(9, 33, dtype=torch.float64)
    out = activations.plain(h, act)
    (expected,) = torch.autograd.grad(out, h, grad)
    args = (h.detach().float(), act, torch.float32)
    for forward, backward in (
        (fused.activate, fused.activate_backward),
        (
            lambda h, *rest: act_quantize_2d(ActStep(h, None, *rest, True, BOTH)).out,
            lambda g, h, *rest: act_quantize_2d(ActStep(h, g, *rest, True, BOTH)).out,
        ),
    ):
        torch.testing.assert_close(forward(*args).double(), out.detach(), rtol=3e-6, atol=3e-6)
        torch.testing.assert_close(
            backward(grad.float(), *args).double(), expected, rtol=1e-5, atol=1e-5
        )
    if name not in ("relu", "reglu", "clamped_swiglu"):  # smooth enough for finite differences
        torch.autograd.gradcheck(lambda x: activations.plain(x, act), (h[:2, :],))


@native
@given(
    st.sampled_from(ACTIVATIONS), SIZES, SIZES, st.sampled_from(KINDS), DTYPES, DTYPES, TARGETS,
    st.booleans(), st.booleans(), SEEDS,
)  # fmt: skip
def test_what_is_quantized_is_the_rounded_activation(
    name, rows, cols, kind, in_dtype, dtype, target, backward, col_sum, seed
):
    act, h = halves(name, rows, cols, kind, in_dtype, seed)
    g = tensor("normal", rows, cols, seed + 1, dtype) if backward else None
    target = target._replace(col_sum=backward and col_sum)
    made = act_quantize_2d(ActStep(h, g, act, dtype, True, target))
    parts = listed(quantized(made.out, target))
    for got, expected in zip(listed(made.quantized), parts, strict=True):
        if got is None or got is not made.quantized.col_sum:
            same(got, expected)
        else:
            assert_same_sums(got, expected, made.out.double())
    silent = act_quantize_2d(ActStep(h, g, act, dtype, False, target))
    assert silent.out is None
    for got, expected in zip(listed(silent.quantized), listed(made.quantized), strict=True):
        same(got, expected)
    if name in EXACT and not backward:
        same(made.out, fused.activate(h, act, dtype))


@native
@FAMILIES
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_at_every_level(isa, name, both):
    rows, cols = (65, 96) if both is BOTH else (130, 128)  # whole blocks: nothing is composed
    act, h = halves(name, rows, cols, "normal", torch.float32)
    g = torch.randn(rows, cols)
    out = act_quantize_2d(ActStep(h, None, act, torch.float32, True, both)).out
    expected = fused.activate(h, act, torch.float32)
    torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)
    sums = both._replace(col_sum=True)
    dh = act_quantize_2d(ActStep(h, g, act, torch.float32, True, sums))
    torch.testing.assert_close(
        dh.out, fused.activate_backward(g, h, act, torch.float32), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(dh.quantized.col_sum, dh.out.sum(0), rtol=1e-4, atol=1e-4)


@native
@FAMILIES
@pytest.mark.parametrize("kind", FINITE_KINDS)
def test_threads_do_not_change_a_bit(threads, kind, both):
    x = tensor(kind, 300, 1100, 1, torch.bfloat16)
    act, h = halves("swiglu", 300, 1152, kind, torch.bfloat16)
    g = tensor("normal", 300, 1152, 3, torch.bfloat16)
    weight, sums = torch.randn(1100), both._replace(col_sum=True)
    results = []
    for count in (1, 2, 3):
        threads(count)
        step = NormStep(x, weight, None, Norm("RMSNorm", 1e-5), torch.bfloat16, True, both)
        norm = norm_quantize_2d(step)
        back = norm_backward_2d(x, x, weight, None, norm.rstd, torch.bfloat16)
        made = act_quantize_2d(ActStep(h, g, act, torch.bfloat16, True, sums))
        results.append((*norm_parts(norm), *back, made.out, *listed(made.quantized)))
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            same(got, expected)


def test_nan_is_never_hidden():
    for name in ACTIVATIONS:
        act, h = halves(name, 4, 64)
        h[1, 3] = torch.nan
        made = act_quantize_2d(ActStep(h, None, act, torch.bfloat16, True, BOTH))
        assert made.out[1, 3].isnan(), name
        assert made.quantized.row.scales[1, 0] == 255, name


def test_without_the_native_module(no_native, fresh_warnings):
    x, sums = torch.randn(3, 40), BOTH._replace(col_sum=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norm = NormStep(x, torch.ones(40), None, Norm("RMSNorm", 1e-5), torch.float32, True, BOTH)
        got = norm_quantize_2d(norm)
        norm_backward_2d(x, x, torch.ones(40), None, got.rstd, torch.float32)
        act_quantize_2d(ActStep(x, x, Activation("silu"), torch.float32, True, sums))
        expected = quantize_2d(got.z, *BOTH[:2], rule="rceil")
    same(got.quantized.row.codes, expected.row.codes)
    told = " ".join(str(w.message) for w in caught)
    for op in ("norm_quantize", "norm_backward", "act_quantize"):
        assert f"{op} on the CPU" in told


PACKED = Target("mxfp8_e4m3@sm90:8", "mxfp8_e4m3@sm90:8", "rceil")
ELSEWHERE = {  # what no native step of a CPU writes
    "packed": PACKED,
    "two formats": Target("mxfp8_e5m2@rows", "mxfp8_e4m3@cols", "rceil"),
    "half packed": Target("mxfp8_e4m3@rows", "mxfp8_e4m3@sm90:8", "rceil"),
    "rows by columns": Target("mxfp8_e4m3@cols", "mxfp8_e4m3@cols", "rceil"),
    "mxfp4": Target("mxfp4@rows", "mxfp4@rows", "even"),
    "mxfp6": Target("mxfp6_e2m3@rows", "mxfp6_e3m2@cols", "floor"),
}


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # the reference quantizes them
@pytest.mark.parametrize("target", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_native_code_does_not_write(target):
    x, norm = torch.randn(40, 70), Norm("LayerNorm", 1e-5)
    step = NormStep(x, torch.ones(70), torch.zeros(70), norm, torch.bfloat16, True, target)
    made = norm_quantize_2d(step)
    act = act_quantize_2d(ActStep(x, None, Activation("swiglu"), torch.bfloat16, True, target))
    for values, parts in ((made.z, made.quantized), (act.out, act.quantized)):
        expected = run.reference("quantize").run(Quantize(values, *target))
        for got, one in zip(listed(parts), listed(expected), strict=True):
            same(got, one)


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
@pytest.mark.parametrize("target", [BOTH, PACKED], ids=["plain", "packed"])
def test_ops_are_well_formed(target):
    x, h = torch.randn(33, 70), torch.randn(33, 64)
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.te_mx
    torch.library.opcheck(
        ops.norm_quantize.default,
        (x, torch.ones(70), None, "LayerNorm", 1e-5, torch.bfloat16, True, *target),
        test_utils=checks,
    )
    torch.library.opcheck(
        ops.norm_backward.default,
        (x, x, torch.ones(70), None, torch.ones(33), torch.bfloat16),
        test_utils=checks,
    )
    act = ("swiglu", 7.0, 1.702, 1.0, torch.bfloat16, False)
    torch.library.opcheck(ops.act_quantize.default, (h, None, *act, *target), test_utils=checks)
    back = (h, torch.randn(33, 32), *act, *target[:3], True)
    torch.library.opcheck(ops.act_quantize.default, back, test_utils=checks)
