"""The native quantizer of fp32 scales at every level: the bytes of the formats' specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, KINDS, SEEDS, STRIDES, as_strided, tensor
from torch import Tensor

from te_mx.backends.cpu import binding as cpu
from te_mx.backends.reference import quantize as reference
from te_mx.dispatch import run
from te_mx.dispatch.calls import Quantize
from te_mx.layouts.operand import Operand

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")
# One off around blocks (128), a tile and half of one, an item of the column sums (256 rows).
SIZES = st.sampled_from([1, 2, 31, 64, 100, 127, 128, 129, 200, 256, 257, 385])
ELEMENTS = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
BLOCKS = ("1x128", "128x128")
UPRIGHT = st.sampled_from(["rows", "cols"])
RULES = st.sampled_from(["pow2", "fp32", "pow2:1e-3", "fp32:1e-3", "fp32:1e-40"])
TARGETS = st.sampled_from(
    [("rows", "cols"), ("rows", "rows"), ("rows", ""), ("", "cols"), ("", "rows")]
)


def assert_same(made: Operand | None, expected: Operand | None) -> None:
    """Codes bit for bit, scales too (one NaN is as good as another)."""
    assert (made is None) == (expected is None)
    if made is None or expected is None:
        return
    assert made.scales.dtype == torch.float32
    assert torch.equal(made.codes, expected.codes)
    torch.testing.assert_close(made.scales, expected.scales, rtol=0, atol=0, equal_nan=True)


def check(x: Tensor, fmt: str, target: tuple[str, str], rule: str) -> None:
    row, col = (f"{fmt}@{layout}" if layout else "" for layout in target)
    what = Quantize(x, row, col, rule, col_sum=True)
    made, expected = run.quantize(what), reference.quantize(what)
    assert made is not None
    assert_same(made.row, expected.row)
    assert_same(made.col, expected.col)
    assert made.col_sum is not None
    finite = torch.isfinite(x.float().abs().sum(0))
    mx = Quantize(x, "mxfp8_e4m3@rows", "", "rceil", col_sum=True)
    sums = run.quantize(mx)
    assert sums is not None and sums.col_sum is not None  # in the same order
    assert torch.equal(made.col_sum[finite], sums.col_sum[finite])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("element", ELEMENTS)
@given(rows=SIZES, cols=SIZES, dtype=DTYPES, rule=RULES, target=TARGETS, data=st.data())
@settings(max_examples=7)
def test_bytes(
    isa: str, element: str, block: str, rows: int, cols: int, dtype: torch.dtype, rule: str,
    target: tuple[str, str], data: st.DataObject,
) -> None:  # fmt: skip
    x = tensor(data.draw(st.sampled_from(KINDS)), rows, cols, data.draw(SEEDS), dtype)
    check(as_strided(x, data.draw(STRIDES)), f"fp8_{element}_{block}", target, rule)


@pytest.mark.parametrize("block", BLOCKS)
def test_limits_of_scales(isa: str, block: str) -> None:
    """Around max * 2^k, where powers of two change, and where factors reach 2^126."""
    exponents = torch.tensor([-149.0, -127, -126, -118, -117, -91, -90, -20, 0, 100, 118])
    edges = torch.exp2(exponents.double()).unsqueeze(1) * torch.tensor([448.0, 57344, 1, 1.75])
    edges = edges.flatten().float()
    around = torch.stack([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(-edges)])
    x = torch.zeros(around.numel() * 128, 128)
    x[::128, 5] = around.flatten().clamp(max=torch.finfo(torch.float32).max)
    x[::128, 7] = -x[::128, 5] * 0.6
    for element in ("e4m3", "e5m2"):
        for rule in ("pow2", "fp32"):
            check(x, f"fp8_{element}_{block}", ("rows", "cols"), rule)


def test_bytes_do_not_depend_on_threads_or_denormal_mode(isa: str, threads) -> None:
    x = tensor("tiny", 300, 1100, 3, torch.float32)
    x[128:] = tensor("block_scales", 172, 1100, 4, torch.float32)
    for count in (1, 2, 5):
        threads(count)
        torch.set_flush_denormal(count == 2)
        try:
            check(x, "fp8_e4m3_1x128", ("rows", "cols"), "pow2")
        finally:
            torch.set_flush_denormal(False)


@pytest.mark.parametrize("epsilon", [1e-39, 1.2e-41])
def test_an_epsilon_that_is_denormal_is_not_flushed(epsilon: float) -> None:
    what = Quantize(torch.zeros(2, 256), "fp8_e4m3_1x128@rows", "", f"fp32:{epsilon}")
    expected = reference.quantize(what).row
    assert expected is not None and (expected.scales != 1).all()
    torch.set_flush_denormal(True)
    try:
        native, plain = run.quantize(what), reference.quantize(what)
    finally:
        torch.set_flush_denormal(False)
    assert native is not None
    assert_same(native.row, expected)
    assert_same(plain.row, expected)


@given(rows=SIZES, cols=SIZES, rule=RULES, row=UPRIGHT, data=st.data())
@settings(max_examples=15)
def test_upright_blocks(rows: int, cols: int, rule: str, row: str, data: st.DataObject) -> None:
    """128 x 1: the bytes of 1 x 128 of the other direction."""
    x = tensor("row_scales", rows, cols, data.draw(SEEDS), torch.bfloat16)
    fmt = f"fp8_{data.draw(st.sampled_from(ELEMENTS))}_128x1"
    check(x, fmt, data.draw(st.sampled_from([(row, "cols"), (row, ""), ("", "cols")])), rule)
