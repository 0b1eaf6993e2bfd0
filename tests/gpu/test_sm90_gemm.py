"""The adaptive GEMM on Hopper: against fp64 of the packed operands; epilogues bit for bit."""

from __future__ import annotations

import math

import native_words as reference
import pytest
import sm90_bounds as bounds
import sm90_calls as calls
import torch

from te_mx.backends.sm90.layouts import tiles as layout

# Whole blocks, tails everywhere, M and N below a block, odd N, many steps of K.
SHAPES = ((256, 256, 256), (300, 200, 333), (64, 520, 1000), (5, 7, 40), (700, 900, 1536))
PAIRS = (
    ("gaussian", "gaussian"),
    ("rows", "rows"),
    ("gaussian", "rows"),
    ("channels", "channels"),
    ("student", "lognormal"),
    ("spread", "gaussian"),
    ("gaussian", "spread"),
    ("spread", "spread"),
    ("mixed", "mixed"),
    ("huge", "tiny"),
    ("tiny", "huge"),
    ("sparse", "nan"),
)
FORMATS = (("e4m3", "e4m3"), ("e5m2", "e4m3"))  # E5M2 is multiplied from the left alone
OUTPUTS = (torch.bfloat16, torch.float32)
# Hopper's FP8 products keep 13 bits below the largest one of a sum of 32 and cut off the rest, so a
# K = 32 sum is off by at most 33 such cuts of its largest product or of the sum before it.
CUT = 33 * 2.0**-13


def configs():
    try:
        return range(calls.native().config_count())
    except ImportError:
        return range(1)


def largest_products(a, b):
    """Sum over steps of 32 K of a bound on the largest |product| of the chain: [M, N]."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    for k in range(0, a.shape[1], 128):
        x, y = a[:, k : k + 128].nan_to_num(0).abs(), b[:, k : k + 128].nan_to_num(0).abs()
        total += 4 * torch.maximum(
            (x.amax(1)[:, None] * y.amax(1)[None]), torch.zeros((), device=a.device)
        ).minimum(x @ y.t())
    return total


@pytest.mark.parametrize("config", configs())
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_packed_operands(shape, pair, config):
    m, n, k = shape
    index = SHAPES.index(shape) + PAIRS.index(pair)
    lhs_fmt, rhs_fmt = FORMATS[index // 2 % 2]
    dtype = OUTPUTS[index % 2]
    a, b = calls.data(m, k, pair[0], torch.float32, 1), calls.data(n, k, pair[1], torch.float32, 2)
    pa, pb = calls.operand(a, lhs_fmt), calls.operand(b, rhs_fmt)
    va, vb = layout.packed_values(pa, k, lhs_fmt), layout.packed_values(pb, k, rhs_fmt)
    got = calls.gemm(pa, pb, shape, (lhs_fmt, rhs_fmt), dtype, config=config)
    want = va @ vb.t()
    bound = CUT * largest_products(va, vb) + 0.51 * calls.ulp(want, dtype) + 2.0**-120
    bound += (k / 128 + 2) * 2.0**-24 * (va.abs() @ vb.abs().t())
    fits = want.abs() < torch.finfo(dtype).max
    assert ((got.double() - want).abs() <= bound)[fits].all()
    assert torch.equal(got.isnan(), want.isnan()) or not fits.all()


@pytest.mark.parametrize("config", configs())
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_lower_halves_of_shared_scales_of_the_right_operand_are_not_read(pair, config):
    """Weights that stand still have other things there."""
    m, n, k = shape = 130, 200, 333
    pa, pb = (
        calls.operand(calls.data(rows, k, kind, torch.float32, rows), "e4m3")
        for rows, kind in zip((m, n), pair, strict=True)
    )
    expected = calls.gemm(pa, pb, shape, out_dtype=torch.float32, config=config)
    words = pb.scales[..., :128]
    other = torch.randint(1 << 16, words.shape, dtype=torch.int32, device=words.device)
    words |= torch.where(pb.scales[..., 128:129] < 2, other, 0)
    got = calls.gemm(pa, pb, shape, out_dtype=torch.float32, config=config)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("config", configs())
def test_factors_down_to_the_smallest_number(config):
    """One step of K, one tile each: D is the sum times a power of two, rounded once."""
    shape = m, n, k = 100, 120, 128
    a, b = (
        calls.data(m, k, "gaussian", torch.float32, 1),
        calls.data(n, k, "gaussian", torch.float32, 2),
    )

    def product(x, y):
        operands = calls.operand(x, "e4m3"), calls.operand(y, "e4m3")
        classes, exponents = zip(*(p.scales[0, 0, 128:130].tolist() for p in operands), strict=True)
        assert classes == (0, 0)
        out = calls.gemm(*operands, shape, out_dtype=torch.float32, config=config)
        return out.double(), sum(exponents) - 254

    base, factor = product(a, b)
    for to in (*range(-149, -138), -126, -125, 60):
        half = (to - factor) // 2
        got, at = product(a * 2.0**half, b * 2.0 ** (to - factor - half))
        assert at == to
        assert torch.equal(got, (base * 2.0 ** (to - factor)).float().double())


@pytest.mark.parametrize("pair", PAIRS[:5], ids="-".join)
def test_alignment_error_against_the_mx_values(pair):
    """Shifted codes move by at most half a smallest code of the tile: 2^-10 * 2^(e + 8 - 127)."""
    m, n, k = 512, 384, 1024
    a, b = calls.data(m, k, pair[0], torch.float32, 1), calls.data(n, k, pair[1], torch.float32, 2)
    exact, moved = [], []
    for x in (a, b):
        parts = reference.quantize(x, "e4m3", True, None, "rceil", False)
        scale = torch.exp2(parts.row_scales.double() - 127).repeat_interleave(32, 1)
        exact.append(reference.decode(parts.row_codes, "e4m3").double() * scale)
        moved.append(2.0**-10 * 256 * scale)
    got = calls.gemm(
        calls.operand(a, "e4m3"), calls.operand(b, "e4m3"), (m, n, k), out_dtype=torch.float32
    )
    (va, vb), (da, db) = exact, moved
    bound = da @ vb.abs().t() + va.abs() @ db.t() + da @ db.t()
    bound += CUT * largest_products(va, vb) * 1.01 + 2.0**-20 * (va.abs() @ vb.abs().t())
    assert ((got.double() - va @ vb.t()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(300, 264, 256), (129, 75, 96), (512, 512, 512)], ids=str)
@pytest.mark.parametrize("config", configs())
def test_epilogues_are_exact_functions_of_the_fp32_sums(config, shape, dtype):
    assert_epilogues(shape, dtype, calls.native().config_full(config), config=config)


def assert_epilogues(shape, dtype, full, **how):
    """Every epilogue of one product, made in a way that `how` names; full: with GELU too."""
    m, n, _ = shape
    assert_epilogues_of(runner(shape, **how), m, n, dtype, full, "parts" not in how)


def runner(shape, **how):
    m, n, k = shape
    pa = calls.operand(calls.data(m, k, "gaussian", torch.float32, 3), "e4m3")
    pb = calls.operand(calls.data(n, k, "gaussian", torch.float32, 4) * 0.1, "e4m3")

    return lambda **kwargs: calls.gemm(pa, pb, shape, **how, **kwargs)


def assert_epilogues_of(run, m, n, dtype, full, in_one_piece=True):
    """The same of the D [m, n] that run() gives, in fp32 and with every epilogue."""
    base = run(out_dtype=torch.float32)
    assert torch.equal(base, run(out_dtype=torch.float32))
    for bias_dtype in (torch.bfloat16, torch.float32):
        bias = torch.randn(n, device="cuda").to(bias_dtype)
        assert torch.equal(run(out_dtype=dtype, bias=bias), (base + bias.float()).to(dtype))
    old = torch.randn(m, n, device="cuda").to(dtype)
    assert torch.equal(run(out=old.clone(), accumulate=True), (base + old.float()).to(dtype))
    if not full:
        return
    for gelu in ("tanh", "erf"):
        aux = torch.full((m, n), math.nan, dtype=dtype, device="cuda")
        before = base + bias.float()
        want = bounds.gelu(before, gelu)
        got = run(out_dtype=dtype, bias=bias, gelu=gelu, aux=aux)
        assert torch.equal(aux, before.to(dtype))
        close = 0.51 * calls.ulp(want, dtype) + 2e-6 * (1 + before.double().abs())
        assert ((got.double() - want).abs() <= close).all()

        x = torch.randn(m, n, device="cuda").to(dtype)
        want = base.double() * bounds.dgelu(x, gelu)
        bias_grad = torch.full((n,), math.nan, device="cuda")
        got = run(out_dtype=dtype, gelu=gelu, gelu_in=x, bias_grad=bias_grad)
        close = 0.51 * calls.ulp(want, dtype) + 2e-6 * base.double().abs()
        assert ((got.double() - want).abs() <= close).all()
        stored = in_one_piece and bounds.summed_as_stored(got, x)
        bounds.assert_bias_gradient(bias_grad, got, want, 2e-6 * base.double().abs(), stored)


# Rows that start where the copy engine stores, and end where it does, or inside of its 16 bytes.
APART = ((264, 304, torch.bfloat16), (261, 304, torch.bfloat16), (137, 140, torch.float32))


@pytest.mark.parametrize(("n", "ldo", "dtype"), APART, ids=str)
def test_rows_of_the_output_may_lie_apart(n, ldo, dtype):
    m, k = 300, 256
    pa, pb = (calls.operand(calls.data(r, k, "gaussian", torch.float32), "e4m3") for r in (m, n))
    wide = torch.full((m + 1, ldo), 7.0, dtype=dtype, device="cuda")
    calls.gemm(pa, pb, (m, n, k), out=wide[:m, :n])
    assert torch.equal(wide[:m, :n], calls.gemm(pa, pb, (m, n, k), out_dtype=dtype))
    assert (wide[:, n:] == 7.0).all() and (wide[m] == 7.0).all()


def test_two_streams_and_a_graph_give_the_same_bits():
    m = n = k = 1024
    pa, pb = (calls.operand(calls.data(m, k, "gaussian", torch.float32, s), "e4m3") for s in (1, 2))
    want = calls.gemm(pa, pb, (m, n, k))
    outs = [torch.full_like(want, math.nan) for _ in range(3)]
    native = calls.native()
    lhs, rhs = (calls.side(packed, m, k, "e4m3", "sm90") for packed in (pa, pb))
    plan = native.GemmArgs(lhs=lhs, rhs=rhs, out_dtype=calls.DTYPES[want.dtype], ldo=n)

    def launch(out):
        assert native.gemm(plan.copy(out=out.data_ptr(), stream=calls.stream())) == 0

    torch.cuda.synchronize()
    for out in outs[:2]:
        with torch.cuda.stream(torch.cuda.Stream()):
            launch(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(outs[2])
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)
