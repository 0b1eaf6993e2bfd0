"""Grouped layers on operands packed for Hopper, on any machine: once as plain torch describes them,
once on the calls of the native module, which tests/fake_sm90_grouped.py stands in for.
"""

from __future__ import annotations

import pytest
import torch
from as_on_hopper import ask_for_hoppers_forms, call_the_stand_in, hide_splits
from grouped_cases import RECIPES, SPLITS, assert_same_as_loop, equal, loop_of, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, SEEDS, tensor
from torch import Tensor

import te_mx
from te_mx import ops
from te_mx.backends import sm90, sm90_layout
from te_mx.backends import sm90_grouped_layout as layout
from te_mx.backends.base import Operand
from te_mx.backends.grouped import Bounds, StackedOperand
from te_mx.engine import explain
from te_mx.ops import grouped_quantize
from te_mx.ops.grouped_gemm import gemm_rows
from te_mx.ops.grouped_quantize import quantize_grouped
from te_mx.ops.grouped_weights import quantize_weights
from te_mx.ops.grouped_wgrad import gemm_k

LARGE = st.lists(st.sampled_from([0, 0, 1, 31, 127, 128, 129, 300]), min_size=1, max_size=6)


@pytest.fixture
def hopper_forms(monkeypatch, threads):
    threads(1)  # many small operators
    ask_for_hoppers_forms(monkeypatch)


@pytest.fixture
def hopper(hopper_forms, monkeypatch):
    return call_the_stand_in(monkeypatch)


def test_tiles_of_groups_never_meet() -> None:
    for splits in ([0, 1, 127, 128, 0, 129, 300], [128] * 5, [1] * 7, [0, 0], [255, 1, 128]):
        ends = torch.tensor(splits).cumsum(0).tolist()
        at = 0
        for i, (end, rows) in enumerate(zip(ends, splits, strict=True)):
            first = layout.first_tile(end - rows, i)
            assert first >= at
            at = first + -(-rows // 128)
        assert at <= layout.group_tiles(ends[-1], len(splits))


@pytest.mark.parametrize("splits", [[40, 0, 3, 90], [128, 129, 0, 256], [0, 0]])
def test_a_group_packs_as_it_does_alone(splits: list[int]) -> None:
    x = torch.randn(sum(splits) + 9, 70) * torch.exp2(torch.randint(-9, 9, (1, 70)).float())
    offs = torch.tensor(splits).cumsum(0)
    q = quantize_grouped(
        x, offs, "e4m3", rowwise=True, columnwise=True, scale_rule="rceil", spread=3
    )
    rows = Operand(q.row_codes, q.row_scales, "e4m3", "sm90_rows")
    cols = Operand(q.col_codes, q.col_scales, "e4m3", "sm90_k")
    assert q.row_codes.stride(0) == 80
    for i, (end, count) in enumerate(zip(offs.tolist(), splits, strict=True)):
        start = end - count
        if count == 0:
            continue
        alone = ops.quantize_2d(
            x[start:end], "e4m3", rowwise=True, columnwise="transposed", scale_rule="rceil",
            spread=3,
        )  # fmt: skip
        row, col = layout.rows_of(rows, start, end, i), layout.k_of_packed(cols, start, end, i)
        tiles = -(-count // 128)
        equal(row.codes, alone.row_codes)
        assert torch.equal(row.scales[:, :tiles], alone.row_scales[:, :tiles])
        equal(col.codes, alone.col_codes)
        assert torch.equal(col.scales, alone.col_scales)


@given(
    splits=st.one_of(SPLITS, LARGE), behind=st.integers(0, 40), capacity=st.booleans(),
    cols=st.integers(1, 150), dtype=DTYPES, seed=SEEDS,
)  # fmt: skip
@settings(max_examples=20)
def test_native_quantizer_is_the_description(
    hopper, splits: list[int], behind: int, capacity: bool, cols: int, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    room = max(*splits, 1) + behind if capacity else 0
    counts = torch.tensor(splits)
    offs = torch.arange(len(splits)) * room + counts if capacity else counts.cumsum(0)
    rows = room * len(splits) if capacity else sum(splits) + behind
    x = tensor("normal", rows, cols, seed, dtype)
    if rows == 0:
        return
    args = (x, offs, "e5m2", True, True, "rceil", True, room, 8)
    got, want = grouped_quantize._on_cuda(*args), grouped_quantize._on_other(*args)
    starts = [i * room for i in range(len(splits))] if capacity else [0, *offs.tolist()[:-1]]
    bounds = Bounds(starts, offs.tolist())
    equal(got.col_sum, want.col_sum)
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        for make, order, mine, theirs in (
            (layout.rows_of, "sm90_rows", got[:2], want[:2]),
            (layout.k_of_packed, "sm90_k", got[2:4], want[2:4]),
        ):
            one, other = (make(Operand(*p, "e5m2", order), start, end, i) for p in (mine, theirs))
            tiles = -(-(end - start) // 128)
            equal(one.codes, other.codes)
            assert torch.equal(one.scales[:, :tiles], other.scales[:, :tiles])


@pytest.mark.parametrize("columnwise", [False, True])
def test_weights_are_packed_as_each_alone(hopper, columnwise: bool) -> None:
    whole = torch.randn(3, 140, 80)
    for weights in (list(whole[:, :, :70]), [w.contiguous() for w in whole[:, :, 1:71]]):
        row, col = quantize_weights(
            weights, "e4m3", columnwise=columnwise, scale_rule="rceil", spread=8
        )
        assert (col is not None) == columnwise and (row.groups, row.rows, row.k) == (3, 140, 70)
        for i, weight in enumerate(weights):
            alone = ops.quantize_2d(
                weight, "e4m3", rowwise=True, columnwise="transposed", scale_rule="rceil", spread=8
            )
            for made, want in ((row, alone[:2]), (col, alone[2:4])):
                if made is not None:
                    one = sm90.aligned(made.group(i))
                    assert one.codes.data_ptr() == made.group(i).codes.data_ptr()
                    equal(one.codes, want[0])
                    assert torch.equal(one.scales, want[1])


def check_layer(
    splits: list[int], behind: int, k: int, n: int, dtype: torch.dtype, recipe: str, stacked: bool,
    bias: bool, seed: int,
) -> None:  # fmt: skip
    layer = te_mx.GroupedLinear(len(splits), k, n, bias, dtype=dtype, single_grouped_weight=stacked)
    x = tensor("normal", sum(splits) + behind, k, seed, dtype)
    with te_mx.autocast(recipe=RECIPES[recipe]):
        assert_same_as_loop(layer, loop_of(layer), x, splits)


CASES = {
    "splits": st.one_of(SPLITS, LARGE), "behind": st.integers(0, 40),
    "k": st.sampled_from([1, 33, 64, 130]), "n": st.sampled_from([1, 17, 64, 140]),
    "dtype": DTYPES, "recipe": st.sampled_from(sorted(RECIPES)), "stacked": st.booleans(),
    "bias": st.booleans(), "seed": SEEDS,
}  # fmt: skip


@given(**CASES)
@settings(max_examples=20)
def test_described_layers_equal_a_loop(hopper_forms, **case) -> None:
    check_layer(**case)


@given(**CASES)
@settings(max_examples=20)
def test_native_layers_equal_a_loop(hopper, **case) -> None:
    check_layer(**case)


def test_one_call_each(hopper) -> None:
    calls = hopper
    layer = te_mx.GroupedLinear(3, 64, 48, dtype=torch.bfloat16)
    x = torch.randn(60, 64, dtype=torch.bfloat16, requires_grad=True)
    with te_mx.autocast():
        layer(x, [20, 0, 33]).sum().backward()
    assert calls == [
        "quantize_grouped", "quantize_stacked", "gemm_rows",
        "quantize_grouped", "gemm_rows", "gemm_k",
    ]  # fmt: skip
    found = te_mx.audit(layer)["(root)"]
    assert {found.fprop, found.dgrad, found.wgrad} == {sm90.ADAPTIVE}
    calls.clear()
    with te_mx.autocast():
        for first in (True, False, False):
            layer(x, [20, 0, 33], is_first_microbatch=first).sum().backward()
    assert calls.count("quantize_stacked") == 1
    (kept,) = layer._microbatch.values()
    assert kept.row.order == "sm90"


def test_ends_on_the_device_are_used_as_they_are(hopper, monkeypatch) -> None:
    layer = te_mx.GroupedLinear(3, 70, 48)
    x = torch.randn(60, 70)
    grads = torch.randn(60, 48)
    splits = [20, 0, 33]

    def run(m_splits: object) -> list[Tensor]:
        layer.zero_grad()
        inp = x.clone().requires_grad_()
        with te_mx.autocast():
            y = layer(inp, m_splits)
        y.backward(grads)
        return [y, inp.grad, parameters(layer, "weight.grad"), parameters(layer, "bias.grad")]

    want = run(splits)
    hide_splits(monkeypatch)
    for dtype in (torch.int32, torch.int64):
        for mine, theirs in zip(run(torch.tensor(splits, dtype=dtype)), want, strict=True):
            equal(mine, theirs)


def test_saved_tensors_that_come_back_otherwise(hopper) -> None:
    """From the CPU they come contiguous, where packed rows are padded; hooks may do anything."""
    layer, x = te_mx.GroupedLinear(3, 70, 44), torch.randn(60, 70)

    def run(unpack) -> list[Tensor]:
        inp = x.clone().requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack)
        with te_mx.autocast(), hooks:
            y = layer(inp, torch.tensor([20, 0, 33]))
        return list(torch.autograd.grad(y.square().sum(), [inp, *layer.parameters()]))

    want = run(lambda t: t)
    for unpack in (lambda t: t.clone().contiguous(), lambda t: torch.stack([t, t], -1)[..., 0]):
        for mine, theirs in zip(run(unpack), want, strict=True):
            equal(mine, theirs)


def test_accumulation_and_main_grad(hopper) -> None:
    layer = te_mx.GroupedLinear(
        3, 64, 48, single_grouped_weight=True, fuse_wgrad_accumulation=True, dtype=torch.bfloat16
    )
    plain = te_mx.GroupedLinear(3, 64, 48, single_grouped_weight=True, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    before = torch.randn(3, 48, 64)
    layer.weight.main_grad = before.clone()
    x = torch.randn(60, 64, dtype=torch.bfloat16)
    with te_mx.autocast():
        layer(x, [20, 0, 33]).sum().backward()
        plain(x, [20, 0, 33]).sum().backward()
    added = layer.weight.main_grad - before
    assert bool((added[1] == 0).all())
    torch.testing.assert_close(added.bfloat16(), plain.weight.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("frozen", [False, True])
def test_kept_weights_follow_the_recipe(hopper, frozen: bool) -> None:
    layer = te_mx.GroupedLinear(2, 64, 48)
    x = torch.randn(50, 64, requires_grad=True)
    one, other = (te_mx.recipe.MXFP8BlockScaling(alignment_spread=s) for s in (8, 2))
    if frozen:
        te_mx.freeze_weights(layer, recipe=one)
    for recipe in (one, other):
        with te_mx.autocast(recipe=recipe):
            fresh = te_mx.GroupedLinear(2, 64, 48)
            fresh.load_state_dict(layer.state_dict())
            want = fresh(x, [20, 30])
            for _ in range(2):
                equal(layer(x, [20, 30], is_first_microbatch=False), want)


def test_layers_without_rows_or_columns(hopper) -> None:
    layer = te_mx.GroupedLinear(2, 64, 48)
    with te_mx.autocast():
        x = torch.randn(0, 64, requires_grad=True)
        layer(x, [0, 0]).sum().backward()
        assert x.grad.shape == (0, 64) and bool((parameters(layer, "weight.grad") == 0).all())
        layer(torch.randn(9, 64), [4, 5], is_first_microbatch=True)
        assert layer(torch.randn(0, 64), [0, 0], is_first_microbatch=False).shape == (0, 48)


def test_what_does_not_fit_is_said(hopper) -> None:
    offs = torch.tensor([4, 9])
    x, w = torch.randn(9, 64), list(torch.randn(2, 48, 64))
    q = quantize_grouped(
        x, offs, "e4m3", rowwise=True, columnwise=True, scale_rule="rceil", spread=8
    )
    row, _ = quantize_weights(w, "e4m3", columnwise=False, scale_rule="rceil", spread=8)
    b = Operand(q.row_codes, q.row_scales, "e4m3", "sm90_rows")
    with pytest.raises(ValueError, match=r"b must be packed in groups.*got order sm90,"):
        gemm_rows(row, b._replace(order="sm90"), offs, out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"a must be packed: codes \(2, 48, 64\)"):
        gemm_rows(row._replace(scales=row.scales[:, :, :1]), b, offs, out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"a: k_last codes \(2, 48, 64\) need scales \(2, 48, 2\)"):
        gemm_rows(
            StackedOperand(row.codes, row.scales, "e4m3", "k_last"), b, offs,
            out_dtype=torch.float32,
        )  # fmt: skip
    cols = Operand(q.col_codes, q.col_scales, "e4m3", "sm90_k")
    with pytest.raises(ValueError, match=r"a must be sm90_k with codes \(64, 512\).* of 300 rows"):
        gemm_k(cols, cols, offs, rows=300, out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"offs must be end offsets that rise"):
        gemm_rows(row, b, torch.tensor([4, 99]), out_dtype=torch.float32)


def test_products_are_those_of_what_the_operands_decode_to(hopper) -> None:
    explain.LAST_RUN.pop(7, None)
    splits, k, n = [40, 0, 90], 200, 33
    offs = torch.tensor(splits).cumsum(0)
    x, w = torch.randn(140, k), list(torch.randn(3, n, k))
    q = quantize_grouped(
        x, offs, "e4m3", rowwise=True, columnwise=False, scale_rule="rceil", spread=8
    )
    row, _ = quantize_weights(w, "e4m3", columnwise=False, scale_rule="rceil", spread=8)
    tokens = Operand(q.row_codes, q.row_scales, "e4m3", "sm90_rows")
    bias = torch.randn(3, n)
    y = gemm_rows(row, tokens, offs, bias=bias, out_dtype=torch.float32, tag=7)
    assert explain.LAST_RUN.pop(7) == sm90.ADAPTIVE
    assert bool((y[130:] == 0).all())
    for i, (end, count) in enumerate(zip(offs.tolist(), splits, strict=True)):
        if count:
            lhs = layout.rows_of(tokens, end - count, end, i)
            values = sm90_layout.packed_values(lhs, k, "e4m3")
            want = values @ sm90_layout.packed_values(row.group(i), k, "e4m3").t() + bias[i]
            torch.testing.assert_close(y[end - count : end], want.float(), rtol=1e-5, atol=1e-4)
