"""The numbers of te_mx.inspect against fp64 arithmetic that is not te_mx's."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch

from te_mx import formats
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.formats import Format, Scaling
from te_mx.inspection import collect
from te_mx.inspection.collect import Sums, measure

DTYPES = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
}
E4M3, MXFP4 = formats.get("mxfp8_e4m3"), formats.get("mxfp4")


def oracle(x: torch.Tensor, dtype: type, rule: str) -> dict[str, float]:
    """Block by block in fp64 numpy."""
    info = ml_dtypes.finfo(dtype)
    largest, smallest = float(info.max), float(info.smallest_normal)
    found = {"signal": 0.0, "noise": 0.0, "saturated": 0, "subnormal": 0, "zeroed": 0}
    exponents = []
    for row in x.double().numpy():
        for start in range(0, len(row), 32):
            block = row[start : start + 32]
            amax = np.abs(block).max()
            if amax == 0:
                continue
            if rule == "rceil":
                e = math.ceil(math.log2(amax / largest))
            else:
                e = math.floor(math.log2(amax)) - math.floor(math.log2(largest))
            scaled = block / 2.0**e
            code = scaled.clip(-largest, largest).astype(dtype).astype(np.float64)
            found["signal"] += (block**2).sum()
            found["noise"] += ((block - code * 2.0**e) ** 2).sum()
            found["saturated"] += (np.abs(scaled) > largest).sum()
            found["subnormal"] += ((code != 0) & (np.abs(code) < smallest)).sum()
            found["zeroed"] += ((block != 0) & (code == 0)).sum()
            exponents.append(e)
    found["exponents"] = sorted(exponents)
    return found


def wild(rows: int, k: int) -> torch.Tensor:
    """Outlier columns, rows of all sizes, zeros."""
    gen = torch.Generator().manual_seed(rows * k)
    x = torch.randn(rows, k, generator=gen)
    x[:, ::37] *= 300
    x *= 2.0 ** torch.randint(-40, 20, (rows, 1), generator=gen)
    x[torch.rand(rows, k, generator=gen) < 0.1] = 0
    x[rows // 2] = 0
    return x


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("rule", ["rceil", "floor"])
# Tails of blocks and of stripes; tiny values, whose squares fp32 does not hold.
@pytest.mark.parametrize(("rows", "k", "by"), [(130, 70, 1.0), (3, 1, 1.0), (5, 64, 2.0**-70)])
def test_sums_are_those_of_the_oracle(name, rule, rows, k, by):
    x = wild(rows, k) * by
    (sums,) = measure(x, {formats.get(name): rule}, 8, None)
    expected = oracle(x, DTYPES[name], rule)
    for counted in ("saturated", "subnormal", "zeroed"):
        assert getattr(sums, counted) == expected[counted]
    assert sums.signal == pytest.approx(expected["signal"], rel=1e-5)
    assert sums.noise == pytest.approx(expected["noise"], rel=1e-5)
    assert sorted(sums.exponents.elements()) == expected["exponents"]
    assert (
        sums.exponent(0.5) == expected["exponents"][math.ceil(sum(sums.exponents.values()) / 2) - 1]
    )
    assert (sums.elements, sums.nonfinite, sums.lost) == (x.numel(), 0, 0)


def test_what_is_not_finite_is_counted_and_left_out():
    x = torch.ones(4, 64)
    x[0, 3], x[1, 40], x[1, 41] = math.nan, math.inf, -math.inf
    of_block = {(1, 32): 31 + 30, (1, 128): 63 + 62, (128, 1): 9, (128, 128): 4 * 64 - 3}
    for fmt in map(formats.get, formats.names()):
        (sums,) = measure(x, {fmt: fmt.scaling.rules[0]}, 8, None)
        lost = of_block[fmt.scaling.block]
        assert (sums.nonfinite, sums.lost) == (3, lost)
        assert (sums.signal, sums.noise, sums.zeroed) == (4 * 64 - 3 - lost, 0, 0)


def test_a_tensor_scale_is_that_of_all_stripes(monkeypatch):
    x = torch.randn(300, 70) * torch.logspace(-3, 2, 300)[:, None]
    x[5, 7] = math.inf
    for name in ("nvfp4", "nvfp4_16x16", "nvfp4_rows"):
        fmt = formats.get(name)
        codes, scales, whole = fmt.quantize(x, "te")
        values = fmt.dequantize(codes, scales, 70, torch.float32) * whole
        known = values.isfinite() & x.isfinite()
        (sums,) = measure(x, {fmt: "te"}, 8, None)
        noise = torch.where(known, values - x, 0).square().sum()
        assert sums.noise == pytest.approx(float(noise), rel=1e-5)
        assert sums.nonfinite == 1 and -24 < sums.exponent(0.5) < 4


def test_zeros_and_exact_values():
    zero, exact, empty = (
        measure(x, {MXFP4: "rceil"}, 8, None)[0]
        for x in (torch.zeros(3, 40), torch.full((3, 40), 1.5), torch.zeros(0, 40))
    )
    assert zero.sqnr is None and not zero.exponents and zero.exponent(0.5) is None
    assert exact.sqnr == math.inf
    assert empty == Sums() and empty.share(0) == 0


@dataclass(frozen=True, eq=False)
class Fp32Scales(Format):
    """A format to come: blocks of any shape, scale amax / max in fp32."""

    def _grid(self, x, k):
        height, width = self.scaling.block
        rows = -(-len(x) // height) * height
        whole = torch.zeros(rows, self.blocks(k) * width)
        whole[: len(x), :k] = x
        return whole.view(rows // height, height, self.blocks(k), width)

    def quantize(self, x, rule):
        grid = self._grid(x, x.shape[1])
        scales = grid.abs().amax((1, 3)) / self.element.max
        codes = (grid / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes.flatten(2).flatten(0, 1)[: len(x), : x.shape[1]].contiguous(), scales

    def dequantize(self, codes, scales, k, dtype):
        grid = self._grid(codes.view(torch.float8_e4m3fn).float(), k)
        values = grid * scales[:, None, :, None]
        return values.flatten(2).flatten(0, 1)[: len(codes), :k].to(dtype)


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_a_format_with_fp32_scales_needs_nothing_but_its_object(block):
    fmt = Fp32Scales("later", E4M3.element, Scaling(block, "fp32", ("fp32",)))
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 3e-4
    (sums,) = measure(x, {fmt: "fp32"}, 8, None)
    q = fmt.dequantize(*fmt.quantize(x, "fp32"), 300, torch.float64)
    noise = (x.double() - q).square().sum()
    assert sums.sqnr == pytest.approx(float(10 * torch.log10(x.double().square().sum() / noise)))
    # Every block has an element that its rounded scale may put a hair above max: none is clamped.
    assert sums.saturated == 0 and sums.tiles is None
    scales = fmt.quantize(x, "fp32")[1]
    assert sums.exponents.total() == scales.numel() == (600 if block[0] == 1 else 6)
    assert sums.exponent(0) == math.floor(math.log2(scales.min()))
    assert sums.exponent(1) == math.floor(math.log2(scales.max()))


@pytest.mark.parametrize("spread", [0, 8])
def test_tile_classes_are_those_of_the_packed_layout(spread):
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(0))
    x[:128] *= 2.0 ** torch.randint(-20, 20, (128, 1), generator=torch.Generator().manual_seed(1))
    x[128:256, :128:33] *= 1e6
    (sums,) = measure(x, {E4M3: "rceil"}, spread, None)
    packed = sm90_tiles.pack(*E4M3.quantize(x, "rceil"), E4M3.name, spread)
    counts = torch.bincount(sm90_tiles.classes(packed).flatten().int(), minlength=4).tolist()
    assert sums.tiles == counts and sum(counts) == 12 and counts[0] < 12


def test_pieces_add_up(monkeypatch):
    x = wild(700, 96)
    how = {E4M3: "rceil", MXFP4: "floor"}
    whole = measure(x, how, 8, None)
    monkeypatch.setattr(collect, "CHUNK", 1)
    for one, many in zip(whole, measure(x, how, 8, None), strict=True):
        assert many.sqnr == pytest.approx(one.sqnr, abs=1e-4)
        one.signal = one.noise = many.signal = many.noise = 0
        assert one == many


@pytest.mark.parametrize("rows", [1, 128, 1000, 5000])
@pytest.mark.parametrize("most", [None, 1, 128 * 64 * 3, 10**9])
def test_stripes_are_whole_and_lie_evenly(rows, most):
    read = list(collect.stripes(rows, 64, most))
    assert all(start % 128 == 0 and start < end <= rows for start, end in read)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(read))
    total = sum(end - start for start, end in read)
    if most is None or rows * 64 <= most:
        assert total == rows
    else:
        assert min(rows, 128) * 0.5 < total <= max(128, most // 64)
        middle = sum(start + end for start, end in read) / (2 * len(read))
        assert abs(middle - rows / 2) <= 128
