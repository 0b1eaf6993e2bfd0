"""What every registered layout must do with every format that it takes."""

from __future__ import annotations

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_mx import formats, layouts
from te_mx.layouts.operand import Operand

NAMES = [name.replace(":N", f":{n}") for name in layouts.names() for n in (0, 8)]
LAYOUTS = [layouts.get(name) for name in dict.fromkeys(NAMES)]
WHOLE = [one for one in LAYOUTS if one.of_matrices]
GROUPED = [one for one in LAYOUTS if not one.of_matrices]
PAIRS = [(layouts.spec_of(f"{fmt}@{one.name}")) for one in WHOLE for fmt in formats.names()
         if one.takes(formats.get(fmt))]  # fmt: skip
every_pair = pytest.mark.parametrize("spec", PAIRS, ids=lambda s: f"{s.format}@{s.layout.name}")
SIZES = strategies.POSITIVE


def packed(spec, rows, k, seed):
    x = torch.from_numpy(strategies.array("normal", rows, k, seed))
    codes, scales = spec.format.quantize(x, spec.format.scaling.rules[0])
    made = spec.layout.pack(spec.format, codes, scales, k)
    return (codes, scales), made


def operand_of(spec, made, rows, k):
    return Operand(*made, f"{spec.format}@{spec.layout.name}", rows, k)


def test_there_are_layouts_of_both_kinds():
    assert WHOLE and GROUPED and PAIRS


@every_pair
@given(rows=SIZES, k=SIZES, seed=strategies.SEEDS)
def test_packed_parts_have_their_shapes_and_give_bytes_back_or_the_layout_says_no(
    spec, rows, k, seed
):
    plain, made = packed(spec, rows, k, seed)
    shapes = spec.layout.shapes(spec.format, rows, k)
    assert (tuple(made[0].shape), tuple(made[1].shape)) == shapes
    assert made[0].dtype == torch.uint8 and made[1].dtype == spec.layout.scales_dtype(spec.format)
    room = spec.layout.empty(spec.format, rows, k, torch.device("cpu"))
    assert [(t.shape, t.dtype) for t in room] == [(t.shape, t.dtype) for t in made]
    values = spec.layout.values(spec.format, *made, k, torch.float32)
    exact = spec.format.dequantize(*plain, k, torch.float32)
    assert values.shape == (rows + -rows % spec.layout.row_block, k)
    values = values[:rows]
    if spec.layout.exact:
        back = spec.layout.unpack(spec.format, *made, k)
        assert all(torch.equal(b[: len(p)], p) for b, p in zip(back, plain, strict=True))
        assert torch.equal(values, exact)
    else:  # scales were aligned: an element moves by a part of the largest of its block
        largest = exact.abs().amax() if exact.numel() else torch.tensor(0.0)
        assert bool(((values - exact).abs() <= largest * 2.0**-3).all())


@every_pair
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (65, 97), (128, 256)])
def test_an_operand_is_checked_by_its_layout(spec, rows, k):
    _, made = packed(spec, rows, k, 3)
    operand = operand_of(spec, made, rows, k)
    assert operand.checked("side").rows == rows
    for wrong in (
        operand._replace(rows=rows + spec.layout.row_block),
        operand._replace(k=k + 129),
        operand._replace(codes=made[0].to(torch.int16)),
        operand._replace(scales=made[1].to(torch.int16)),
        operand._replace(scales=made[1][..., :0]),
    ):
        with pytest.raises(ValueError, match=r"side: .*needs .*got"):
            wrong.checked("side")


@every_pair
def test_strided_parts_are_made_contiguous(spec):
    (rows, k), seed = (65, 97), 3
    _, made = packed(spec, rows, k, seed)
    apart = [torch.empty((*t.shape, 2), dtype=t.dtype)[..., 0].copy_(t) for t in made]
    operand = operand_of(spec, made, rows, k)
    strided = operand._replace(codes=apart[0], scales=apart[1]).checked("side")
    assert torch.equal(strided.codes, made[0]) and torch.equal(strided.scales, made[1])
    assert strided.codes.stride() == operand.checked("side").codes.stride()


@pytest.mark.parametrize("layout", GROUPED, ids=lambda one: one.name)
@given(rows=SIZES, k=SIZES, groups=st.integers(1, 5))
def test_grouped_layouts_have_room_for_every_split(layout, rows, k, groups):
    for name in formats.names():
        fmt = formats.get(name)
        if not layout.takes(fmt):
            continue
        shapes = layout.grouped_shapes(fmt, rows, k, groups)
        room = layout.grouped_empty(fmt, rows, k, groups, torch.device("cpu"))
        assert (tuple(room[0].shape), tuple(room[1].shape)) == shapes
        assert room[0].dtype == torch.uint8 and room[1].dtype == layout.scales_dtype(fmt)


@pytest.mark.parametrize("name", ["", "no", "sm90", "sm90:", "sm90:x", "rows:1"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="layout must be one of"):
        layouts.get(name)


def test_a_taken_name_is_refused():
    before = layouts.names()
    for name in ("rows", "sm90"):
        with pytest.raises(ValueError, match=f"the name '{name}' is taken by a layout"):
            layouts.register_family(name, lambda number: layouts.ROWS)
    with pytest.raises(ValueError, match="the name 'rows' is taken by a layout"):
        layouts.register(layouts.ROWS)
    assert layouts.names() == before


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.name)
def test_what_a_layout_is_not_it_says(layout):
    whole = formats.get("mxfp8_e4m3")
    if not layout.class_names:
        with pytest.raises(NotImplementedError, match="has no classes of tiles"):
            layout.classes(whole, *whole.quantize(torch.zeros(1, 32), "rceil"))
    if not layout.alone:
        part = Operand(torch.empty(0), torch.empty(0), f"{whole}@rows", 0, 0)
        with pytest.raises(NotImplementedError, match="is not that of tokens"):
            layout.put_group(part, part, 0, 0, 0)
        with pytest.raises(NotImplementedError, match="is not that of tokens"):
            layout.group_of(part, 0, 0, 0)
