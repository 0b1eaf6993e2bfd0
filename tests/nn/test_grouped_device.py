"""Splits that only a device knows: the plain torch form never looks at them, and agrees with the
loop. It is tested here on CPU tensors, and where there is a GPU on that.
"""

from __future__ import annotations

import warnings

import numpy as np
import oracles
import pytest
import torch
from grouped_cases import SPLITS, equal
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, FORMATS, KINDS, RULES, SEEDS, tensor

import te_mx
from te_mx._ops import grouped_quantize
from te_mx._ops.grouped_gemm import gemm_k, gemm_rows
from te_mx._ops.grouped_quantize import quantize_grouped, quantize_weights
from te_mx.backends.cpu import grouped as cpu_grouped
from te_mx.backends.reference import grouped
from te_mx.backends.reference import grouped as reference_grouped
from te_mx.dispatch.calls import Groups, QuantizeGroups
from te_mx.dispatch.groups import col_sums_on_device, device_bounds

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # NVFP4 on the CPU

ROWS, IN_GROUPS = "mxfp8_e4m3@rows", "mxfp8_e4m3@grouped_cols"


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, fresh_warnings):
    """As if offs lay on a device: whoever looks at them on the host fails."""

    def refuse(*args: object) -> None:
        raise AssertionError("the host looked at the splits")

    for module in (grouped_quantize, reference_grouped):
        monkeypatch.setattr(module, "known_to_host", lambda offs: False)
    for module in (cpu_grouped, reference_grouped):
        monkeypatch.setattr(module, "host_bounds", refuse)


@given(
    splits=SPLITS, behind=st.integers(0, 40), capacity=st.booleans(), cols=st.integers(1, 70),
    dtype=DTYPES, fmt=FORMATS, rule=RULES, kind=st.sampled_from(KINDS), seed=SEEDS,
)  # fmt: skip
def test_quantize_without_looking(
    splits: list[int], behind: int, capacity: bool, cols: int, dtype: torch.dtype, fmt: str,
    rule: str, kind: str, seed: int,
) -> None:  # fmt: skip
    groups, rows = layout(splits, behind, capacity)
    x = tensor(kind, rows, cols, seed, dtype)
    specs = f"mxfp8_{fmt}@rows", f"mxfp8_{fmt}@grouped_cols"
    tokens = QuantizeGroups(x, groups, *specs, rule, True)
    made = grouped.quantize(tokens, *device_bounds(*groups, rows))
    expected = quantize_grouped(x, groups, *specs, rule=rule, col_sum=True)
    for got, wanted in zip(made[:2], expected[:2], strict=True):
        assert got[2:] == wanted[2:]
        equal(got.codes, wanted.codes)
        equal(got.scales, wanted.scales)
    if kind == "normal":
        torch.testing.assert_close(made.col_sum, expected.col_sum, rtol=1e-4, atol=1e-3)


@given(
    splits=SPLITS, behind=st.integers(0, 40), capacity=st.booleans(), cols=st.integers(1, 70),
    size=st.sampled_from([16, 32]), kind=st.sampled_from(KINDS), seed=SEEDS,
)  # fmt: skip
@settings(max_examples=25)
def test_random_bits_and_transforms_without_looking(
    splits: list[int], behind: int, capacity: bool, cols: int, size: int, kind: str, seed: int
) -> None:
    """Bits by the number among all tokens, chunks of a transform from the first row of a group."""
    groups, rows = layout(splits, behind, capacity)
    x, drawn = tensor(kind, rows, cols, seed, torch.float32), torch.tensor([seed])
    specs = "mxfp4@rows", f"mxfp4+rht{size}:0x5b39a1c6@grouped_cols"
    tokens = QuantizeGroups(x, groups, *specs, "rceil+sr", False, drawn)
    made = grouped.quantize(tokens, *device_bounds(*groups, rows))
    expected = quantize_grouped(x, groups, *specs, rule="rceil+sr", seed=drawn)
    for got, wanted in zip(made[:2], expected[:2], strict=True):
        equal(got.codes, wanted.codes)
        equal(got.scales, wanted.scales)


def layout(splits: list[int], behind: int, capacity: bool) -> tuple[Groups, int]:
    """(groups, rows there are)."""
    counts = torch.tensor(splits)
    if not capacity:
        return Groups(counts.cumsum(0)), sum(splits) + behind
    room = max(*splits, 1) + behind
    return Groups(torch.arange(len(splits)) * room + counts, room), room * len(splits)


@given(splits=SPLITS, behind=st.integers(0, 9), capacity=st.booleans(), seed=SEEDS)
@settings(max_examples=15)
def test_products_without_looking(
    on_device, splits: list[int], behind: int, capacity: bool, seed: int
) -> None:
    groups, rows = layout(splits, behind, capacity)
    k, n = 70, 33
    x, grad = (tensor("outliers", rows, cols, seed, torch.float32) for cols in (k, n))
    weights = [tensor("normal", n, k, seed + i, torch.float32) for i in range(len(splits))]
    stack, _ = quantize_weights(weights, ROWS, rule="rceil")
    bias = torch.randn(len(splits), n)
    starts, ends = device_bounds(*groups, rows)
    out = torch.full((len(splits), n, k), torch.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", te_mx.FallbackWarning)
        q, g = (quantize_grouped(v, groups, ROWS, IN_GROUPS, rule="rceil") for v in (x, grad))
        y = gemm_rows(q.row, stack, groups, bias=bias, out_dtype=torch.float32)
        made = gemm_k(g.col, q.col, groups, out=out, out_dtype=out.dtype)
        added = gemm_k(g.col, q.col, groups, out=out.clone(), out_dtype=out.dtype, accumulate=True)
    assert made is out
    torch.testing.assert_close(added, 2 * out, rtol=1e-6, atol=0)
    covered = torch.zeros(rows, dtype=torch.bool)
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        covered[start:end] = True
        values = oracles.values(
            q.row.codes[start:end].numpy(), q.row.scales[start:end].numpy(), "e4m3"
        )
        w = oracles.values(stack.codes[i].numpy(), stack.scales[i].numpy(), "e4m3")
        if end > start:
            exact = values @ w.T + bias[i].numpy()
            slack = 2.0**-22 * (np.abs(exact) + bias[i].abs().numpy())
            oracles.assert_gemm(y[start:end], w, values, exact, slack)
        parts = (q.col.group(start, end, i), g.col.group(start, end, i))
        turned = [[t.t().contiguous().numpy() for t in part[:2]] for part in parts]
        oracles.assert_gemm(out[i], *(oracles.values(*part, "e4m3") for part in turned))
    assert bool((y[~covered] == 0).all())


def test_bounds_out_of_range_are_cut_off() -> None:
    starts, ends = device_bounds(torch.tensor([4, 2, 99]), 0, 10)
    assert starts.tolist() == [0, 4, 4] and ends.tolist() == [4, 4, 10]
    starts, ends = device_bounds(torch.tensor([4, 99, 17]), 8, 24)
    assert starts.tolist() == [0, 8, 16] and ends.tolist() == [4, 16, 17]


def test_column_sums_without_looking() -> None:
    x = torch.randn(50, 7)
    offs = torch.tensor([10, 10, 40])
    sums = col_sums_on_device(x, *device_bounds(offs, 0, 50))
    expected = torch.stack([x[:10].sum(0), torch.zeros(7), x[10:40].sum(0)])
    torch.testing.assert_close(sums, expected)


def test_splits_on_a_device_say_that_they_are_slow(on_device) -> None:
    x, offs = torch.randn(40, 32), torch.tensor([10, 30])
    with pytest.warns(te_mx.FallbackWarning, match="splits given as a list loop over the groups"):
        quantize_grouped(x, Groups(offs), ROWS, rule="rceil")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_layer_takes_other_splits() -> None:
    layer = te_mx.GroupedLinear(3, 64, 48, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(90, 64, device="cuda", dtype=torch.bfloat16)
    m_splits = torch.tensor([30, 30, 30], device="cuda")
    with te_mx.autocast(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", te_mx.FallbackWarning)  # GPUs that are not Hopper
        layer(x, m_splits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x, m_splits)
        for splits in ([10, 0, 70], [1, 2, 3], [0, 90, 0]):
            m_splits.copy_(torch.tensor(splits))
            graph.replay()
            expected = layer(x, splits)
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
            assert bool((y[sum(splits) :] == 0).all())
