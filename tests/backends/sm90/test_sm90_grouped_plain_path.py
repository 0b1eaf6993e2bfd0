"""Grouped layers whose weights stand as plain codes, on the calls of the native Hopper
module, which fake_sm90.py stands in for.
"""

from __future__ import annotations

import copy

import pytest
import torch
from as_on_hopper import hide_splits, hopper_with_groups
from grouped_cases import assert_same_as_loop, equal, loop_of, parameters
from torch import Tensor

import te_mx
from te_mx import _ops as ops
from te_mx._ops import Stack
from te_mx._ops.grouped_gemm import gemm_rows
from te_mx._ops.grouped_quantize import (
    Groups,
    QuantizeWeights,
    columns_of_weights,
    quantize_grouped,
    quantize_weights,
    weight_columns,
)
from te_mx.autograd.linear_recipe import columns_of
from te_mx.backends.sm90 import grouped
from te_mx.backends.sm90.decode import Decode
from te_mx.dispatch import kernels as all_kernels
from te_mx.recipe import MXFP8BlockScaling

E4M3 = "mxfp8_e4m3"
SPLITS = [20, 0, 33]
ONE_COPY = MXFP8BlockScaling(one_copy_weights=True)


@pytest.fixture
def native(threads):
    """Names of the native calls, as they come."""
    threads(1)
    with hopper_with_groups() as calls:
        yield calls


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
@pytest.mark.parametrize("layout", ["rows", "cols"])
@pytest.mark.parametrize("capacity", [0, 40])
@pytest.mark.parametrize("k", [64, 70])
def test_plain_weights_give_the_bits_of_packed_ones(native, layout, capacity, k) -> None:
    offs = torch.tensor([20, 40, 113]) if capacity else torch.tensor([20, 20, 53])
    groups = Groups(offs, capacity)
    x, weights = torch.randn(120, k), wild(3, 140, k)
    tokens = quantize_grouped(x, groups, f"{E4M3}@sm90_rows:8", rule="rceil").row
    packed, _ = quantize_weights(weights, f"{E4M3}@sm90:8", rule="rceil")
    plain, _ = quantize_weights(weights, f"{E4M3}@rows", rule="rceil")
    assert native.count("quantize_stacked") == 2 and plain.spec == f"{E4M3}@rows"
    if layout == "cols":
        turned = (t.transpose(1, 2).contiguous() for t in plain[:2])
        plain = Stack(*turned, f"{E4M3}@cols", *plain[3:6])
    make = {"out_dtype": torch.float32, "bias": torch.randn(3, 140)}
    equal(gemm_rows(tokens, plain, groups, **make), gemm_rows(tokens, packed, groups, **make))
    assert native.count("pack_stacked") == 1 and native.count("gemm_rows") == 2


@pytest.mark.parametrize("layouts", [("rows", ""), ("rows", "cols"), ("", "cols")])
def test_plain_weights_are_quantized_as_each_alone(native, layouts) -> None:
    weights = [w.t().contiguous().t() for w in wild(3, 45, 70)]
    specs = [layout and f"{E4M3}@{layout}" for layout in layouts]
    if specs[0]:
        made = quantize_weights(weights, *specs, rule="floor")
    else:
        made = None, weight_columns(weights, specs[1], rule="floor")
    assert native == ["quantize_stacked"]
    reference = all_kernels.kernels("quantize_weights")[-1]
    alone = reference.run(QuantizeWeights(weights, *specs, "floor"))
    for mine, theirs in zip(made, alone, strict=True):
        assert (mine is not None) == (theirs is not None)
        if theirs is not None:
            assert mine[2:] == theirs[2:]
            equal(mine.codes, theirs.codes)
            equal(mine.scales, theirs.scales)


@pytest.mark.parametrize(("specs", "calls"), [(("rows", "rows"), 0), (("sm90:8", "sm90:3"), 2)])
@pytest.mark.filterwarnings("ignore:te_mx runs quantize on:te_mx.FallbackWarning")
def test_other_forms_of_weights(native, specs, calls) -> None:
    """One native call makes rows, columns or both: as they lie, or packed alike. Others take a call
    for each direction, or are made one by one."""
    weights = wild(3, 64, 64)  # square, so that a transposed one would fit
    specs = [layout and f"{E4M3}@{layout}" for layout in specs]
    made = quantize_weights(weights, *specs, rule="rceil")
    for stack, spec, side in zip(made, specs, ("row", "col"), strict=True):
        assert (stack is not None) == bool(spec)
        for i in range(3 if spec else 0):
            one = getattr(ops.quantize_2d(weights[i], **{side: spec}), side)
            equal(stack.group(i).codes, one.codes)
            assert torch.equal(stack.group(i).scales, one.scales)
    assert native.count("quantize_stacked") == calls


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("fmt", [E4M3, "mxfp4"])
def test_columns_are_those_of_each_weight(native, rule, fmt) -> None:
    weights, spec = wild(3, 45, 70), f"{fmt}@sm90:8"
    weights[1][3, 9] = torch.nan
    row, _ = quantize_weights(weights, f"{fmt}@rows", rule=rule)
    settings = MXFP8BlockScaling(scale_rule=rule).settings._replace(x=fmt, w=fmt)
    col = columns_of_weights(row, spec, rule)
    assert (col.groups, col.rows, col.k, col.spec) == (3, 70, 45, spec)
    assert native[1:] == ["columns_of_stacked"]
    for i in range(3):
        want, got = columns_of(row.group(i), settings), col.group(i).checked("rhs")
        assert got[2:] == want[2:]
        equal(got.codes, want.codes)
        assert torch.equal(got.scales, want.scales)
    described = all_kernels.kernels("columns_of_weights")[-1].run(row, spec, rule)
    for mine, theirs in zip(col[:2], described[:2], strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()


@pytest.mark.parametrize("most", [1 << 30, 2 * 45 * 70 * 2, 1])
@pytest.mark.parametrize(
    ("fmt", "col"), [("mxfp4", E4M3), ("mxfp4", "mxfp4"), ("mxfp8_e5m2", E4M3)]
)
def test_columns_in_another_format_are_decoded_and_quantized(native, monkeypatch, most, fmt, col):
    """All groups in two native calls, or as many at a time as memory is given for."""
    monkeypatch.setattr(grouped, "MOST_BYTES", most)
    weights, spec = wild(3, 45, 70), f"{col}@sm90:8"
    row, _ = quantize_weights(weights, f"{fmt}@rows", rule="rceil")
    native.clear()
    made = columns_of_weights(row, spec, "rceil")
    assert (made.groups, made.rows, made.k, made.spec) == (3, 70, 45, spec)
    if fmt != col:
        assert native == ["quantize_stacked"] * {1 << 30: 1, 2 * 45 * 70 * 2: 2, 1: 3}[most]
    described = all_kernels.kernels("columns_of_weights")[-1].run(row, spec, "rceil")
    for mine, theirs in zip(made[:2], described[:2], strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()


@pytest.mark.parametrize("activations", ["mxfp8", "mxfp4"])
def test_experts_in_four_bits_pass_gradients_on_natively(native, activations) -> None:
    """Of frozen MXFP4 weights dgrad reads MXFP8 columns; a fallback would warn and fail."""
    layer = te_mx.GroupedLinear(3, 64, 48, bias=False)
    te_mx.freeze_weights(layer, drop_master=True, fmt="mxfp4", activations=activations)
    values = copy.deepcopy(layer)
    te_mx.unfreeze_weights(values, dequantize=True)
    x = torch.randn(53, 64, requires_grad=True)
    native.clear()
    y = layer(x, SPLITS)
    y.sum().backward()
    assert native[-2:] == ["quantize_stacked", "gemm_rows"]
    weights = [getattr(values, name) for name in layer._weight_names]
    want = torch.cat([w.sum(0).expand(m, -1) for w, m in zip(weights, SPLITS, strict=True)])
    torch.testing.assert_close(x.grad, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("layout", ["cols", "sm90:8"])
def test_opcheck_columns(native, layout) -> None:
    row, _ = quantize_weights(wild(2, 45, 70), f"{E4M3}@rows", rule="rceil")
    op = torch.ops.te_mx.columns_of_weights.default
    codes, scales, spec, _, rows, k, *_ = row
    given = codes, scales, spec, rows, k, f"{E4M3}@{layout}", "rceil"
    torch.library.opcheck(op, given)


# ------------------------------------------------------------------------------------------ layers
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("first", [None, True])
def test_one_copy_is_a_loop(native, stacked, first) -> None:
    layer = whole(te_mx.GroupedLinear(3, 70, 48, single_grouped_weight=stacked))
    x = torch.randn(60, 70)
    with te_mx.autocast(recipe=ONE_COPY):
        if first:
            layer(x, SPLITS, is_first_microbatch=True)
            (kept,) = layer._source.kept.values()
            assert kept.row.spec == f"{E4M3}@rows" and kept.col is None
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
def test_weights_without_masters_run_in_one_launch(native, recipe, monkeypatch) -> None:
    """Of more rows than the decode kernel takes."""
    monkeypatch.setattr(Decode, "accepts", lambda self, problem: "is left out")
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
