"""Argument structs of native code as Python sees them: fields by name, parts, copies."""

from __future__ import annotations

import pytest

from te_mx import formats
from te_mx.backends import base

native = pytest.importorskip("te_mx._native")
ADDRESS = (1 << 63) + 4096  # the upper half of the address space belongs to nobody else
RECORDS = sorted(name for name, kind in vars(native).items() if isinstance(kind, type))


def fields(record) -> list[str]:
    return [name for name in dir(record) if not name.startswith("_") and name != "copy"]


def test_every_struct_is_there():
    assert {"Operand", "GemmArgs", "QuantizeArgs", "NormArgs", "LinearArgs"} <= set(RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_is_written_where_it_is_read(name):
    """Numbers that differ from field to field, so that no two fields share memory."""
    kind = getattr(native, name)
    record, fresh, told = kind(), kind(), {}
    assert repr(fresh) == f"{name}()"
    for number, field in enumerate(fields(record), 2):
        value = getattr(record, field)
        if type(value) in (int, float):
            told[field] = type(value)(number)
            setattr(record, field, told[field])
        elif type(value) is bool:
            told[field] = not value
            setattr(record, field, told[field])
    for field, value in told.items():
        assert getattr(record, field) == value
    for field, value in told.items():
        assert (f"{field}={value!r}" in repr(record)) == (value != getattr(fresh, field))
    assert repr(record.copy()) == repr(kind(**told)) == repr(record)
    assert repr(fresh) == f"{name}()"


def test_addresses_have_64_bits():
    args = native.GemmArgs(out=ADDRESS)
    assert args.out == ADDRESS
    with pytest.raises(OverflowError):
        args.out = -1
    with pytest.raises(OverflowError):
        args.out = 1 << 64
    with pytest.raises(OverflowError, match="does not fit in 32 bits"):
        args.threads = 1 << 31
    args.ldo = 1 << 40
    assert args.ldo == 1 << 40 and args.out == ADDRESS


def test_a_part_is_shown_where_it_lies_and_written_by_value():
    args = native.GemmArgs()
    side = native.Operand(rows=8, k=64)
    args.lhs = side
    side.rows = 9
    assert args.lhs_rows == 8
    part = args.lhs
    part.rows = 10
    assert args.lhs_rows == 10 and args.copy().lhs.rows == 10
    del args
    assert part.rows == 10 and part.k == 64
    with pytest.raises(TypeError, match=r"expected te_mx\._native\.Operand, got int"):
        native.GemmArgs(lhs=5)


def test_a_copy_is_one_of_its_own():
    plan = native.GemmArgs(ldo=64, lhs=native.Operand(rows=8, k=64))
    call = plan.copy(lhs_codes=4096, out=8192)
    assert (call.lhs_codes, call.lhs_rows, call.out, call.ldo) == (4096, 8, 8192, 64)
    assert (plan.lhs_codes, plan.out) == (0, 0)


def test_what_is_wrong_is_said():
    plan = native.GemmArgs()
    with pytest.raises(AttributeError, match="lhs_code"):
        plan.copy(lhs_code=1)
    with pytest.raises(AttributeError, match="rows"):
        native.GemmArgs(rows=1)
    with pytest.raises(AttributeError, match="out cannot be deleted"):
        del plan.out
    with pytest.raises(TypeError, match="by name"):
        plan.copy(1)
    with pytest.raises(TypeError, match="by name"):
        native.GemmArgs(1)
    with pytest.raises(TypeError):
        plan.out = "address"
    with pytest.raises(TypeError):
        native.gemm(native.QuantizeArgs())


def test_python_says_the_numbers_of_native_code():
    names = {"sm90": "tiles", "sm90_rows": "group_rows", "sm90_k": "group_k"}
    names["sm90_nvfp4"] = "standing"
    assert {names.get(k, k): v for k, v in base.LAYOUTS.items()} == native.LAYOUTS
    assert base.SCALE_RULES.items() <= native.SCALE_RULES.items()


def test_elements_are_described_alike_in_python_and_in_native_code():
    """The two definitions there are: te_mx/formats and mxtile."""
    table = {element["name"]: element for element in native.elements()}
    assert [element["id"] for element in native.elements()] == list(range(len(table)))
    elements = {formats.get(name).element for name in formats.names()}
    assert {"e4m3", "e5m2", "e3m2", "e2m3", "e2m1"} <= {element.name for element in elements}
    for element in elements:
        said = table[element.name]
        assert said == {"id": said["id"]} | {
            field: getattr(element, field) for field in said if field != "id"
        }
