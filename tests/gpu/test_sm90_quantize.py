"""Quantize, pack and dequantize on Hopper against plain torch, byte for byte."""

from __future__ import annotations

import itertools

import native_words as reference
import pytest
import sm90_calls as calls
import torch

from te_mx import _ops as ops
from te_mx._ops.quantize import parts_of
from te_mx.backends.sm90.layouts import tiles as layout
from te_mx.dispatch import registry

KINDS = ("gaussian", "rows", "spread", "mixed", "huge", "tiny", "sparse", "nan", "lognormal")
# Whole tiles, tails in both directions, an odd number of tiles, one element.
SHAPES = ((128, 128), (256, 384), (300, 200), (129, 257), (77, 1000), (1, 1))


def plain(x, fmt, rule="rceil"):
    return reference.quantize(x, fmt, True, "transposed", rule, False)


def assert_packed(got, want, k):
    assert torch.equal(got.codes[:, :k], want.codes[:, :k])
    assert torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_the_reference(shape, kind, fmt, dtype):
    x = calls.data(*shape, kind, dtype)
    for rule in ("rceil", "floor"):
        want = plain(x, fmt, rule)
        row, col, _ = calls.quantize(x, fmt, rule, row="plain", col="plain")
        assert torch.equal(row.codes, want.row_codes)
        assert torch.equal(row.scales, want.row_scales)
        assert torch.equal(col.codes, want.col_codes)
        assert torch.equal(col.scales, want.col_scales)
        row, col, _ = calls.quantize(x, fmt, rule, row="plain", col="as_x")
        assert torch.equal(row.codes, want.row_codes)
        assert torch.equal(col.codes, want.col_codes.t())
        assert torch.equal(col.scales, want.col_scales.t())


@pytest.mark.parametrize("spread", [8, 2, 0])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_and_separate_packing_give_the_described_bytes(shape, kind, fmt, spread):
    x = calls.data(*shape, kind)
    rows, cols = shape
    parts = plain(x, fmt)
    want_row = layout.pack(parts.row_codes, parts.row_scales, fmt, spread)
    want_col = layout.pack(parts.col_codes, parts.col_scales, fmt, spread)
    row, col, _ = calls.quantize(x, fmt, spread=spread)
    assert_packed(row, want_row, cols)
    assert_packed(col, want_col, rows)
    assert_packed(calls.pack(parts.row_codes, parts.row_scales, fmt, spread), want_row, cols)
    codes, scales = parts.col_codes.t().contiguous(), parts.col_scales.t().contiguous()
    assert_packed(calls.pack(codes, scales, fmt, spread, k_first=True), want_col, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("kind", [*KINDS, "channels", "student"])
def test_packing_while_quantizing_any_input(kind, rule, fmt, dtype):
    x = calls.data(384, 512, kind, dtype)
    x[:, 300:420] = x[:, 300:420].relu()
    parts = plain(x, fmt, rule)
    row, col, _ = calls.quantize(x, fmt, rule)
    assert_packed(row, layout.pack(parts.row_codes, parts.row_scales, fmt), 512)
    assert_packed(col, layout.pack(parts.col_codes, parts.col_scales, fmt), 384)
    # A direction does not depend on the form of the other one.
    row, col, _ = calls.quantize(x, fmt, rule, col="plain")
    assert_packed(row, layout.pack(parts.row_codes, parts.row_scales, fmt), 512)
    assert torch.equal(col.codes, parts.col_codes)
    _, col, _ = calls.quantize(x, fmt, rule, row=None)
    assert_packed(col, layout.pack(parts.col_codes, parts.col_scales, fmt), 384)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("kind", [*KINDS, "channels", "student"])
def test_few_rows_alone(kind, rule, dtype):
    """Tiles that a cluster has each, or, of more than 176, a CTA."""
    sizes = [(1, 128), (129, 328), (300, 1024)]
    if rule == "rceil":
        sizes.append((2900, 1000))
    for rows, cols in sizes:
        x = calls.data(rows, cols, kind, dtype)
        x[:, cols // 2 : cols // 2 + 40] = x[:, cols // 2 : cols // 2 + 40].relu()
        parts = plain(x, "e4m3", rule)
        row, none, _ = calls.quantize(x, "e4m3", rule, col=None)
        assert none is None
        assert_packed(row, layout.pack(parts.row_codes, parts.row_scales, "e4m3"), cols)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("span", [(0, 256), (100, 108), (120, 140), (253, 256)])
def test_packing_takes_any_bytes(fmt, span):
    g = torch.Generator("cuda").manual_seed(span[0])
    codes = torch.randint(0, 256, (130, 77), generator=g, device="cuda").to(torch.uint8)
    codes[torch.rand(130, 77, generator=g, device="cuda") < 0.98] &= 0xB8
    scales = torch.randint(*span, (130, 3), generator=g, device="cuda").to(torch.uint8)
    want = layout.pack(codes, scales, fmt)
    assert_packed(calls.pack(codes, scales, fmt), want, 77)
    codes, scales = codes.t().contiguous(), scales.t().contiguous()
    assert_packed(calls.pack(codes, scales, fmt, k_first=True), want, 77)


def test_strided_rows_and_single_directions():
    x = calls.data(200, 512, "gaussian")[:, :300]
    parts = plain(x, "e4m3")
    row, none, _ = calls.quantize(x, col=None)
    assert none is None
    assert_packed(row, layout.pack(parts.row_codes, parts.row_scales, "e4m3"), 300)
    _, col, _ = calls.quantize(x, row=None)
    assert_packed(col, layout.pack(parts.col_codes, parts.col_scales, "e4m3"), 200)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        *itertools.product(
            ("mxfp8_e4m3", "mxfp8_e5m2"), (torch.bfloat16, torch.float32, torch.float16)
        ),
        ("mxfp4", torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gaussian", "mixed", "nan"])
@pytest.mark.parametrize("rows", [(128, 256, 77), (384, 128), (128, 128, 128, 130), (50,)], ids=str)
def test_matrices_that_lie_apart_are_one(fmt, rows, kind, dtype):
    cols = 200 if rows[0] == 128 else 257  # whole vectors, and none
    parts = [calls.data(n, cols + 8, kind, dtype)[:, :cols] for n in rows]
    specs = [f"{fmt}@sm90:8"] * 2
    for row, col in (specs, (specs[0], ""), ("", specs[0])):
        want = ops.quantize_2d(torch.cat(parts), row, col)
        rows, x = sum(map(len, parts)), parts[0]
        sizes = rows, x.shape[1], 1
        got = registry.planned("quantize", x.device, row, col, sizes, x.dtype)[1].joined(parts)
        assert all(map(torch.equal, parts_of(got), parts_of(want)))


@pytest.mark.parametrize("shape", [(300, 200), (4096, 256)])
def test_column_sums(shape):
    x = calls.data(*shape, "rows")
    _, _, first = calls.quantize(x, col_sum=torch.float32)
    _, _, second = calls.quantize(x, row=None, col_sum=torch.float32)
    bound = shape[0] * 2.0**-24 * x.double().abs().sum(0)
    assert ((first.double() - x.double().sum(0)).abs() <= bound).all()
    assert torch.equal(first, second)
    for dtype in (torch.bfloat16, torch.float16):
        _, _, rounded = calls.quantize(x, col_sum=dtype)
        assert torch.equal(rounded, first.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(64, 96), (33, 70), (7, 8), (131, 1304)])
@pytest.mark.parametrize("order", ["k_last", "k_first"])
def test_dequantize(shape, fmt, dtype, order):
    x = calls.data(*shape, "rows", torch.float32)
    x[shape[0] // 2, 5] = float("nan")
    parts = reference.quantize(x, fmt, True, "plain", "rceil", False)
    codes, scales = parts[:2] if order == "k_last" else parts[2:4]
    out = calls.dequantize(codes, scales, fmt, dtype, order)
    want = reference.dequantize(codes, scales, fmt, order, dtype)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(64, 96), (33, 70), (3, 5000), (1000, 7)])
@pytest.mark.parametrize("k_first", [False, True])
def test_row_sums(shape, fmt, k_first):
    x = calls.data(*shape, "rows", torch.float32)
    parts = plain(x, fmt)
    codes, scales = parts.row_codes, parts.row_scales
    values = reference.dequantize(codes, scales, fmt, "k_last", torch.float32).double()
    if k_first:
        codes, scales = codes.t().contiguous(), scales.t().contiguous()
    got = calls.row_sums(codes, scales, fmt, k_first)
    bound = shape[1] * 2.0**-24 * values.abs().sum(1)
    assert ((got.double() - values.sum(1)).abs() <= bound).all()
    assert torch.equal(got, calls.row_sums(codes, scales, fmt, k_first))
    scales.view(-1)[0] = 255
    got = calls.row_sums(codes, scales, fmt, k_first)
    assert got[0].isnan() and got[1:].isfinite().all()


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    rows, cols = 70000, 32768
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    row, col, _ = calls.quantize(x, col="as_x", row="plain")
    sample = torch.tensor([0, 31, 32768, 65535, 65536, 69999], device="cuda")
    want = plain(x[sample], "e4m3")
    assert torch.equal(row.codes[sample], want.row_codes)
    assert torch.equal(row.scales[sample], want.row_scales)
    last = reference.quantize(x[69984:], "e4m3", False, "plain", "rceil", False)
    assert torch.equal(col.codes[69984:], last.col_codes)
    assert torch.equal(col.scales[-1:], last.col_scales)
    back = calls.dequantize(row.codes, row.scales, "e4m3", torch.bfloat16)[sample]
    want_back = reference.dequantize(
        want.row_codes, want.row_scales, "e4m3", "k_last", torch.bfloat16
    )
    assert torch.equal(back, want_back)
    packed = calls.pack(row.codes, row.scales, "e4m3")
    fused, _, _ = calls.quantize(x, col=None)
    assert torch.equal(packed.codes, fused.codes)
    assert torch.equal(packed.scales, fused.scales)
    tile = slice(69888, rows)
    want_tile = plain(x[tile], "e4m3")
    want_packed = layout.pack(want_tile.row_codes, want_tile.row_scales, "e4m3")
    assert torch.equal(packed.codes[tile], want_packed.codes)
