"""Grouped layers whose weights stand as plain codes, on the calls of the native Hopper
module, which tests/fake_sm90_grouped.py stands in for.
"""

from __future__ import annotations

import pytest
import torch
from as_on_hopper import ask_for_hoppers_forms, call_the_stand_in, hide_splits
from grouped_cases import assert_same_as_loop, equal, loop_of, parameters
from torch import Tensor

import te_mx
from te_mx.autograd.operands import columnwise_of
from te_mx.backends import sm90
from te_mx.backends.base import PLAIN, Operand
from te_mx.backends.grouped import StackedOperand
from te_mx.ops import grouped_weights
from te_mx.ops.grouped_gemm import gemm_rows
from te_mx.ops.grouped_quantize import quantize_grouped
from te_mx.ops.grouped_weights import columns_of_weights, quantize_weights
from te_mx.recipe import MXFP8BlockScaling

SPLITS = [20, 0, 33]
ONE_COPY = MXFP8BlockScaling(one_copy_weights=True)


@pytest.fixture
def native(monkeypatch, threads) -> list[str]:
    """Names of the native calls, as they come."""
    threads(1)
    ask_for_hoppers_forms(monkeypatch)
    return call_the_stand_in(monkeypatch)


def whole(layer: te_mx.GroupedLinear) -> te_mx.GroupedLinear:
    """The same with small whole numbers as weights: packing then rounds nothing, and a loop on the
    CPU, which packs no weights, has the bits of Hopper."""
    with torch.no_grad():
        for name in layer._weight_names:
            weight = getattr(layer, name)
            weight.copy_(torch.randint(-8, 9, weight.shape))
    return layer


def wild(groups: int, rows: int, cols: int) -> list[Tensor]:
    scales = torch.exp2(torch.randint(-14, 14, (groups, rows, -(-cols // 10))).float())
    return list(torch.randn(groups, rows, cols) * scales.repeat_interleave(10, 2)[..., :cols])


# ---------------------------------------------------------------------------------------- products
@pytest.mark.parametrize("order", ["k_last", "k_first"])
@pytest.mark.parametrize("capacity", [0, 40])
@pytest.mark.parametrize("k", [64, 70])
def test_plain_weights_give_the_bits_of_packed_ones(native, order, capacity, k) -> None:
    offs = torch.tensor([20, 40, 113]) if capacity else torch.tensor([20, 20, 53])
    x, weights = torch.randn(120, k), wild(3, 140, k)
    q = quantize_grouped(
        x, offs, "e4m3", rowwise=True, columnwise=False, scale_rule="rceil", spread=8,
        capacity=capacity,
    )  # fmt: skip
    tokens = Operand(q.row_codes, q.row_scales, "e4m3", "sm90_rows")
    packed, _ = quantize_weights(weights, "e4m3", columnwise=False, scale_rule="rceil", spread=8)
    plain, _ = quantize_weights(weights, "e4m3", columnwise=False, scale_rule="rceil")
    assert native.count("quantize_stacked") == 2 and plain.order == "k_last"
    if order == "k_first":
        turned = (t.transpose(1, 2).contiguous() for t in plain[:2])
        plain = StackedOperand(*turned, "e4m3", order)
    make = {"out_dtype": torch.float32, "capacity": capacity, "bias": torch.randn(3, 140)}
    equal(gemm_rows(plain, tokens, offs, **make), gemm_rows(packed, tokens, offs, **make))
    assert native.count("pack_stacked") == 1


@pytest.mark.parametrize("columnwise", [False, True])
def test_plain_weights_are_quantized_as_each_alone(native, columnwise) -> None:
    weights = [w.t().contiguous().t() for w in wild(3, 45, 70)]
    made = quantize_weights(weights, "e4m3", columnwise=columnwise, scale_rule="floor")
    alone = grouped_weights._weights_loop(weights, "e4m3", columnwise, "floor", PLAIN)
    parts = [t for stack in made if stack is not None for t in stack[:2]]
    for mine, theirs in zip(parts, alone, strict=True):
        equal(mine, theirs)
    assert native == ["quantize_stacked"]


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_columns_are_those_of_each_weight(native, rule, fmt) -> None:
    weights = wild(3, 45, 70)
    weights[1][3, 9] = torch.nan
    row, _ = quantize_weights(weights, fmt, columnwise=False, scale_rule=rule)
    settings = MXFP8BlockScaling(scale_rule=rule).settings._replace(fwd_fmt=fmt)
    col = columns_of_weights(row, rule, 8)
    assert (col.groups, col.rows, col.k, col.order) == (3, 70, 45, "sm90")
    for i in range(3):
        want, got = columnwise_of(row.group(i), settings), sm90.aligned(col.group(i))
        equal(got.codes, want.codes)
        assert torch.equal(got.scales, want.scales)
    assert native[1:] == ["columns_of_stacked"]
    described = grouped_weights._columns_loop(*row[:3], rule, 8)
    for mine, theirs in zip(col[:2], described, strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()


@pytest.mark.parametrize("spread", [PLAIN, 8])
def test_opcheck_columns(spread) -> None:
    row, _ = quantize_weights(wild(2, 45, 70), "e4m3", columnwise=False, scale_rule="rceil")
    op = torch.ops.te_mx.columns_of_weights.default
    torch.library.opcheck(op, (row.codes, row.scales, "e4m3", "rceil", spread))


# ------------------------------------------------------------------------------------------ layers
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("first", [None, True])
def test_one_copy_is_a_loop(native, stacked, first) -> None:
    layer = whole(te_mx.GroupedLinear(3, 70, 48, single_grouped_weight=stacked))
    x = torch.randn(60, 70)
    with te_mx.autocast(recipe=ONE_COPY):
        if first:
            layer(x, SPLITS, is_first_microbatch=True)
            (kept,) = layer._microbatch.values()
            assert kept.row.order == "k_last" and kept.col is None
        native.clear()
        call = (lambda *a: layer(*a, is_first_microbatch=False)) if first else layer
        assert_same_as_loop(_Called(layer, call), loop_of(layer), x, SPLITS)
    quantized = [] if first else ["quantize_stacked"]
    assert native == [
        "quantize_grouped", *quantized, "pack_stacked", "gemm_rows",
        "quantize_grouped", "columns_of_stacked", "gemm_rows", "gemm_k",
    ]  # fmt: skip


class _Called:
    """A layer that is called in another way."""

    def __init__(self, layer: te_mx.GroupedLinear, call) -> None:
        self._layer, self._call = layer, call

    def __call__(self, *args):
        return self._call(*args)

    def __getattr__(self, name: str):
        return getattr(self._layer, name)


def test_one_copy_saves_plain_codes(native) -> None:
    layer = te_mx.GroupedLinear(3, 64, 48, bias=False)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with te_mx.autocast(recipe=ONE_COPY), hooks:
        layer(torch.randn(53, 64, requires_grad=True), SPLITS)
    weights = [t for t in saved if t is not None and t.shape[:2] == (3, 48)]
    assert {t.dtype for t in weights} == {torch.uint8}
    assert sum(t.numel() for t in weights) == 3 * 48 * (64 + 2)


def test_one_copy_never_looks_at_splits_on_the_device(native, monkeypatch) -> None:
    layer, x = te_mx.GroupedLinear(3, 70, 48), torch.randn(60, 70)

    def step(m_splits) -> list[Tensor]:
        layer.zero_grad()
        inp = x.clone().requires_grad_()
        with te_mx.autocast(recipe=ONE_COPY):
            y = layer(inp, m_splits)
        y.square().sum().backward()
        return [y, inp.grad, parameters(layer, "weight.grad")]

    want = step(SPLITS)
    hide_splits(monkeypatch)
    for mine, theirs in zip(step(torch.tensor(SPLITS)), want, strict=True):
        equal(mine, theirs)


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), ONE_COPY], ids=str)
def test_weights_without_masters_run_in_one_launch(native, recipe) -> None:
    layer = whole(te_mx.GroupedLinear(3, 70, 48))
    x = torch.randn(60, 70)
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        want = layer(x, SPLITS)
        te_mx.freeze_weights(layer, recipe=recipe, drop_master=True)
        codes = layer.weight_codes
        native.clear()
        equal(layer(x, SPLITS), want)
        assert native == ["quantize_grouped", "pack_stacked", "gemm_rows"]
        assert layer(torch.randn(0, 70), [0, 0, 0]).shape == (0, 48)
    assert layer.weight_codes is codes and codes.shape == (3, 48, 70)
    assert te_mx.audit(layer)["(root)"].fprop
