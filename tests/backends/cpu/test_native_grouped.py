"""The grouped native calls at every level against one call a group, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gemm_calls import LEVEL_KERNELS, random_side
from grouped_cases import COUNTS, equal
from hypothesis import given, settings
from hypothesis import strategies as st
from native_words import house
from strategies import DTYPES, FORMATS, KINDS, RULES, SEEDS, tensor

from te_mx._ops import Epilogue, Mode, Operand, Stack, gemm_2d, quantize_2d
from te_mx._ops.grouped_gemm import gemm_k, gemm_rows, kept_stack
from te_mx._ops.grouped_quantize import quantize_grouped, quantize_weights, weight_columns
from te_mx._ops.quantize import parts_of
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu import grouped as cpu_grouped
from te_mx.backends.cpu.grouped import few_and_many
from te_mx.dispatch.calls import Groups, QuantizeGroups
from te_mx.dispatch.groups import Bounds, host_bounds
from te_mx.runtime import workspace

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")
SIZES = st.sampled_from([1, 2, 15, 17, 32, 33, 64, 65, 97])
ROWS, COLS = "mxfp8_e4m3@rows", "mxfp8_e4m3@cols"


@st.composite
def groups(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """(offs, capacity, rows): contiguous groups or groups of a capacity, rows behind the last."""
    counts = draw(st.lists(COUNTS, min_size=1, max_size=5))
    behind = draw(st.sampled_from([0, 1, 37]))
    if draw(st.booleans()):
        return torch.tensor(counts).cumsum(0), 0, sum(counts) + behind
    capacity = max(*counts, 1) + draw(st.sampled_from([0, 1, 31]))
    starts = torch.arange(len(counts)) * capacity
    return starts + torch.tensor(counts), capacity, len(counts) * capacity + behind


@given(groups=groups(), cols=SIZES, dtype=DTYPES, fmt=FORMATS, rule=RULES, data=st.data())
@settings(max_examples=15)
def test_quantize(
    level: str, groups: tuple, cols: int, dtype: torch.dtype, fmt: str, rule: str,
    data: st.DataObject,
) -> None:  # fmt: skip
    offs, capacity, rows = groups
    x = tensor(data.draw(st.sampled_from(KINDS)), rows, cols, data.draw(SEEDS), dtype)
    if data.draw(st.booleans()):
        x = x.t().contiguous().t()
    row, col, each = (f"mxfp8_{fmt}@{layout}" for layout in ("rows", "grouped_cols", "cols"))
    made = parts_of(quantize_grouped(x, Groups(offs, capacity), row, col, rule=rule, col_sum=True))
    expected = [torch.zeros_like(part) for part in made]
    for i, (start, end) in enumerate(zip(*host_bounds(offs, capacity, rows), strict=True)):
        one = parts_of(quantize_2d(x[start:end], row, each, rule=rule, col_sum=True))
        first = start // 32 + i
        for out, part, at in zip(expected[:4], one[:4], (start, start, start, first), strict=True):
            out[at : at + len(part)] = part
        expected[4][i] = one[4]
    for got, wanted in zip(made, expected, strict=True):
        equal(got, wanted)


def stacked(sides: list[Operand]) -> Stack:
    """The operands of all groups, one behind the other."""
    codes, scales = torch.stack([s.codes for s in sides]), torch.stack([s.scales for s in sides])
    return Stack(codes, scales, sides[0].spec, len(sides), sides[0].rows, sides[0].k)


@given(groups=groups(), m=SIZES, k=SIZES, fmts=st.tuples(FORMATS, FORMATS), data=st.data())
@settings(max_examples=15)
def test_groups_of_rows(
    level: str, groups: tuple, m: int, k: int, fmts: tuple, data: st.DataObject
) -> None:
    offs, capacity, rows = groups
    rng = np.random.default_rng(data.draw(SEEDS))
    wide = data.draw(st.booleans())  # scales of a row too far apart for one exponent
    low, high = (1, 240) if wide else (112, 142)
    tokens = house(random_side(rng, rows, k, fmts[0], low, high).operand())
    order = data.draw(st.sampled_from(["k_last", "k_first"]))
    sides = [house(random_side(rng, m, k, fmts[1], low, high).operand(order)) for _ in offs]
    weights = stacked(sides)
    bias = torch.randn(len(offs), m).to(data.draw(DTYPES)) if data.draw(st.booleans()) else None
    dtype = data.draw(DTYPES)
    expected = torch.zeros(rows, m, dtype=dtype)
    for i, (start, end) in enumerate(zip(*host_bounds(offs, capacity, rows), strict=True)):
        if end > start:
            expected[start:end] = gemm_2d(
                tokens.group(start, end), weights.group(i),
                Epilogue(bias=None if bias is None else bias[i]), out_dtype=dtype,
            ).out  # fmt: skip
    for held in (weights, kept_stack(weights, Mode())):
        with workspace.guarded():
            made = gemm_rows(tokens, held, Groups(offs, capacity), bias=bias, out_dtype=dtype)
            equal(made, expected)


@given(groups=groups(), m=SIZES, n=SIZES, dtype=DTYPES, seed=SEEDS, add=st.booleans())
@settings(max_examples=15)
def test_groups_of_k(
    level: str, groups: tuple, m: int, n: int, dtype: torch.dtype, seed: int, add: bool
) -> None:
    offs, capacity, rows = groups
    sides = []
    for i, cols in enumerate((m, n)):
        x = tensor("outliers", rows, cols, seed + i, torch.float32)
        fmt = ("e4m3", "e5m2")[i]
        spec = f"mxfp8_{fmt}@grouped_cols"
        sides.append(quantize_grouped(x, Groups(offs, capacity), "", spec, rule="rceil").col)
    a, b = sides
    start_value = torch.randn(len(offs), n, m).to(dtype)
    expected = start_value.clone()
    for i, (start, end) in enumerate(zip(*host_bounds(offs, capacity, rows), strict=True)):
        gemm_2d(
            b.group(start, end, i), a.group(start, end, i), Epilogue(accumulate=add),
            out=expected[i], out_dtype=dtype,
        )  # fmt: skip
    out = start_value.clone()
    version = out._version
    with workspace.guarded():
        made = gemm_k(b, a, Groups(offs, capacity), out=out, out_dtype=dtype, accumulate=add)
    assert made is out and out._version > version
    equal(out, expected)


@given(
    rows=SIZES, cols=SIZES, count=st.integers(1, 5), dtype=DTYPES, seed=SEEDS,
    sides=st.sampled_from([(ROWS, ""), (ROWS, COLS), ("", COLS)]),
)  # fmt: skip
@settings(max_examples=10)
def test_weights(
    level: str, rows: int, cols: int, count: int, dtype: torch.dtype, seed: int,
    sides: tuple[str, str],
) -> None:  # fmt: skip
    weights = [tensor("row_scales", rows, cols, seed + i, dtype) for i in range(count)]
    if sides[0]:
        row, col = quantize_weights(weights, *sides, rule="rceil")
    else:
        row, col = None, weight_columns(weights, COLS, rule="rceil")
    assert (row is not None, col is not None) == tuple(map(bool, sides))
    for i, weight in enumerate(weights):
        one = quantize_2d(weight, ROWS, COLS)
        for held, alone in ((row, one.row), (col, one.col)):
            if held is not None:
                assert held.group(i)[2:] == alone[2:]
                equal(held.codes[i], alone.codes)
                equal(held.scales[i], alone.scales)


def test_packed_weights_of_another_kernel_are_not_read(level: str) -> None:
    weights = [torch.randn(64, 96) for _ in range(3)]
    row, _ = quantize_weights(weights, ROWS, rule="rceil")
    packed = kept_stack(row, Mode())
    assert packed.packed is not None
    of = Groups(torch.tensor([40, 40, 100]))
    tokens = quantize_grouped(torch.randn(100, 96), of, ROWS, rule="rceil").row
    expected = gemm_rows(tokens, row, of, out_dtype=torch.float32)
    equal(gemm_rows(tokens, packed, of, out_dtype=torch.float32), expected)
    form = int(packed.packed[8]), row
    assert cpu_grouped._packed_for(packed.packed, *form) != (0, 0)
    assert cpu_grouped._packed_for(packed.packed[:-64], *form) == (0, 0)  # the rest would be read
    scrambled = packed.packed.clone()
    scrambled[8] ^= 1  # the kernel in the header
    other = packed._replace(packed=scrambled, codes=packed.codes.clone())
    equal(gemm_rows(tokens, other, of, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("bounds", [([0, 5], [5, 4]), ([0, 3], [5, 9]), ([0, 5], [5, 11])])
def test_native_code_refuses_bounds_that_overlap_or_leave(bounds: tuple) -> None:
    with pytest.raises(RuntimeError, match="refused its arguments"):
        what = QuantizeGroups(torch.ones(10, 4), Groups(torch.tensor([5, 10])), ROWS, COLS, "rceil")
        cpu_grouped.quantize(what, Bounds(*map(list, bounds)))


def test_too_small_a_workspace_is_refused() -> None:
    row, _ = quantize_weights([torch.randn(64, 96) for _ in range(2)], ROWS, rule="rceil")
    tokens = quantize_2d(torch.randn(80, 96), ROWS).row
    call = cpu_grouped.GroupedGemmCall(
        few_and_many(), tokens, row, Bounds([0, 40], [40, 80]), torch.empty(80, 64)
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="workspace too small"):
        call.run(torch.empty(64, dtype=torch.uint8), 64)


def test_many_groups_on_many_threads(threads, level: str) -> None:
    """More groups than members and more members than groups; the bits stay."""
    rng = np.random.default_rng(0)
    weights = stacked([house(random_side(rng, 130, 257, "e4m3").operand()) for _ in range(40)])
    counts = torch.from_numpy(rng.integers(0, 90, 40))
    of = Groups(counts.cumsum(0))
    tokens = house(random_side(rng, int(of.offs[-1]), 257, "e4m3").operand())
    threads(1)
    expected = gemm_rows(tokens, weights, of, out_dtype=torch.float32)
    for count in (2, 3, 7):
        threads(count)
        for _ in range(3):
            equal(gemm_rows(tokens, weights, of, out_dtype=torch.float32), expected)
    one, some = stacked([weights.group(0)]), tokens.group(0, 64)
    alone = gemm_rows(some, one, Groups(torch.tensor([64])), out_dtype=torch.float32)
    equal(alone, gemm_2d(some, weights.group(0), out_dtype=torch.float32).out)


def test_every_level_has_kernels_for_many_and_few_rows(level: str) -> None:
    many, few = few_and_many()
    assert {many, few} <= {*LEVEL_KERNELS[level]}
    assert "stream" in few and "stream" not in many
