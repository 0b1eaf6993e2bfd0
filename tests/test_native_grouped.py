"""The grouped native calls at every level against one call a group, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gemm_calls import AVAILABLE, LEVEL_KERNELS, at_level, random_side
from grouped_cases import COUNTS, equal
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, FORMATS, KINDS, RULES, SEEDS, tensor

from te_mx.backends import cpu, cpu_grouped
from te_mx.backends.base import Operand
from te_mx.backends.grouped import Bounds, StackedOperand, host_bounds, k_of, rows_of
from te_mx.engine import envelopes, workspace
from te_mx.ops.gemm import gemm_2d
from te_mx.ops.grouped_gemm import gemm_rows, standing_weights
from te_mx.ops.grouped_quantize import quantize_grouped
from te_mx.ops.grouped_run import kernels
from te_mx.ops.grouped_weights import quantize_weights
from te_mx.ops.grouped_wgrad import gemm_k
from te_mx.ops.quantize import quantize_2d

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")
SIZES = st.sampled_from([1, 2, 15, 17, 32, 33, 64, 65, 97])


@pytest.fixture(params=AVAILABLE)
def level(request: pytest.FixtureRequest):
    yield from at_level(request.param, request.param)


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
    made = quantize_grouped(
        x, offs, fmt, rowwise=True, columnwise=True, scale_rule=rule, col_sum=True,
        capacity=capacity,
    )  # fmt: skip
    expected = [torch.zeros_like(part) for part in made]
    for i, (start, end) in enumerate(zip(*host_bounds(offs, capacity, rows), strict=True)):
        one = quantize_2d(
            x[start:end], fmt, rowwise=True, columnwise="plain", scale_rule=rule, col_sum=True
        )
        first = start // 32 + i
        for out, part, at in zip(expected[:4], one[:4], (start, start, start, first), strict=True):
            out[at : at + len(part)] = part
        expected[4][i] = one.col_sum
    for got, wanted in zip(made, expected, strict=True):
        equal(got, wanted)


@given(groups=groups(), m=SIZES, k=SIZES, fmts=st.tuples(FORMATS, FORMATS), data=st.data())
@settings(max_examples=15)
def test_groups_of_rows(
    level: str, groups: tuple, m: int, k: int, fmts: tuple, data: st.DataObject
) -> None:
    offs, capacity, rows = groups
    rng = np.random.default_rng(data.draw(SEEDS))
    wide = data.draw(st.booleans())  # scales of a row too far apart for one exponent
    low, high = (1, 240) if wide else (112, 142)
    tokens = random_side(rng, rows, k, fmts[0], low, high).operand()
    order = data.draw(st.sampled_from(["k_last", "k_first"]))
    sides = [random_side(rng, m, k, fmts[1], low, high).operand(order) for _ in offs]
    weights = StackedOperand(
        torch.stack([s.codes for s in sides]), torch.stack([s.scales for s in sides]), fmts[1],
        order,
    )  # fmt: skip
    bias = torch.randn(len(offs), m).to(data.draw(DTYPES)) if data.draw(st.booleans()) else None
    dtype = data.draw(DTYPES)
    expected = torch.zeros(rows, m, dtype=dtype)
    for i, (start, end) in enumerate(zip(*host_bounds(offs, capacity, rows), strict=True)):
        if end > start:
            expected[start:end] = gemm_2d(
                weights.group(i), rows_of(tokens, start, end),
                bias=None if bias is None else bias[i], out_dtype=dtype,
            ).out  # fmt: skip
    for a in (weights, standing_weights(weights)):
        with workspace.guarded():
            equal(
                gemm_rows(a, tokens, offs, bias=bias, out_dtype=dtype, capacity=capacity), expected
            )


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
        q = quantize_grouped(
            x, offs, fmt, rowwise=False, columnwise=True, scale_rule="rceil", capacity=capacity
        )
        sides.append(Operand(q.col_codes, q.col_scales, fmt, "k_first"))
    a, b = sides
    start_value = torch.randn(len(offs), n, m).to(dtype)
    expected = start_value.clone()
    for i, (start, end) in enumerate(zip(*host_bounds(offs, capacity, rows), strict=True)):
        gemm_2d(
            k_of(a, start, end, i), k_of(b, start, end, i), out=expected[i], out_dtype=dtype,
            accumulate=add,
        )  # fmt: skip
    out = start_value.clone()
    version = out._version
    with workspace.guarded():
        made = gemm_k(a, b, offs, out=out, out_dtype=dtype, accumulate=add, capacity=capacity)
    assert made is out and out._version > version
    equal(out, expected)


@given(
    rows=SIZES, cols=SIZES, count=st.integers(1, 5), dtype=DTYPES, seed=SEEDS, both=st.booleans()
)
@settings(max_examples=10)
def test_weights(
    level: str, rows: int, cols: int, count: int, dtype: torch.dtype, seed: int, both: bool
) -> None:
    weights = [tensor("row_scales", rows, cols, seed + i, dtype) for i in range(count)]
    row, col = quantize_weights(weights, "e4m3", columnwise=both, scale_rule="rceil")
    assert (col is not None) == both
    for i, weight in enumerate(weights):
        one = quantize_2d(weight, "e4m3", rowwise=True, columnwise="plain", scale_rule="rceil")
        equal(row.codes[i], one.row_codes)
        equal(row.scales[i], one.row_scales)
        if col is not None:
            equal(col.codes[i], one.col_codes)
            equal(col.scales[i], one.col_scales)


def test_packed_weights_of_another_kernel_are_not_read(level: str) -> None:
    weights = [torch.randn(64, 96) for _ in range(3)]
    row, _ = quantize_weights(weights, "e4m3", columnwise=False, scale_rule="rceil")
    packed = standing_weights(row)
    assert packed.packed is not None
    offs = torch.tensor([40, 40, 100])
    x = torch.randn(100, 96)
    q = quantize_grouped(x, offs, "e4m3", rowwise=True, columnwise=False, scale_rule="rceil")
    tokens = Operand(q.row_codes, q.row_scales, "e4m3", "k_last")
    expected = gemm_rows(row, tokens, offs, out_dtype=torch.float32)
    equal(gemm_rows(packed, tokens, offs, out_dtype=torch.float32), expected)
    scrambled = packed.packed.clone()
    scrambled[8] ^= 1  # the kernel in the header
    other = packed._replace(packed=scrambled, codes=packed.codes.clone())
    equal(gemm_rows(other, tokens, offs, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("bounds", [([0, 5], [5, 4]), ([0, 3], [5, 9]), ([0, 5], [5, 11])])
def test_native_code_refuses_bounds_that_overlap_or_leave(bounds: tuple) -> None:
    with pytest.raises(RuntimeError, match="refused its arguments"):
        cpu_grouped.quantize(
            torch.ones(10, 4), Bounds(*map(list, bounds)), "e4m3", True, True, "rceil", False
        )


def test_too_small_a_workspace_is_refused() -> None:
    weights = [torch.randn(64, 96) for _ in range(2)]
    row, _ = quantize_weights(weights, "e4m3", columnwise=False, scale_rule="rceil")
    q = quantize_2d(torch.randn(80, 96), "e4m3", rowwise=True, columnwise=None, scale_rule="rceil")
    tokens = Operand(q.row_codes, q.row_scales, "e4m3", "k_last")
    call = cpu_grouped.GroupedGemmCall(
        kernels(64, 96), row, tokens, Bounds([0, 40], [40, 80]), torch.empty(80, 64)
    )
    with pytest.raises(RuntimeError, match="workspace too small"):
        call.run(torch.empty(64, dtype=torch.uint8), 64)


def test_many_groups_on_many_threads(threads, level: str) -> None:
    """More groups than members and more members than groups; the bits stay."""
    rng = np.random.default_rng(0)
    sides = [random_side(rng, 130, 257, "e4m3").operand() for _ in range(40)]
    counts = torch.from_numpy(rng.integers(0, 90, 40))
    offs = counts.cumsum(0)
    tokens = random_side(rng, int(offs[-1]), 257, "e4m3").operand()
    weights = StackedOperand(
        torch.stack([s.codes for s in sides]), torch.stack([s.scales for s in sides]), "e4m3",
        "k_last",
    )  # fmt: skip
    threads(1)
    expected = gemm_rows(weights, tokens, offs, out_dtype=torch.float32)
    for count in (2, 3, 7):
        threads(count)
        for _ in range(3):
            equal(gemm_rows(weights, tokens, offs, out_dtype=torch.float32), expected)
    few = StackedOperand(weights.codes[:1], weights.scales[:1], "e4m3", "k_last")
    alone = gemm_rows(few, rows_of(tokens, 0, 64), torch.tensor([64]), out_dtype=torch.float32)
    equal(alone, gemm_2d(few.group(0), rows_of(tokens, 0, 64), out_dtype=torch.float32).out)


def test_every_level_has_kernels_for_many_and_few_rows(level: str) -> None:
    many, few = kernels(64, 64)
    assert {many, few} <= {*LEVEL_KERNELS[level], *envelopes_names()}
    assert "stream" in few and "stream" not in many


def envelopes_names() -> set[str]:
    return {kernel.name for kernel in envelopes.KERNELS}
