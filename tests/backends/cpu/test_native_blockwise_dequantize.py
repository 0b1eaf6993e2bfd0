"""The native decoder of codes with fp32 scales at every level: the values of the formats'
specification, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_mx import formats
from te_mx.backends.cpu import binding as cpu
from te_mx.dispatch import run
from te_mx.layouts.operand import Operand

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")
ELEMENTS = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
BLOCKS = ("1x128", "128x1", "128x128")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Powers of two whose products are subnormal, overflow fp16 and fp32, and what scales never are.
EXTREMES = torch.tensor([2.0**-149, 2.0**-140, -(2.0**-126), 2.0**-24, -1.0, 1.7, 300.0, 2.0**127])


def every_code(rows: int, k: int) -> Tensor:
    return (torch.arange(rows * k) * 37 % 256).to(torch.uint8).reshape(rows, k)


def scales_for(fmt: str, rows: int, k: int) -> Tensor:
    shape = formats.get(fmt).scales_shape(rows, k)
    scales = torch.randn(shape).exp() * torch.exp2(torch.randint(-20, 20, shape).float())
    flat = scales.flatten()
    special = torch.cat([EXTREMES, torch.tensor([torch.nan, torch.inf, 0.0])])[: flat.numel()]
    flat[: special.numel()] = special
    return flat.reshape(shape)


def check(fmt: str, codes: Tensor, scales: Tensor, layout: str, dtype: torch.dtype) -> None:
    expected = formats.get(fmt).dequantize(codes, scales, codes.shape[1], dtype)
    if layout == "cols":
        codes, scales = codes.t().contiguous(), scales.t().contiguous()
    held = Operand(codes, scales, f"{fmt}@{layout}", *expected.shape)
    got = run.dequantize(held, dtype)
    assert got is not None and got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() & ~got.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_values(isa: str, element: str, block: str) -> None:
    """One off around blocks, and a row of more than an item's columns."""
    fmt = f"fp8_{element}_{block}"
    for rows, k in ((1, 1), (129, 257), (3, 2100)):
        codes, scales = every_code(rows, k), scales_for(fmt, rows, k)
        for layout in ("rows", "cols"):
            for dtype in DTYPES:
                check(fmt, codes, scales, layout, dtype)


@pytest.mark.parametrize("scale", EXTREMES.tolist())
def test_every_code_with_every_kind_of_scale(isa: str, scale: float) -> None:
    for element in ELEMENTS:
        codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
        for dtype in DTYPES:
            check(f"fp8_{element}_1x128", codes, torch.full((1, 2), scale), "rows", dtype)


def test_neither_threads_nor_denormal_mode_change_a_bit(isa: str, threads) -> None:
    codes = every_code(300, 300)
    scales = torch.full((300, 3), 2.0**-130)
    held = Operand(codes, scales, "fp8_e4m3_1x128@rows", 300, 300)
    wanted = formats.get("fp8_e4m3_1x128").dequantize(codes, scales, 300, torch.float32)
    for count in (1, 2, 5):
        threads(count)
        torch.set_flush_denormal(count == 2)
        try:
            got = run.dequantize(held, torch.float32)
        finally:
            torch.set_flush_denormal(False)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_blocks_of_other_sizes_are_refused() -> None:
    native = cpu.native()
    out = torch.zeros(64)
    address = out.data_ptr()
    good = native.DequantizeArgs(
        codes=address, scales=address, rows=2, k=2, out=address, scale_type=1, block_rows=128,
        block_k=128,
    )  # fmt: skip
    assert native.dequantize(good) == 0
    for change in ({"block_k": 32}, {"block_rows": 256}, {"element": 4}, {"layout": 2}):
        assert native.dequantize(good.copy(**change)) == 2, change
    for change in ({"codes": 0}, {"scales": 0}, {"out": 0}, {"rows": -1}, {"out_dtype": 3}):
        assert native.dequantize(good.copy(**change)) == 1, change
