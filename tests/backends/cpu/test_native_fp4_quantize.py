"""The native quantizer of MXFP4, and of the rule "even" for every MX element, at every level: the
bytes of the formats' specification, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, KINDS, SEEDS, STRIDES, as_strided, tensor
from torch import Tensor

from te_mx import formats
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu import grouped as cpu_grouped
from te_mx.backends.reference import grouped as reference_grouped
from te_mx.backends.reference import quantize as reference
from te_mx.dispatch import run
from te_mx.dispatch.calls import Groups, Quantize, QuantizeGroups, QuantizeWeights
from te_mx.layouts.operand import Operand

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")
# One off around nibbles, blocks, tiles (64, 256) and an item of the column sums (256 rows).
SIZES = st.sampled_from([1, 2, 3, 31, 32, 33, 63, 64, 65, 96, 127, 128, 200, 256, 257, 321])
CASES = [("mxfp4", "rceil"), ("mxfp4", "floor"), ("mxfp4", "even")]
CASES += [("mxfp8_e4m3", "even"), ("mxfp8_e5m2", "even")]
TARGETS = st.sampled_from(
    [("rows", "cols"), ("rows", "rows"), ("rows", ""), ("", "cols"), ("", "rows")]
)


def check(x: Tensor, fmt: str, target: tuple[str, str], rule: str) -> None:
    row, col = (f"{fmt}@{layout}" if layout else "" for layout in target)
    what = Quantize(x, row, col, rule, col_sum=True)
    made, expected = run.quantize(what), reference.quantize(what)
    assert made is not None and made.col_sum is not None
    for mine, theirs in zip(made[:2], expected[:2], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine.scales, theirs.scales)
            assert torch.equal(mine.codes, theirs.codes)
    mx = run.quantize(Quantize(x, "mxfp8_e4m3@rows", "", "rceil", col_sum=True))
    assert mx is not None and mx.col_sum is not None  # in the same order
    assert torch.equal(made.col_sum.nan_to_num(), mx.col_sum.nan_to_num())


@pytest.mark.parametrize(("fmt", "rule"), CASES)
@given(rows=SIZES, cols=SIZES, dtype=DTYPES, target=TARGETS, data=st.data())
@settings(max_examples=12)
def test_bytes(
    isa: str, fmt: str, rule: str, rows: int, cols: int, dtype: torch.dtype,
    target: tuple[str, str], data: st.DataObject,
) -> None:  # fmt: skip
    x = tensor(data.draw(st.sampled_from(KINDS)), rows, cols, data.draw(SEEDS), dtype)
    check(as_strided(x, data.draw(STRIDES)), fmt, target, rule)


@pytest.mark.parametrize(("fmt", "rule"), CASES)
@given(rows=st.integers(250, 600), cols=st.integers(1, 33), dtype=DTYPES, data=st.data())
@settings(max_examples=12)
def test_many_rows_of_few_columns(
    isa: str, fmt: str, rule: str, rows: int, cols: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    x = tensor(data.draw(st.sampled_from(KINDS)), rows, cols, data.draw(SEEDS), dtype)
    row, col = data.draw(TARGETS)
    row, col = (f"{fmt}@{layout}" if layout else "" for layout in (row, col))
    what = Quantize(x, row, col, rule)
    made, expected = run.quantize(what), reference.quantize(what)
    assert made is not None
    for mine, theirs in zip(made[:2], expected[:2], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine.scales, theirs.scales)
            assert torch.equal(mine.codes, theirs.codes)


@pytest.mark.parametrize(("fmt", "rule"), CASES)
def test_limits_of_scales_and_halves_between_codes(isa: str, fmt: str, rule: str) -> None:
    """Around the mantissas where rules go up, from subnormal numbers to the largest; around all
    halves between codes."""
    exponents = torch.tensor([-149.0, -127, -126, -125, -124, -119, -118, -92, -91, 0, 100, 127])
    mantissas = torch.tensor([1, 1.25, 1.5, 1.75, 1.875], dtype=torch.float64)
    edges = (torch.exp2(exponents.double()).unsqueeze(1) * mantissas).flatten().float()
    around = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(-edges)])
    x = torch.zeros(len(around), 96)
    x[:, 5] = around
    x[:, 7], x[:, 40] = -around * 0.6, around * 0.25
    codes = torch.arange(formats.get(fmt).element.max_code + 1, dtype=torch.uint8)
    values = formats.get(fmt).element.decode(codes)
    halves = (values[1:] + values[:-1]) / 2
    below, above = halves.nextafter(-halves), halves.nextafter(2 * halves)
    ties = torch.cat([halves, below, above, -halves, -below, -above])
    blocks = torch.nn.functional.pad(ties, (0, -len(ties) % 31)).reshape(-1, 31)
    largest = torch.full((len(blocks), 1), formats.get(fmt).element.max)
    for target in (("rows", "cols"), ("rows", "rows")):
        check(x, fmt, target, rule)
        check(torch.cat([blocks, largest], 1), fmt, target, rule)


def test_bytes_do_not_depend_on_threads_size_or_denormal_mode(isa: str, threads) -> None:
    """The last matrix is stored past the caches where its codes are whole lines."""
    x = tensor("tiny", 300, 1100, 3, torch.float32)
    x[128:] = tensor("block_scales", 172, 1100, 4, torch.float32)
    for count in (1, 2, 5):
        threads(count)
        torch.set_flush_denormal(count == 2)
        try:
            check(x, "mxfp4", ("rows", "cols"), "rceil")
        finally:
            torch.set_flush_denormal(False)
    large = torch.randn(2048, 2112).bfloat16()
    check(large, "mxfp4", ("rows", "cols"), "even")
    check(large, "mxfp4", ("rows", ""), "floor")


# --------------------------------------------------------------------------------------- dequantize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["rows", "cols"])
def test_every_code_and_scale_comes_back(isa: str, layout: str, dtype: torch.dtype) -> None:
    """All pairs, and rows that end within a block and within a byte."""
    fmt = formats.get("mxfp4")
    for k in (32, 64, 33, 47, 5):
        codes = (torch.arange(256 * k).reshape(256, k) * 7 % 16).to(torch.uint8)
        scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, fmt.blocks(k))
        scales[:, 1:] += 100
        parts = fmt.pack(codes).contiguous(), scales
        if layout == "cols":
            parts = codes.t().contiguous(), scales.t().contiguous()
        held = Operand(*parts, f"mxfp4@{layout}", 256, k)
        made = run.dequantize(held, dtype)
        assert made is not None
        assert torch.equal(made.nan_to_num(7.0), held.values(dtype).nan_to_num(7.0))
        assert torch.equal(made.isnan(), held.values(dtype).isnan())


# ------------------------------------------------------------------------------------------- groups
@given(
    sizes=st.lists(st.sampled_from([0, 1, 31, 32, 33, 100]), min_size=1, max_size=5),
    cols=st.sampled_from([1, 33, 64, 130]), dtype=DTYPES, seed=SEEDS,
    rule=st.sampled_from(["rceil", "floor", "even"]), rest=st.sampled_from([0, 3]),
)  # fmt: skip
@settings(max_examples=10)
def test_groups(isa, sizes, cols, dtype, seed, rule, rest) -> None:
    ends = torch.tensor(sizes).cumsum(0)
    x = tensor("block_scales", max(1, int(ends[-1]) + rest), cols, seed, dtype)
    what = QuantizeGroups(x, Groups(ends), "mxfp4@rows", "mxfp4@grouped_cols", rule, True)
    made = cpu_grouped.CpuQuantizeGroups().run(what)
    expected = reference_grouped.QuantizeGroupsReference().run(what)
    for mine, theirs in zip(made[:2], expected[:2], strict=True):
        assert torch.equal(mine.scales, theirs.scales) and torch.equal(mine.codes, theirs.codes)
        assert mine.spec == theirs.spec and (mine.rows, mine.k) == (theirs.rows, theirs.k)


@pytest.mark.parametrize("shape", [(33, 65), (64, 128), (1, 1)])
def test_weights(isa: str, shape: tuple[int, int]) -> None:
    weights = [tensor("outliers", *shape, seed, torch.bfloat16) for seed in range(3)]
    for row, col in (("mxfp4@rows", "mxfp4@cols"), ("mxfp4@rows", ""), ("", "mxfp4@cols")):
        made = cpu_grouped.CpuQuantizeWeights().run(QuantizeWeights(weights, row, col, "even"))
        for i, weight in enumerate(weights):
            expected = reference.quantize(Quantize(weight, row, col, "even"))
            for stack, one in zip(made, expected[:2], strict=True):
                assert (stack is None) == (one is None)
                if stack is not None:
                    assert torch.equal(stack.codes[i], one.codes)
                    assert torch.equal(stack.scales[i], one.scales)
