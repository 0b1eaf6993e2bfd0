"""Fused steps on Hopper: normalization to the bit, activations against fp64, and of both the bytes
of quantizing what was rounded."""

from __future__ import annotations

import pytest
import sm90_calls as calls
import torch

from te_mx.backends import reference_fused, sm90_fused
from te_mx.backends.base import PLAIN
from te_mx.backends.fused import ACTIVATIONS, NORMS, Activation, Norm, Wanted
from te_mx.nn import activations
from te_mx.ops import fused_run
from te_mx.ops.fused import act_quantize_2d, dact_quantize_2d, norm_backward_2d, norm_quantize_2d

pytestmark = pytest.mark.usefixtures("poisoned")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F32, F16)
# Whole tiles; tails in both directions; 8 columns that straddle the halves; odd; long rows; one.
SHAPES = ((256, 384), (300, 200), (129, 264), (77, 1001), (33, 9000), (1, 1))
FORMS = (  # what te_mx.Linear asks for, then other forms, single directions, nothing
    Wanted("e4m3", True, "transposed", "rceil", 8),
    Wanted("e5m2", True, "transposed", "floor", 0),
    Wanted("e5m2", True, "transposed", "rceil", PLAIN),
    Wanted("e4m3", True, "plain", "floor", PLAIN),
    Wanted("e4m3", True, None, "rceil", 8),
    Wanted("e4m3", False, "transposed", "rceil", 8),
    Wanted("e4m3", False, None, "rceil", PLAIN),
)


def randn(*shape, dtype=BF16, seed=1):
    g = torch.Generator("cuda").manual_seed(seed)
    return (2 * torch.randn(shape, generator=g, device="cuda")).to(dtype)


def same(got, expected):
    """Equal bits where there are any; every NaN is the same."""
    assert (got is None) == (expected is None)
    if got is not None:
        assert got.dtype == expected.dtype and got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def same_parts(got, values, wanted):
    """The bytes of quantizing `values`, and sums that are nearly theirs."""
    for mine, theirs in zip(got[:4], fused_run.quantized(values, wanted)[:4], strict=True):
        same(mine, theirs)
    assert (got.col_sum is not None) == wanted.col_sum
    if wanted.col_sum:
        exact, size = values.double().sum(0), values.double().abs().sum(0)
        assert ((got.col_sum.double() - exact).abs() <= len(values) * 2.0**-24 * size).all()


# ------------------------------------------------------------------------------------ normalization
def norm_case(kind, shape, dtype, seed=1):
    x = randn(*shape, dtype=dtype, seed=seed) + 1
    weight = randn(shape[1], dtype=F32, seed=2)
    bias = randn(shape[1], dtype=F32, seed=3) if kind == "LayerNorm" and shape[0] > 32 else None
    return x, weight, bias, Norm(kind, 1e-5)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtypes", [(a, b) for a in DTYPES for b in DTYPES], ids=str)
def test_normalization_is_the_reference(kind, shape, dtypes):
    call = norm_case(kind, shape, dtypes[0])
    mean, rstd, z = reference_fused.normalize(*call, dtypes[1])
    for i, wanted in enumerate(FORMS):
        for want_z in (False, True) if i == 0 else (i % 2 == 1,):
            got = norm_quantize_2d(*call, dtypes[1], want_z=want_z, wanted=wanted)
            same(got.mean, mean), same(got.rstd, rstd)
            same(got.z, z if want_z else None)
            same_parts(got.quantized, z, wanted)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtypes", [(a, b) for a in DTYPES for b in DTYPES], ids=str)
def test_gradients_of_normalization(kind, shape, dtypes):
    x, weight, _, norm = norm_case(kind, shape, dtypes[0])
    mean, rstd, _ = reference_fused.normalize(x, weight, None, norm, F32)
    dz = randn(*shape, dtype=dtypes[1], seed=4)
    call = (dz, x, weight, mean, rstd, dtypes[0])
    dx, dweight, dbias = norm_backward_2d(*call)
    same(dx, reference_fused.normalize_backward(*call)[0])
    center = 0 if mean is None else mean[:, None]
    h = ((x.float() - center) * rstd[:, None]).double()
    for got, terms in ((dweight, dz.double() * h), (dbias, dz.double())):
        bound = (shape[0] + 2) * 2.0**-24 * terms.abs().sum(0)
        assert ((got.double() - terms.sum(0)).abs() <= bound).all()
    for one, two in zip((dx, dweight, dbias), norm_backward_2d(*call), strict=True):
        same(one, two)


# Clusters of every size: one group of rows, several and a part at the end, pieces for some threads.
STRIPS = ((8, 2048), (1544, 2304), (2064, 4096), (200, 4352), (520, 8192), (72, 8448), (96, 14336))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", STRIPS)
def test_gradients_of_rows_kept_in_shared_memory(kind, shape):
    rows, cols = shape
    x, dz = ((randn(rows, cols + 64, seed=i) + 0.5)[:, 8 : cols + 8] for i in (1, 2))
    weight, norm = randn(cols, dtype=F32, seed=3), Norm(kind, 1e-5)
    mean, rstd, _ = reference_fused.normalize(x, weight, None, norm, F32)
    call = (dz, x, weight, mean, rstd, BF16)
    expected = reference_fused.normalize_backward(*call)[0]
    h = ((x.float() - (0 if mean is None else mean[:, None])) * rstd[:, None]).double()
    made = [norm_backward_2d(*call) for _ in range(3)]
    for dx, dweight, dbias in made:
        same(dx, expected)
        for got, terms in ((dweight, dz.double() * h), (dbias, dz.double())):
            bound = (rows + 2) * 2.0**-24 * terms.abs().sum(0)
            assert ((got.double() - terms.sum(0)).abs() <= bound).all()
        same(dweight, made[0][1]), same(dbias, made[0][2])
    x[3, 5] = torch.nan  # stays in its row
    same(norm_backward_2d(*call)[0], reference_fused.normalize_backward(*call)[0])


@pytest.mark.parametrize("shape", [(2100, 9000), (3000, 136)])
def test_normalization_in_many_bands(shape):
    x, weight, bias, norm = norm_case("LayerNorm", shape, BF16)
    expected = reference_fused.normalize(x, weight, bias, norm, BF16)
    back = x, x, weight, *expected[:2], BF16
    dx = reference_fused.normalize_backward(*back)[0]
    for _ in range(3):
        got = norm_quantize_2d(x, weight, bias, norm, BF16, want_z=True, wanted=FORMS[0])
        same(got.z, expected[2])
        same_parts(got.quantized, expected[2], FORMS[0])
        same(norm_backward_2d(*back)[0], dx)


def test_normalization_of_rows_apart():
    x = randn(200, 700)
    weight = randn(300, dtype=F32)
    for part in (x[:, :304], x[:, 3:300], x[:, ::2], x.t()[:, :200]):
        w = weight.repeat(3)[: part.shape[1]]
        norm = Norm("LayerNorm", 1e-5)
        got = norm_quantize_2d(part, w, w, norm, BF16, want_z=True, wanted=FORMS[0])
        same(got.z, reference_fused.normalize(part, w, w, norm, BF16)[2])
        same_parts(got.quantized, got.z, FORMS[0])
        back = (part, part, w, got.mean, got.rstd, BF16)
        same(norm_backward_2d(*back)[0], reference_fused.normalize_backward(*back)[0])


def test_weights_that_lie_anywhere():
    x = randn(150, 648)
    for offset in (0, 1, 2):
        weight, bias = (randn(2, 652, dtype=F32, seed=offset)[i, offset:][:648] for i in (0, 1))
        norm = Norm("LayerNorm", 1e-5)
        mean, rstd, z = reference_fused.normalize(x, weight, bias, norm, BF16)
        same(norm_quantize_2d(x, weight, bias, norm, BF16, want_z=True, wanted=FORMS[0]).z, z)
        back = (x, x, weight, mean, rstd, BF16)
        same(norm_backward_2d(*back)[0], reference_fused.normalize_backward(*back)[0])


def test_normalization_in_a_graph_starts_afresh():
    call = norm_case("LayerNorm", (700, 1024), BF16)
    weight, norm, x = call[1], call[3], call[0]
    run = lambda: norm_quantize_2d(*call, BF16, want_z=True, wanted=FORMS[0])  # noqa: E731
    back = lambda m: norm_backward_2d(x, x, weight, m.mean, m.rstd, BF16)  # noqa: E731
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        back(run())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
        grads = back(made)
    for seed in (5, 6):
        x.copy_(randn(*x.shape, seed=seed))
        graph.replay()
        expected = reference_fused.normalize(*call, BF16)
        same(made.z, expected[2])
        same(grads[0], reference_fused.normalize_backward(x, x, weight, *expected[:2], BF16)[0])
    assert norm.eps == 1e-5


# -------------------------------------------------------------------------------------- activations
def exact(name, rows, cols, dtype):
    """(activation, h, grad, fp64 value, fp64 gradient of h, what errors are measured by)."""
    act = Activation(name, limit=1.5)
    h = randn(rows, cols * (2 if act.gated else 1), dtype=dtype)
    grad = randn(rows, cols, dtype=dtype, seed=2)
    wide = h.double().requires_grad_()
    value = activations.plain(wide, act)
    (dh,) = torch.autograd.grad(value, wide, grad.double())
    parts = (h.double().abs() + 1).chunk(2, 1) if act.gated else [h.double().abs() + 1]
    size = parts[0] * parts[-1] * (1 + act.offset)
    back = (size * grad.double().abs()).repeat(1, len(parts))
    return act, h, grad, value.detach(), dh, size, back


def assert_close(got, expected, size):
    """Rounded once from a value that is off by a few units of fp32; more where exp is fast."""
    slack = 2.0 ** (-20 if got.dtype is F32 else -18) * size
    bound = slack + 0.5 * calls.ulp(expected.abs() + slack, got.dtype)
    assert ((got.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, shape, dtype):
    act, h, grad, value, dh, size, back = exact(name, *shape, dtype)
    for i, wanted in enumerate(FORMS):
        made = act_quantize_2d(h, act, dtype, want_out=True, wanted=wanted)
        same_parts(made.quantized, made.out, wanted)
        wanted_too = wanted._replace(col_sum=i % 2 == 0)
        there = dact_quantize_2d(grad, h, act, dtype, want_out=True, wanted=wanted_too)
        same_parts(there.quantized, there.out, wanted_too)
        if i == 0:
            first, first_back = made.out, there.out
            assert_close(first, value, size)
            assert_close(first_back, dh, back)
            silent = act_quantize_2d(h, act, dtype, want_out=False, wanted=wanted)
            quiet = dact_quantize_2d(grad, h, act, dtype, want_out=False, wanted=wanted_too)
            assert silent.out is None and quiet.out is None
            pairs = [*zip(silent.quantized, made.quantized, strict=True)]
            for one, two in [*pairs, *zip(quiet.quantized, there.quantized, strict=True)]:
                same(one, two)
        same(made.out, first), same(there.out, first_back)  # whatever is wanted beside


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_activations_of_mixed_dtypes_and_rows_apart(name):
    act = Activation(name)
    h = randn(130, 700)
    for part in (h[:, :640], h[:, 4:500], h[:, ::2]):
        made = act_quantize_2d(part, act, BF16, want_out=True, wanted=FORMS[0])
        whole = act_quantize_2d(part.contiguous(), act, BF16, want_out=True, wanted=FORMS[0])
        same(made.out, whole.out)
        same_parts(made.quantized, whole.out, FORMS[0])
    h, grad = randn(40, 96, dtype=F16), randn(40, 96 // (2 if act.gated else 1), dtype=BF16)
    for got, dtype in (
        (act_quantize_2d(h, act, BF16, want_out=True, wanted=FORMS[0]), BF16),
        (dact_quantize_2d(grad, h, act, F32, want_out=True, wanted=FORMS[0]), F32),
    ):
        assert got.out.dtype == dtype
        same_parts(got.quantized, got.out, FORMS[0])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_is_never_hidden_and_infinity_is_not_made(name):
    act = Activation(name)
    h = randn(64, 128)
    h[1, 3], h[5, 7], h[9, 9] = torch.nan, 1e19, -1e19
    grad = torch.ones(64, 64 if act.gated else 128, dtype=BF16, device="cuda")
    made = act_quantize_2d(h, act, BF16, want_out=True, wanted=FORMS[2])
    assert made.out[1, 3].isnan() and made.quantized.row_scales[1, 0] == 255
    assert made.out.isnan().sum() == 1
    assert dact_quantize_2d(grad, h, act, BF16, want_out=True, wanted=FORMS[2]).out[9, 9] == 0 or (
        act.gated
    )


def test_more_than_two_to_the_31_elements():
    act, rows, cols = Activation("swiglu"), 70000, 16384
    h = torch.empty(rows, 2 * cols, dtype=BF16, device="cuda").normal_()
    wanted = Wanted("e4m3", True, "plain", "rceil")
    made = dact_quantize_2d(h[:, :cols], h, act, BF16, want_out=False, wanted=wanted)
    part = slice(69984, rows)
    last = dact_quantize_2d(h[part, :cols], h[part], act, BF16, want_out=False, wanted=wanted)
    same(made.quantized.row_codes[part], last.quantized.row_codes)
    same(made.quantized.col_codes[part], last.quantized.col_codes)
    same(made.quantized.col_scales[-1:], last.quantized.col_scales[-1:])
    norm, weight = Norm("RMSNorm", 1e-5), torch.ones(2 * cols, device="cuda")
    got = norm_quantize_2d(h, weight, None, norm, BF16, want_z=True, wanted=wanted)
    expected = reference_fused.normalize(h[part], weight, None, norm, BF16)
    same(got.rstd[part], expected[1]), same(got.z[part], expected[2])
    dx = norm_backward_2d(h, h, weight, None, got.rstd, BF16)[0][part]
    args = h[part], h[part], weight, None, got.rstd[part], BF16
    same(dx, reference_fused.normalize_backward(*args)[0])


def test_the_native_code_runs():
    x, weight = randn(256, 256), torch.ones(256, device="cuda")
    assert sm90_fused.normalize(x, weight, None, Norm("RMSNorm", 1e-5), BF16, False, FORMS[0])
    assert sm90_fused.activate(x, None, Activation("silu"), BF16, False, FORMS[0])
