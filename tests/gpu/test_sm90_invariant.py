"""precision="invariant" on Hopper: rows keep their bits at any number of rows; tiles have the bytes
of the specification; errors are within the bound of docs/invariance.md."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import te_mx
from te_mx import _ops as ops
from te_mx.backends.sm90.layouts import tiles
from te_mx.recipe import Float8BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling

RECIPES = {
    "mxfp8": MXFP8BlockScaling(precision="invariant"),
    "mxfp4": MXFP4BlockScaling(precision="invariant"),
    "fp8": Float8BlockScaling(precision="invariant"),
    "fp8 fp32": Float8BlockScaling(precision="invariant", use_f32_scales=True),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def tokens(rows: int, k: int) -> Tensor:
    """Rows that differ: outlier channels, rows of other sizes, zeros, a range no tile aligns."""
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    x[:, ::41] *= 60
    x[1::7] *= 2.0**9
    x[2::11, : k // 2] *= 2.0**-14
    x[3::13] = 0
    x[4::17, 1] = torch.nan
    return x


def same(part: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(part, whole, rtol=0, atol=0, equal_nan=True)


@recipes
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(300, 200, 320), (4096, 1024, 1024), (777, 2304, 512)]
)
def test_rows_keep_their_bits(recipe, rows, n, k):
    layer, x = te_mx.Linear(k, n, params_dtype=torch.bfloat16, device="cuda"), tokens(rows, k)
    layer.weight.data[:, ::37] *= 100  # tiles of which one that stands still would lose much
    with te_mx.autocast(recipe=recipe):
        whole = layer(x)
        with torch.no_grad():
            for m in (1, 2, 17, 64, 65, 129, 192, 257, 300):
                same(layer(x[-m:].contiguous()), whole[-m:])
    for drop in (False, True):
        te_mx.freeze_weights(layer, drop_master=drop, recipe=recipe)
        with te_mx.autocast(recipe=recipe), torch.no_grad():
            for m in (1, 16, 33, 100, 300):
                same(layer(x[-m:].contiguous()), whole[-m:])


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4"])
@pytest.mark.parametrize(("rows", "k"), [(300, 320), (128, 96), (40, 1000)])
def test_tiles_have_the_bytes_of_the_specification(fmt, rows, k):
    row = ops.quantize_2d(tokens(rows, k), f"{fmt}@rows").row
    assert row is not None
    made = ops.convert_2d(row, f"{fmt}@sm90:{tiles.BY_ROWS}")
    codes = row.format.unpack(row.codes, k)
    spec = tiles.pack(codes, row.scales, fmt, tiles.BY_ROWS)
    same(made.scales, spec.scales)
    assert torch.equal(made.codes[:, :k], spec.codes[:, :k])


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4"])
@pytest.mark.parametrize(("rows", "k"), [(300, 320), (129, 97), (40, 1000)])
def test_plain_rows_and_packed_columns_come_of_one_read(fmt, rows, k):
    x, (row, col) = tokens(rows, k), (f"{fmt}@rows", f"{fmt}@sm90:8")
    made = ops.quantize_2d(x, row, col, col_sum=True)
    alone = ops.quantize_2d(x, row).row, ops.quantize_2d(x, col=col).col
    for one, other in zip(made[:2], alone, strict=True):
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
    same(made.col_sum, ops.quantize_2d(x, row, col_sum=True).col_sum)


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4"])
def test_errors_are_within_the_bound(fmt):
    m, n, k = 130, 136, 640
    x, w = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    x[:, ::41] *= 60
    w[::9] *= 2.0**10
    a, b = (te_mx.quantize(one, fmt) for one in (w, x))
    d = te_mx.gemm(a, b, precision="invariant", out_dtype=torch.float32).out.double()
    left, right = b.dequantize(torch.float64), a.dequantize(torch.float64)
    step = 2.0**-14

    def moved(values: Tensor) -> Tensor:
        return values.abs().unflatten(1, (-1, 128)).amax(2).repeat_interleave(128, 1) * step

    # Of a weight the largest of its tile counts, where it is at most 2^9 above the row's own.
    tile = right.abs().unflatten(1, (-1, 128)).amax(2).repeat_interleave(128, 1) * step * 2**9
    bound = moved(left) @ right.abs().t() + (left.abs() + moved(left)) @ tile.t()
    bound += 2.0**-13 * (left.abs() @ right.abs().t())
    assert bool(((d - left @ right.t()).abs() <= bound).all())
