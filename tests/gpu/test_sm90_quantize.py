"""Quantize, pack and dequantize on Hopper against plain torch, byte for byte."""

from __future__ import annotations

import pytest
import sm90_calls as calls
import torch

from te_mx.backends import reference
from te_mx.backends import sm90_layout as layout

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


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("span", [(0, 256), (100, 108), (120, 140), (253, 256)])
def test_packing_takes_any_bytes(fmt, span):
    g = torch.Generator("cuda").manual_seed(span[0])
    codes = torch.randint(0, 256, (130, 77), generator=g, device="cuda").to(torch.uint8)
    codes[torch.rand(130, 77, generator=g, device="cuda") < 0.98] &= 0xB8
    scales = torch.randint(*span, (130, 3), generator=g, device="cuda").to(torch.uint8)
    assert_packed(calls.pack(codes, scales, fmt), layout.pack(codes, scales, fmt), 77)


def test_strided_rows_and_single_directions():
    x = calls.data(200, 512, "gaussian")[:, :300]
    parts = plain(x, "e4m3")
    row, none, _ = calls.quantize(x, col=None)
    assert none is None
    assert_packed(row, layout.pack(parts.row_codes, parts.row_scales, "e4m3"), 300)
    _, col, _ = calls.quantize(x, row=None)
    assert_packed(col, layout.pack(parts.col_codes, parts.col_scales, "e4m3"), 200)


@pytest.mark.parametrize("shape", [(300, 200), (4096, 256)])
def test_column_sums(shape):
    x = calls.data(*shape, "rows")
    _, _, first = calls.quantize(x, col_sum=True)
    _, _, second = calls.quantize(x, row=None, col_sum=True)
    bound = shape[0] * 2.0**-24 * x.double().abs().sum(0)
    assert ((first.double() - x.double().sum(0)).abs() <= bound).all()
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(64, 96), (33, 70)])
@pytest.mark.parametrize("order", ["k_last", "k_first"])
def test_dequantize(shape, fmt, dtype, order):
    x = calls.data(*shape, "rows", torch.float32)
    parts = reference.quantize(x, fmt, True, "plain", "rceil", False)
    codes, scales = parts[:2] if order == "k_last" else parts[2:4]
    out = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    status = calls.native().dequantize(
        codes.data_ptr(),
        scales.data_ptr(),
        *shape,
        order == "k_first",
        calls.FORMATS[fmt],
        calls.DTYPES[dtype],
        out.data_ptr(),
        calls.stream(),
    )
    assert status == 0
    assert torch.equal(out, reference.dequantize(codes, scales, fmt, order, dtype))
