"""Stochastic rounding and Hadamard transforms in the native quantizer, at every level: the bytes of
the formats' specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, SEEDS, tensor
from torch import Tensor

import te_mx
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu import grouped as cpu_grouped
from te_mx.backends.reference import grouped as reference_grouped
from te_mx.backends.reference import quantize as reference
from te_mx.dispatch import run
from te_mx.dispatch.calls import Groups, Quantize, QuantizeGroups
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import choose

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")
# Around chunks of 16 and 32, tiles of 64, and counters of four elements.
SIZES = st.sampled_from([1, 3, 15, 16, 17, 31, 32, 33, 48, 50, 63, 64, 65, 96, 130, 257])
# Exact sums are not asked for: transformed numbers stay inside fp32.
KINDS = st.sampled_from(["normal", "outliers", "block_scales", "zeros", "tiny", "special", "ties"])
FORMATS = ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2")
RULES = st.sampled_from(["rceil", "floor", "even"])
SIGNS = st.integers(0, 2**32 - 1)
NUMBERS = st.sampled_from([0, 1, 6, 2**32 - 5, 2**34 + 3])


def spec(data: st.DataObject, fmt: str, layouts: list[str]) -> str:
    layout = data.draw(st.sampled_from(layouts))
    if not layout:
        return ""
    size = data.draw(st.sampled_from([0, 16, 32]))
    transform = f"+rht{size}:0x{data.draw(SIGNS):08x}" if size else ""
    return f"{fmt}{transform}@{layout}"


def same(made, expected) -> None:
    for mine, theirs in zip(made[:2], expected[:2], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine.scales, theirs.scales)
            assert torch.equal(mine.codes, theirs.codes)
            assert mine.spec == theirs.spec


@pytest.mark.parametrize("fmt", FORMATS)
@given(rows=SIZES, cols=SIZES, dtype=DTYPES, kind=KINDS, data=st.data())
@settings(max_examples=20)
def test_bytes(isa: str, fmt: str, rows: int, cols: int, dtype, kind: str, data) -> None:
    x = tensor(kind, rows, cols, data.draw(SEEDS), dtype)
    if data.draw(st.booleans()):
        x = x.t().contiguous().t()
    row = spec(data, fmt, ["", "rows"])
    col = spec(data, fmt, ["cols", "rows"] if not row else ["", "cols", "rows"])
    rule, seed = data.draw(RULES), None
    if data.draw(st.booleans()):
        rule, seed = f"{rule}+sr", torch.tensor([data.draw(st.integers(-(2**63), 2**63 - 1))])
    first = data.draw(NUMBERS) if seed is not None else 0
    what = Quantize(x, row, col, rule, True, seed=seed, first=first)
    made, expected = run.quantize(what), reference.quantize(what)
    assert made is not None
    same(made, expected)
    plain = run.quantize(Quantize(x, f"{fmt}@rows", "", "rceil", True))
    assert plain is not None and plain.col_sum is not None and made.col_sum is not None
    assert torch.equal(made.col_sum.nan_to_num(), plain.col_sum.nan_to_num())


@given(
    sizes=st.lists(st.sampled_from([0, 1, 16, 31, 33, 50]), min_size=1, max_size=4),
    cols=st.sampled_from([5, 33, 64]), data=st.data(),
)  # fmt: skip
@settings(max_examples=15)
def test_groups(isa: str, sizes: list[int], cols: int, data: st.DataObject) -> None:
    """Elements are counted in the whole matrix, chunks from the first row of a group."""
    ends = torch.tensor(sizes).cumsum(0)
    x = tensor("normal", max(1, int(ends[-1]) + 2), cols, data.draw(SEEDS), torch.bfloat16)
    row, col = (spec(data, "mxfp4", [layout]) for layout in ("rows", "grouped_cols"))
    seed = torch.tensor([data.draw(SEEDS)])
    what = QuantizeGroups(x, Groups(ends), row, col, "rceil+sr", False, seed)
    made = cpu_grouped.CpuQuantizeGroups().run(what)
    assert made is not None
    same(made, reference_grouped.QuantizeGroupsReference().run(what))


def test_the_mean_is_the_number(isa: str) -> None:
    """1.2 of E2M1 becomes 1 or 1.5, 1.2 in the mean, by the seed alone."""
    x = torch.full((64, 1024), 1.2)
    x[:, ::32] = 6.0
    made = [
        te_mx.quantize(x, fmt="mxfp4", rounding="stochastic", seed=seed).dequantize()
        for seed in (1, 1, 2)
    ]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    rest: Tensor = made[0].view(64, 32, 32)[..., 1:]
    assert set(rest.unique().tolist()) == {1.0, 1.5}
    assert abs(rest.double().mean().item() - 1.2) < 0.005


def test_native_code_is_chosen(isa: str) -> None:
    place = place_of(torch.device("cpu"))
    for op, layout in (("quantize", "cols"), ("quantize_grouped", "grouped_cols")):
        specs = "mxfp4@rows", f"mxfp4+rht32:0x00000001@{layout}"
        problem = Problem(op, place, *specs, 64, 64, groups=2, ends="host", rule="rceil+sr")
        assert choose(problem)[0].name == "cpu"
