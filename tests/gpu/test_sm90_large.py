"""Tensors of more than 2^31 elements: sampled rows against the same rows alone."""

from __future__ import annotations

import pytest
import sm90_bounds as bounds
import torch

import te_mx
from te_mx import _ops as ops
from te_mx.backends.sm90.layouts import tiles as sm90_tiles

ROWS, COLS = 2_097_152 + 200, 1032  # 2.16e9 elements
STARTS = (0, 128 * 8000, 128 * 16256, 128 * 16384, 128 * 16385)  # the last: 72 rows

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 70 << 30,
    reason="needs 70 GB of device memory",
)


@pytest.fixture(scope="module")
def x():
    torch.cuda.empty_cache()
    made = torch.randn(ROWS, COLS, device="cuda", dtype=torch.bfloat16)
    yield made
    del made
    torch.cuda.empty_cache()


def rows(start):
    return slice(start, min(start + 128, ROWS))


@pytest.mark.parametrize("layout", ["rows", "sm90:8"])
def test_quantize(x, layout):
    spec = f"mxfp8_e4m3@{layout}"
    q = ops.quantize_2d(x, spec, spec, col_sum=True)
    for start in STARTS:
        part = ops.quantize_2d(x[rows(start)].contiguous(), spec, spec)
        assert torch.equal(q.row.codes[rows(start)], part.row.codes)
        assert torch.equal(q.col.codes[:, rows(start)], part.col.codes)
        if layout == "rows":
            assert torch.equal(q.row.scales[rows(start)], part.row.scales)
            blocks = slice(start // 32, start // 32 + part.col.scales.shape[1])
            assert torch.equal(q.col.scales[:, blocks], part.col.scales)
        else:
            assert torch.equal(q.row.scales[:, start // 128], part.row.scales[:, 0])
            assert torch.equal(q.col.scales[start // 128], part.col.scales[0])
    exact = sum(chunk.double().sum(0) for chunk in x.split(1 << 18))
    size = sum(chunk.double().abs().sum(0) for chunk in x.split(1 << 18))
    assert ((q.col_sum.double() - exact).abs() <= ROWS * 2.0**-24 * size).all()


@pytest.mark.parametrize("layout", ["rows", "cols"])
def test_pack(x, layout):
    spec = f"mxfp8_e4m3@{layout}"
    as_it_lies = layout == "cols"
    q = ops.quantize_2d(x, "", spec) if as_it_lies else ops.quantize_2d(x, spec)
    operand = q.col if as_it_lies else q.row
    packed = ops.kept_form(operand, "rhs", ops.Mode())
    for start in STARTS[:-1]:
        codes, scales = operand.codes[rows(start)], operand.scales
        if as_it_lies:
            scales = scales[start // 32 : start // 32 + 4]
            want = sm90_tiles.pack(codes.t().contiguous(), scales.t().contiguous(), "e4m3")
            assert torch.equal(packed.codes[:, rows(start)], want.codes)
            assert torch.equal(packed.scales[start // 128], want.scales[0])
        else:
            want = sm90_tiles.pack(codes, scales[rows(start)], "e4m3")
            assert torch.equal(packed.codes[rows(start)], want.codes[:, :COLS])
            assert torch.equal(packed.scales[:, start // 128], want.scales[:, 0])


@pytest.mark.parametrize("precision", ["adaptive", "exact"])
def test_gemm_of_a_large_operand(x, precision):
    A = te_mx.quantize(torch.randn(72, COLS, device="cuda"))
    B = te_mx.quantize(x)
    out = te_mx.gemm(A, B, precision=precision, out_dtype=torch.float32).out
    del B
    for start in STARTS:
        check(A, te_mx.quantize(x[rows(start)].contiguous()), out[rows(start)], precision)


@pytest.mark.parametrize("precision", ["adaptive", "exact"])
def test_gemm_with_a_large_result(precision):
    m, k = 16_520, 64
    n = (1 << 31) // m + 130
    assert n * m > 1 << 31
    b = torch.randn(n, k, device="cuda")
    A, B = te_mx.quantize(torch.randn(m, k, device="cuda")), te_mx.quantize(b)
    made = te_mx.gemm(A, B, precision=precision, gelu="tanh")
    for start in (0, 128 * 1000, (n - 1) // 128 * 128):
        part = slice(start, min(start + 128, n))
        check(A, te_mx.quantize(b[part]), made.aux[part], precision)
        got, before = made.out[part].double(), made.aux[part].double()
        want = torch.nn.functional.gelu(before, approximate="tanh")
        assert ((got - want).abs() <= 2.0**-6 * (before.abs() + 2.0**-6)).all()


def check(A, B, got, precision):
    a, b = A.operand("rowwise"), B.operand("rowwise")
    if precision == "exact":
        va, vb = bounds.mx_values(a), bounds.mx_values(b)
        bounds.assert_close(got, vb @ va.t(), bounds.fp32_sums(va, vb))
    else:
        va, vb = bounds.aligned_values(a, 8), bounds.aligned_values(b, 8)
        bounds.assert_close(got, vb @ va.t(), bounds.accumulation(va, vb))


@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4"])
@pytest.mark.parametrize("tokens", [3, 400])
def test_products_with_the_last_of_many_experts(tokens, fmt):
    """Their weights lie behind 2^31 elements, for few rows and in tiles, as they are and packed."""
    experts, n, k = 130, 4096, 4096
    plain = torch.empty(experts, n, k, device="cuda", dtype=torch.bfloat16).normal_()
    w = te_mx.quantize(plain, fmt=fmt)
    del plain
    a = te_mx.quantize(torch.randn(tokens, k, device="cuda"))
    ids = torch.full((tokens, 1), experts - 1, device="cuda", dtype=torch.int32)
    lists = te_mx.moe.align_block_size(ids, 64, experts)
    parts = w.rowwise_data.view(experts, n, -1)[-1], w.rowwise_scale.view(experts, n, -1)[-1]
    last = te_mx.MXTensor((n, k), w.fmt, rowwise_data=parts[0], rowwise_scale=parts[1])
    want = a.dequantize().double() @ last.dequantize().double().T
    magnitude = a.dequantize().double().abs() @ last.dequantize().double().abs().T
    for one in (w, te_mx.moe.pack_experts(w)):
        made = te_mx.moe.grouped_gemm(
            a, one, *lists, top_k=1, block_m=64, out_dtype=torch.float32
        )  # fmt: skip
        assert bool(((made - want).abs() <= 2.0**-9 * magnitude).all())
