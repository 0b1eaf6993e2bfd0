"""The grouped kernels of the Hopper backend on any machine: tokens and weights against the packing
of each group alone. fake_sm90.py stands in for the native module.
"""

from __future__ import annotations

import pytest
import torch
from as_on_hopper import hide_splits, hopper_with_groups
from grouped_cases import SPLITS, equal
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, SEEDS, tensor
from torch import Tensor

from te_mx import _ops as ops
from te_mx._ops.grouped_gemm import gemm_k, gemm_rows
from te_mx._ops.grouped_quantize import Groups, QuantizeGroups, quantize_grouped, quantize_weights
from te_mx.backends.sm90 import grouped as sm90_grouped
from te_mx.backends.sm90.layouts import groups as layout
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.dispatch import kernels as all_kernels
from te_mx.dispatch.groups import Bounds
from te_mx.runtime.kernel_log import LAST_RUN

E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"
LARGE = st.lists(st.sampled_from([0, 0, 1, 31, 127, 128, 129, 300]), min_size=1, max_size=6)


@pytest.fixture
def hopper(threads):
    """Names of the native calls, as they come."""
    threads(1)  # many small operators
    with hopper_with_groups() as calls:
        yield calls


def tokens_of(x: Tensor, groups: Groups, fmt: str = E4M3, spread: int = 8) -> ops.Quantized:
    """Tokens packed in both directions."""
    row, col = f"{fmt}@sm90_rows:{spread}", f"{fmt}@sm90_k:{spread}"
    return quantize_grouped(x, groups, row, col, rule="rceil")


def test_tiles_of_groups_never_meet() -> None:
    for splits in ([0, 1, 127, 128, 0, 129, 300], [128] * 5, [1] * 7, [0, 0], [255, 1, 128]):
        ends = torch.tensor(splits).cumsum(0).tolist()
        at = 0
        for i, (end, rows) in enumerate(zip(ends, splits, strict=True)):
            first = layout.first_tile(end - rows, i)
            assert first >= at
            at = first + -(-rows // 128)
        assert at <= layout.group_tiles(ends[-1], len(splits))


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
@pytest.mark.parametrize("splits", [[40, 0, 3, 90], [128, 129, 0, 256], [0, 0]])
def test_a_group_packs_as_it_does_alone(splits: list[int]) -> None:
    x = torch.randn(sum(splits) + 9, 70) * torch.exp2(torch.randint(-9, 9, (1, 70)).float())
    offs = torch.tensor(splits).cumsum(0)
    q = tokens_of(x, Groups(offs), spread=3)
    assert q.row.codes.stride(0) == 80
    assert (q.row.rows, q.row.k, q.col.rows, q.col.k) == (*x.shape, *x.shape[::-1])
    for i, (end, count) in enumerate(zip(offs.tolist(), splits, strict=True)):
        start = end - count
        if count == 0:
            continue
        spec = f"{E4M3}@sm90:3"
        alone = ops.quantize_2d(x[start:end], spec, spec)
        row, col = layout.rows_of(q.row, start, end, i), layout.k_of(q.col, start, end, i)
        tiles = -(-count // 128)
        equal(row.codes, alone.row.codes)
        assert torch.equal(row.scales[:, :tiles], alone.row.scales[:, :tiles])
        equal(col.codes, alone.col.codes)
        assert torch.equal(col.scales, alone.col.scales)


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
    specs = f"{E5M2}@sm90_rows:8", f"{E5M2}@sm90_k:8"
    groups = Groups(offs, room)
    hopper.clear()
    got = quantize_grouped(x, groups, *specs, rule="rceil", col_sum=True)
    assert hopper == ["quantize_grouped"]
    reference = all_kernels.kernels("quantize_grouped")[-1]
    want = reference.run(QuantizeGroups(x, groups, *specs, "rceil", True))
    starts = [i * room for i in range(len(splits))] if capacity else [0, *offs.tolist()[:-1]]
    bounds = Bounds(starts, offs.tolist())
    equal(got.col_sum, want.col_sum)
    for mine, theirs in ((got.row, want.row), (got.col, want.col)):
        assert mine[2:] == theirs[2:] and mine.codes.shape == theirs.codes.shape
        assert mine.codes.stride() == theirs.codes.stride()
        assert mine.scales.shape == theirs.scales.shape
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        for make, mine, theirs in (
            (layout.rows_of, got.row, want.row),
            (layout.k_of, got.col, want.col),
        ):
            one, other = (make(side, start, end, i) for side in (mine, theirs))
            tiles = -(-(end - start) // 128)
            equal(one.codes, other.codes)
            assert torch.equal(one.scales[:, :tiles], other.scales[:, :tiles])


@pytest.mark.parametrize("columnwise", [False, True])
def test_weights_are_packed_as_each_alone(hopper, columnwise: bool) -> None:
    whole, spec = torch.randn(3, 140, 80), f"{E4M3}@sm90:8"
    for weights in (list(whole[:, :, :70]), [w.contiguous() for w in whole[:, :, 1:71]]):
        row, col = quantize_weights(weights, spec, spec if columnwise else "", rule="rceil")
        assert (col is not None) == columnwise and (row.groups, row.rows, row.k) == (3, 140, 70)
        for i, weight in enumerate(weights):
            alone = ops.quantize_2d(weight, spec, spec)
            for made, want in ((row, alone.row), (col, alone.col)):
                if made is not None:
                    one = made.group(i).checked("rhs")
                    assert one.codes.data_ptr() == made.group(i).codes.data_ptr()
                    assert one[2:] == want[2:]
                    equal(one.codes, want.codes)
                    assert torch.equal(one.scales, want.scales)


@pytest.mark.parametrize("columnwise", [False, True])
def test_weights_that_lie_turned_are_not_copied(hopper, monkeypatch, columnwise: bool) -> None:
    weights, spec = torch.randn(3, 70, 140).transpose(1, 2), f"{E4M3}@sm90:8"
    want = quantize_weights(weights.contiguous(), spec, spec if columnwise else "", rule="rceil")
    sources, read = sm90_grouped.sources, []

    def noted(weights: Tensor) -> object:
        found = sources(weights)
        read.append(found[0][0])
        return found

    monkeypatch.setattr(sm90_grouped, "sources", noted)
    got = quantize_weights(weights, spec, spec if columnwise else "", rule="rceil")
    assert read == [weights.data_ptr()]
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine[2:] == theirs[2:] and mine.codes.stride() == theirs.codes.stride()
            equal(mine.codes, theirs.codes)
            for i in range(3):  # the words behind the last tile are nobody's
                one, other = mine.group(i).checked("rhs"), theirs.group(i).checked("rhs")
                assert torch.equal(one.scales, other.scales)


@pytest.mark.parametrize(
    ("row", "col"),
    [
        (f"{E4M3}@rows", f"{E5M2}@grouped_cols"),
        (f"{E4M3}@rows", f"{E4M3}@sm90_k:8"),
        (f"{E4M3}@sm90_rows:8", f"{E4M3}@sm90_k:3"),
        (f"{E4M3}@sm90_rows:8", f"{E5M2}@sm90_k:8"),
    ],
)
def test_directions_of_two_kinds_are_made_one_by_one(hopper, row: str, col: str) -> None:
    x, groups = torch.randn(60, 70), Groups(torch.tensor([20, 20, 53]))
    both = quantize_grouped(x, groups, row, col, rule="rceil", col_sum=True)
    assert hopper == ["quantize_grouped"] * ("sm90" in row) + ["quantize_grouped"] * ("sm90" in col)
    for name, spec in (("row", row), ("col", col)):
        want = getattr(quantize_grouped(x, groups, **{name: spec}, rule="rceil"), name)
        got = getattr(both, name)
        assert got[2:] == want[2:]
        equal(got.codes, want.codes)
        assert torch.equal(got.scales, want.scales)
    equal(both.col_sum, torch.stack([x[:20].sum(0), torch.zeros(70), x[20:53].sum(0)]))


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
def test_packed_tokens_need_the_native_quantizer_where_the_device_knows_splits(
    hopper, monkeypatch
) -> None:
    hide_splits(monkeypatch)
    monkeypatch.setattr("te_mx.backends.reference.grouped.known_to_host", lambda offs: False)
    monkeypatch.setattr("te_mx.backends.native.RULES", ("rceil", "floor"))
    with pytest.raises(ValueError, match="only Hopper kernels write mxfp8_e4m3@sm90_rows:8"):
        quantize_grouped(
            torch.randn(9, 64), Groups(torch.tensor([4, 9])), f"{E4M3}@sm90_rows:8", rule="even"
        )


def test_what_does_not_fit_is_said(hopper) -> None:
    groups = Groups(torch.tensor([4, 9]))
    x, w = torch.randn(9, 64), list(torch.randn(2, 48, 64))
    q, spec = tokens_of(x, groups), f"{E4M3}@sm90:8"
    row, _ = quantize_weights(w, spec, rule="rceil")
    f32 = {"out_dtype": torch.float32}
    for lhs, rhs, said in (
        (q.row._replace(spec=spec), row, r"lhs must lie in groups of rows: .*N, got sm90:8"),
        (q.row, row._replace(spec=q.row.spec), r"a single matrix does not lie in .*'sm90_rows:8'"),
        (q.row, row._replace(scales=row.scales[:, :, :1]),
         r"rhs: mxfp8_e4m3 \[2, 48, 64\] in layout 'sm90:8' needs .*got .*\(2, 1, 1, 132\)"),
        (q.row, row._replace(spec=f"{E4M3}@rows"),
         r"rhs: mxfp8_e4m3 \[2, 48, 64\] in layout 'rows' needs .*scales \(2, 48, 2\), got"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            gemm_rows(lhs, rhs, groups, **f32)
    for lhs, rhs, name in ((q.row, q.col, "lhs"), (q.col, q.row, "rhs")):
        lhs, rhs = (side._replace(rows=64, k=9) for side in (lhs, rhs))
        with pytest.raises(ValueError, match=rf"{name} must lie in groups of k: .*got sm90_rows:8"):
            gemm_k(lhs, rhs, groups, **f32)
    for row_spec, col_spec in ((f"{E4M3}@sm90:8", ""), ("", f"{E4M3}@rows")):
        with pytest.raises(ValueError, match=r"(row|col) must lie in groups of (rows|k): layout"):
            quantize_grouped(x, groups, row_spec, col_spec, rule="rceil")
    long = q.col._replace(k=300)
    with pytest.raises(ValueError, match=r"lhs: mxfp8_e4m3 \[64, 300\] .*codes \(64, 512\).*got"):
        gemm_k(long, long, groups, **f32)
    with pytest.raises(ValueError, match=r"offs must be end offsets that rise"):
        gemm_rows(q.row, row, Groups(torch.tensor([4, 99])), **f32)
    with pytest.raises(ValueError, match=r"offs must be end offsets that rise"):
        gemm_k(q.col, q.col, Groups(torch.tensor([4, 99])), **f32)


def test_products_are_those_of_what_the_operands_decode_to(hopper) -> None:
    LAST_RUN.pop(7, None)
    splits, k, n = [40, 0, 90], 200, 33
    offs = torch.tensor(splits).cumsum(0)
    x, w = torch.randn(140, k), list(torch.randn(3, n, k))
    tokens = tokens_of(x, Groups(offs)).row
    row, _ = quantize_weights(w, f"{E4M3}@sm90:8", rule="rceil")
    bias = torch.randn(3, n)
    y = gemm_rows(tokens, row, Groups(offs), bias=bias, out_dtype=torch.float32, tag=7)
    assert LAST_RUN.pop(7) == "sm90_adaptive"
    assert bool((y[130:] == 0).all())
    for i, (end, count) in enumerate(zip(offs.tolist(), splits, strict=True)):
        if count:
            lhs = layout.rows_of(tokens, end - count, end, i)
            values = sm90_tiles.packed_values(lhs, k, "e4m3")
            want = values @ sm90_tiles.packed_values(row.group(i), k, "e4m3").t() + bias[i]
            torch.testing.assert_close(y[end - count : end], want.float(), rtol=1e-5, atol=1e-4)
