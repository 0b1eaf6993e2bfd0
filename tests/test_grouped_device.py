"""Splits that only a device knows: the plain torch form never looks at them, and agrees with the
loop. It is tested here on CPU tensors, and where there is a GPU on that.
"""

from __future__ import annotations

import warnings

import numpy as np
import oracles
import pytest
import torch
from as_on_hopper import hide_ends
from grouped_cases import SPLITS, equal
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, FORMATS, KINDS, RULES, SEEDS, tensor

import te_mx
from te_mx.backends import grouped, reference_grouped
from te_mx.backends.base import PLAIN, Operand
from te_mx.ops import grouped_gemm, grouped_quantize, grouped_weights, grouped_wgrad
from te_mx.ops.gemm import Mode


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, fresh_warnings):
    """As if offs lay on a device: the implementations for other devices, and no look at offs."""
    hide_ends(monkeypatch)


@given(
    splits=SPLITS, behind=st.integers(0, 40), capacity=st.booleans(), cols=st.integers(1, 70),
    dtype=DTYPES, fmt=FORMATS, rule=RULES, kind=st.sampled_from(KINDS), seed=SEEDS,
)  # fmt: skip
def test_quantize_without_looking(
    splits: list[int], behind: int, capacity: bool, cols: int, dtype: torch.dtype, fmt: str,
    rule: str, kind: str, seed: int,
) -> None:  # fmt: skip
    offs, room, rows = layout(splits, behind, capacity)
    x = tensor(kind, rows, cols, seed, dtype)
    starts, ends = grouped.device_bounds(offs, room, rows)
    made = reference_grouped.quantize(x, starts, ends, fmt, True, True, rule, True)
    expected = grouped_quantize.quantize_grouped(
        x, offs, fmt, rowwise=True, columnwise=True, scale_rule=rule, col_sum=True, capacity=room
    )
    for got, wanted in zip(made[:4], expected[:4], strict=True):
        equal(got, wanted)
    if kind == "normal":
        torch.testing.assert_close(made.col_sum, expected.col_sum, rtol=1e-4, atol=1e-3)


def layout(splits: list[int], behind: int, capacity: bool) -> tuple[torch.Tensor, int, int]:
    counts = torch.tensor(splits)
    if not capacity:
        return counts.cumsum(0), 0, sum(splits) + behind
    room = max(*splits, 1) + behind
    return torch.arange(len(splits)) * room + counts, room, room * len(splits)


@given(splits=SPLITS, behind=st.integers(0, 9), capacity=st.booleans(), seed=SEEDS)
@settings(max_examples=15)
def test_products_without_looking(
    on_device, splits: list[int], behind: int, capacity: bool, seed: int
) -> None:
    offs, room, rows = layout(splits, behind, capacity)
    k, m = 70, 33
    x, grad = (tensor("outliers", rows, cols, seed, torch.float32) for cols in (k, m))
    weights = [tensor("normal", m, k, seed + i, torch.float32) for i in range(len(splits))]
    row, _ = grouped_weights.quantize_weights(weights, "e4m3", columnwise=False, scale_rule="rceil")
    bias, mode = torch.randn(len(splits), m), Mode()
    starts, ends = grouped.device_bounds(offs, room, rows)
    q, g = (
        reference_grouped.quantize(v, starts, ends, "e4m3", True, True, "rceil", False)
        for v in (x, grad)
    )
    tokens = Operand(q.row_codes, q.row_scales, "e4m3", "k_last")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", te_mx.FallbackWarning)
        y = grouped_gemm._rows_on_other(row, tokens, offs, bias, torch.float32, room, -1, mode)
    a = Operand(q.col_codes, q.col_scales, "e4m3", "k_first")
    b = Operand(g.col_codes, g.col_scales, "e4m3", "k_first")
    out = torch.full((len(splits), m, k), torch.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", te_mx.FallbackWarning)
        grouped_wgrad._k_on_other(a, b, offs, out, False, room, rows, -1, mode)
    covered = torch.zeros(rows, dtype=torch.bool)
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        covered[start:end] = True
        values = oracles.values(
            tokens.codes[start:end].numpy(), tokens.scales[start:end].numpy(), "e4m3"
        )
        w = oracles.values(row.codes[i].numpy(), row.scales[i].numpy(), "e4m3")
        if end > start:
            exact = values @ w.T + bias[i].numpy()
            slack = 2.0**-22 * (np.abs(exact) + bias[i].abs().numpy())
            oracles.assert_gemm(y[start:end], w, values, exact, slack)
        parts = (grouped.k_of(a, start, end, i), grouped.k_of(b, start, end, i))
        turned = [[t.t().contiguous().numpy() for t in part[:2]] for part in parts]
        oracles.assert_gemm(out[i], *(oracles.values(*part, "e4m3") for part in turned))
    assert bool((y[~covered] == 0).all())


def test_bounds_out_of_range_are_cut_off() -> None:
    starts, ends = grouped.device_bounds(torch.tensor([4, 2, 99]), 0, 10)
    assert starts.tolist() == [0, 4, 4] and ends.tolist() == [4, 4, 10]
    starts, ends = grouped.device_bounds(torch.tensor([4, 99, 17]), 8, 24)
    assert starts.tolist() == [0, 8, 16] and ends.tolist() == [4, 16, 17]


def test_column_sums_without_looking() -> None:
    x = torch.randn(50, 7)
    offs = torch.tensor([10, 10, 40])
    sums = reference_grouped.col_sums(x, *grouped.device_bounds(offs, 0, 50))
    expected = torch.stack([x[:10].sum(0), torch.zeros(7), x[10:40].sum(0)])
    torch.testing.assert_close(sums, expected)


def test_splits_on_a_device_say_that_they_are_slow(on_device) -> None:
    x, offs = torch.randn(40, 32), torch.tensor([10, 30])
    with pytest.warns(te_mx.FallbackWarning, match="splits given as a list loop over the groups"):
        grouped_quantize._on_other(x, offs, "e4m3", True, False, "rceil", False, 0, PLAIN)


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
