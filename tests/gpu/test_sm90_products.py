"""te_mx.gemm on Hopper against fp64: of the aligned operands, of the MX values, in every layout."""

from __future__ import annotations

import pytest
import sm90_bounds as bounds
import sm90_calls as calls
import torch

import te_mx
from te_mx.api import blas

LAYOUTS = ("TN", "NN", "NT")
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
# Of A, the right operand, and of B. E5M2 is multiplied by tensor cores of FP8 from the left alone.
ADAPTIVE = (("e4m3", "e4m3"), ("e4m3", "e5m2"))
FORMATS = (*ADAPTIVE, ("e5m2", "e4m3"), ("e5m2", "e5m2"))
# (m, n, k): whole tiles, tails in every direction, one of each, few rows, a long k.
SHAPES = ((256, 384, 512), (264, 130, 333), (1, 1, 1), (1, 300, 65), (300, 1, 40), (40, 24, 4100))
STORED = pytest.mark.parametrize("transposed", [True, False], ids=["transposed", "as_it_lies"])
WILD = ("rows", "spread", "mixed", "sparse", "nan")


def tensors(a, b, layout, formats=("e4m3", "e4m3"), transposed=True):
    """MXTensors of a [m, k] and b [n, k] as a layout stores them, with the copies that it reads."""
    made = []
    for x, fmt, usage in zip((a, b), formats, blas.USAGES[layout], strict=True):
        if usage == "rowwise":
            made.append(te_mx.quantize(x, fmt=fmt))
        else:
            columns = {"columnwise": True, "columnwise_transposed": transposed}
            made.append(te_mx.quantize(x.t().contiguous(), fmt=fmt, rowwise=False, **columns))
    return made


def multiply(A, B, layout, dtype=torch.float32, **options):
    """te_mx.gemm into poisoned memory."""
    a, b = blas.operands(A, B, layout)
    out = bounds.nan_like((b.rows, a.rows), dtype)
    made = te_mx.gemm(A, B, layout, out=out, **options)
    assert made.out is out
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", (*bounds.KINDS, *WILD))
def test_adaptive_is_the_product_of_the_aligned_operands(kind, shape, layout):
    m, n, k = shape
    index = SHAPES.index(shape) + len(kind)
    a, b = bounds.pair(kind, m, n, k)
    A, B = tensors(a, b, layout, ADAPTIVE[index % 2], transposed=True)
    sides = blas.operands(A, B, layout)
    for spread in (8, 0):
        va, vb = (bounds.aligned_values(side, spread) for side in sides)
        got = multiply(A, B, layout, DTYPES[index % 3], alignment_spread=spread)
        bounds.assert_close(got, vb @ va.t(), bounds.accumulation(va, vb))


@pytest.mark.parametrize("spread", [0, 3, 8])
@pytest.mark.parametrize("formats", ADAPTIVE, ids="-".join)
@pytest.mark.parametrize("kind", bounds.KINDS)
def test_adaptive_against_the_mx_values(kind, formats, spread):
    a, b = bounds.pair(kind, 384, 520, 1056)
    A, B = tensors(a, b, "TN", formats)
    sides = blas.operands(A, B, "TN")
    for side in sides:
        moved = (bounds.aligned_values(side, spread) - bounds.mx_values(side)).abs()
        assert (moved <= bounds.may_move(side, spread)).all()
        assert spread or not moved.any()
    va, vb = map(bounds.mx_values, sides)
    limit = bounds.moved_products(*sides, spread)
    aligned = (bounds.aligned_values(side, spread) for side in sides)
    limit += bounds.accumulation(*aligned)
    bounds.assert_close(multiply(A, B, "TN", alignment_spread=spread), vb @ va.t(), limit)


@pytest.mark.parametrize("kind", bounds.KINDS)
def test_an_element_moves_by_at_most_a_share_of_its_blocks_largest(kind):
    """2^(S - 17.8), as the documentation of `alignment_spread` says."""
    x, _ = bounds.pair(kind, 300, 1, 515)
    side = te_mx.quantize(x).operand("rowwise")
    values = bounds.mx_values(side)
    padded = torch.nn.functional.pad(x.double().abs(), (0, -x.shape[1] % 32))
    largest = padded.view(len(x), -1, 32).amax(-1).repeat_interleave(32, 1)[:, : x.shape[1]]
    for spread in (0, 3, 8):
        moved = (bounds.aligned_values(side, spread) - values).abs()
        assert (moved <= 2.0 ** (spread - 17.8) * largest).all()


@pytest.mark.parametrize("kind", ["gaussian", "student", "channels", "rows", "outliers"])
def test_what_the_accumulators_lose_is_far_below_bf16(kind):
    """The bounds above are for the worst case; this is what data of training loses."""
    A, B = tensors(*bounds.pair(kind, 512, 640, 4096), "TN")
    va, vb = (bounds.aligned_values(side, 8) for side in blas.operands(A, B, "TN"))
    want = vb @ va.t()
    lost = (multiply(A, B, "TN").double() - want).norm()
    assert lost <= (want.to(torch.bfloat16).double() - want).norm() / 4


@STORED
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", (*bounds.KINDS, *WILD))
def test_exact_is_exact(kind, shape, transposed, layout):
    m, n, k = shape
    index = SHAPES.index(shape) + len(kind)
    a, b = bounds.pair(kind, m, n, k)
    A, B = tensors(a, b, layout, FORMATS[index % 4], transposed)
    va, vb = map(bounds.mx_values, blas.operands(A, B, layout))
    got = multiply(A, B, layout, DTYPES[index % 3], precision="exact")
    bounds.assert_close(got, vb @ va.t(), bounds.fp32_sums(va, vb))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("formats", FORMATS[2:], ids="-".join)
def test_e5m2_from_the_right_is_multiplied_exactly(formats, layout):
    A, B = tensors(*bounds.pair("channels", 264, 130, 333), layout, formats)
    got = multiply(A, B, layout)
    assert torch.equal(got, multiply(A, B, layout, precision="exact"))
    va, vb = map(bounds.mx_values, blas.operands(A, B, layout))
    bounds.assert_close(got, vb @ va.t(), bounds.fp32_sums(va, vb))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_exact_on_a_result_that_fills_the_gpu(bias, dtype):
    m, n, k = 2048, 4104, 200
    a, b = bounds.pair("channels", m, n, k)
    A, B = tensors(a, b, "TN")
    va, vb = map(bounds.mx_values, blas.operands(A, B, "TN"))
    added = torch.randn(m, device="cuda", dtype=dtype) if bias else None
    want = vb @ va.t() + (added.double() if bias else 0)
    limit = bounds.fp32_sums(va, vb) + 2.0**-23 * want.abs()
    got = multiply(A, B, "TN", dtype, precision="exact", bias=added)
    bounds.assert_close(got, want, limit)


@STORED
@pytest.mark.parametrize("precision", ["adaptive", "exact"])
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 768, 2048)], ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "mixed"])
def test_bits_do_not_depend_on_the_layout(kind, shape, precision, transposed):
    if precision == "exact" and not transposed:
        return  # cuBLAS reads the other order with other kernels: within the bound, as tested above
    a, b = bounds.pair(kind, *shape)
    want = multiply(*tensors(a, b, "TN"), "TN", precision=precision)
    for layout in ("NN", "NT"):
        sides = tensors(a, b, layout, transposed=transposed)
        for _ in range(3):  # packed in the call, packed to be kept, kept
            assert torch.equal(multiply(*sides, layout, precision=precision), want)


@pytest.mark.parametrize("k", [64, 128, 4096, 100_000])
def test_bits_do_not_depend_on_the_run(k):
    """Few tiles and a long k: where parts of k are summed apart, their order must be fixed."""
    a, b = bounds.pair("gaussian", 128, 200, k)
    A, B = tensors(a, b, "TN")
    for precision in ("adaptive", "exact"):
        first = multiply(A, B, "TN", precision=precision)
        for _ in range(5):
            assert torch.equal(multiply(A, B, "TN", precision=precision), first)


def test_a_row_has_the_same_bits_alone():
    """The tokens of a batch do not see each other, but for the tile of 128 that they share."""
    a, b = bounds.pair("student", 512, 640, 1024)
    A = te_mx.quantize(a)
    for precision in ("adaptive", "exact"):
        whole = te_mx.gemm(A, te_mx.quantize(b), precision=precision, out_dtype=torch.float32).out
        part = te_mx.gemm(
            A, te_mx.quantize(b[256:384]), precision=precision, out_dtype=torch.float32
        ).out
        va, vb = bounds.mx_values(A.operand("rowwise")), b.double()[256:384]
        assert (part - whole[256:384]).abs().max() <= 2.0**-18 * (vb.abs() @ va.abs().t()).max()
        if precision == "adaptive":
            assert torch.equal(part, whole[256:384])


@pytest.mark.parametrize("precision", ["adaptive", "exact"])
def test_scales_at_both_ends(precision):
    """Products of huge and tiny operands, and NaN and zeros with the scale bytes 255 and 0."""
    m, n, k = 200, 136, 288
    for kinds in (("huge", "tiny"), ("tiny", "huge"), ("tiny", "tiny")):
        a = calls.data(m, k, kinds[0], torch.float32, 1)
        b = calls.data(n, k, kinds[1], torch.float32, 2)
        if precision == "exact":  # bf16 ends at 2^-133
            a, b = (
                x * 2.0**20 if kind == "tiny" else x for x, kind in zip((a, b), kinds, strict=True)
            )
        a[3], b[5, 32:64] = 0, 0
        a[7, 40] = torch.nan
        A, B = tensors(a, b, "TN")
        sides = blas.operands(A, B, "TN")
        if precision == "adaptive":
            va, vb = (bounds.aligned_values(side, 8) for side in sides)
            limit = bounds.accumulation(va, vb)
        else:
            va, vb = map(bounds.mx_values, sides)
            limit = bounds.fp32_sums(va, vb)
        got = multiply(A, B, "TN", precision=precision)
        bounds.assert_close(got, vb @ va.t(), limit)
        assert got[:, 7].isnan().all()
        assert not got[:, 3].any()


@pytest.mark.parametrize("precision", ["adaptive", "exact"])
@pytest.mark.parametrize("shape", [(0, 5, 64), (7, 0, 64), (7, 5, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_of_zero(layout, shape, precision):
    m, n, k = shape
    A, B = tensors(torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda"), layout)
    got = multiply(A, B, layout, torch.bfloat16, precision=precision)
    assert torch.equal(got, torch.zeros(n, m, dtype=torch.bfloat16, device="cuda"))
    bias = torch.randn(m, device="cuda")
    made = te_mx.gemm(
        A, B, layout, bias=bias, gelu="erf", out_dtype=torch.float32, precision=precision
    )
    assert torch.equal(made.aux, bias.expand(n, m))
    torch.testing.assert_close(made.out, torch.nn.functional.gelu(bias).expand(n, m))
