"""Quantize, pack and dequantize through the ops on CUDA: the bytes of the CPU backend."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import quantize_oracle
import strategies
import torch

import te_mx
from te_mx import _ops as ops
from te_mx._ops.quantize import parts_of
from te_mx.backends.sm90.layouts import tiles as sm90_tiles

E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COLUMNS = pytest.mark.parametrize("columns", ["rows", "cols"], ids=["transposed", "as_it_lies"])
LAYOUTS = pytest.mark.parametrize("layout", ["rows", "sm90:8"])
# One element, one row, one column, tails in both directions, odd tiles, whole tiles, long rows.
SHAPES = ((1, 1), (1, 200), (200, 1), (33, 70), (129, 257), (256, 128), (40, 1031))
SOURCES = [("strategies", kind) for kind in strategies.KINDS]
SOURCES += [("oracle", kind) for kind in quantize_oracle.KINDS]


def matrix(source, rows, cols, dtype):
    origin, kind = source
    if origin == "strategies":
        return strategies.tensor(kind, rows, cols, 7 * rows + cols, dtype)
    rng = np.random.default_rng(7 * rows + cols)
    with np.errstate(all="ignore"):
        x = torch.from_numpy(quantize_oracle.adversarial(rng, rows, cols, kind))
    return x.to(dtype)


def assert_sides(got, want):
    """The operands of two calls, sums aside."""
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert mine[2:] == theirs[2:]
            for one, other in zip(mine[:2], theirs[:2], strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one.cpu(), other)


def assert_packed(got, plain, spread):
    want = sm90_tiles.pack(plain.codes, plain.scales, plain.format.name, spread)
    assert got.spec == f"{plain.format.name}@sm90:{spread}"
    assert (got.rows, got.k) == (plain.rows, plain.k)
    assert torch.equal(got.codes.cpu(), want.codes[:, : got.k])
    assert torch.equal(got.scales.cpu(), want.scales)


@COLUMNS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids="-".join)
def test_codes_and_scales_are_those_of_the_cpu(source, dtype, columns):
    for i, fmt in itertools.product(range(len(SHAPES)), (E4M3, E5M2)):
        rule = ("rceil", "floor")[(i + (fmt == E5M2)) % 2]
        x = matrix(source, *SHAPES[i], dtype)
        row, col = f"{fmt}@rows", f"{fmt}@{columns}"
        for sides in ((row, col), ("", col), (row, "")):
            if sides[1] == "" and columns == "cols":
                continue  # seen with the other one
            got = ops.quantize_2d(x.cuda(), *sides, rule=rule)
            assert_sides(got, ops.quantize_2d(x, *sides, rule=rule))


@pytest.mark.parametrize("spread", [0, 3, 8])
@pytest.mark.parametrize("source", SOURCES, ids="-".join)
def test_packed_operands_are_the_plain_bytes_packed(source, spread):
    shapes = ((1, 200), (200, 1), (129, 257), (40, 1031))
    for i, fmt in itertools.product(range(len(shapes)), (E4M3, E5M2)):
        x = matrix(source, *shapes[i], DTYPES[(i + spread) % 3])
        plain = ops.quantize_2d(x, f"{fmt}@rows", f"{fmt}@rows")
        got = ops.quantize_2d(x.cuda(), *[f"{fmt}@sm90:{spread}"] * 2)
        assert_packed(got.row, plain.row, spread)
        assert_packed(got.col, plain.col, spread)


@COLUMNS
@pytest.mark.parametrize("source", SOURCES, ids="-".join)
def test_an_operand_that_stands_still_is_the_same_operand_packed(source, columns):
    for shape, fmt, spread in itertools.product(((200, 1), (129, 257)), (E4M3, E5M2), (0, 3, 8)):
        x = matrix(source, *shape, torch.float32)
        operand = ops.quantize_2d(x.cuda(), "", f"{fmt}@{columns}").col
        mode = ops.Mode("adaptive", spread)
        side, other = ("lhs", f"{E4M3}@rows") if fmt is E5M2 else ("rhs", "")
        got = ops.kept_form(operand, side, mode, other)
        plain = ops.quantize_2d(x, "", f"{fmt}@rows").col
        assert_packed(got, plain, spread)
        assert_packed(ops.convert_2d(operand, got.spec), plain, spread)
        assert ops.kept_form(operand, "lhs", ops.Mode("exact")) is operand
        assert ops.kept_form(got, side, mode, other) is got


def strided(rows, cols, dtype):
    x = strategies.tensor("outliers", 2 * rows + 3, 2 * cols + 5, 3, dtype)
    return {
        "transposed": x[:cols, :rows].t(),
        "padded": x[1 : rows + 1, 3 : cols + 3],
        "every second": x[: 2 * rows : 2, : 2 * cols : 2],
        "expanded rows": x[:1, :cols].expand(rows, cols),
        "expanded columns": x[:rows, :1].expand(rows, cols),
        "one number": x[0, 0].expand(rows, cols),
        "negated": torch._neg_view(x[:rows, :cols]),
        "off by one element": x.flatten()[1 : 1 + rows * cols].view(rows, cols),
    }


def on_the_device(x):
    """The same view of the same storage, where .cuda() would make some views dense."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    view = whole.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
    return torch._neg_view(view) if x.is_neg() else view


@COLUMNS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(strided(1, 1, torch.float32)))
@pytest.mark.parametrize("shape", [(130, 200), (64, 33), (5, 256)], ids=str)
def test_any_strides(shape, name, dtype, columns):
    x = strided(*shape, dtype)[name]
    view = on_the_device(x)
    sides = f"{E4M3}@rows", f"{E4M3}@{columns}"
    assert_sides(ops.quantize_2d(view, *sides), ops.quantize_2d(x.resolve_neg(), *sides))


@COLUMNS
@pytest.mark.parametrize("shape", [(3, 70, 96), (2, 1, 5, 33), (64,)], ids=str)
def test_mxtensors_are_equal_and_decode_alike(shape, columns):
    transposed = columns == "rows"
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, shape).float())
    want = te_mx.quantize(x, columnwise=True, columnwise_transposed=transposed)
    got = te_mx.quantize(x.cuda(), columnwise=True, columnwise_transposed=transposed)
    assert got.device == x.cuda().device
    assert got.to("cpu").equal(want)
    for dtype in (*DTYPES, torch.float64):
        for usage in ("rowwise", "columnwise"):
            assert torch.equal(got.dequantize(dtype, usage).cpu(), want.dequantize(dtype, usage))


def test_the_default_form_is_what_the_gemm_reads_best():
    made = te_mx.quantize(torch.randn(40, 50, device="cuda"), columnwise=True)
    assert made.columnwise_transposed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (300, 200), (4097, 65)], ids=str)
@LAYOUTS
def test_column_sums(shape, layout, dtype):
    x = strategies.tensor("outliers", *shape, 5, dtype).cuda()
    sides = [f"{E4M3}@{layout}"] * 2
    sums = [ops.quantize_2d(x, *sides, col_sum=True).col_sum for _ in range(3)]
    exact, magnitude = x.double().sum(0), x.double().abs().sum(0)
    assert sums[0].dtype == torch.float32
    assert ((sums[0].double() - exact).abs() <= shape[0] * 2.0**-24 * magnitude).all()
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
@LAYOUTS
def test_nothing_to_quantize(shape, layout):
    x = torch.empty(shape, device="cuda")
    got = ops.quantize_2d(x, *[f"{E4M3}@{layout}"] * 2, col_sum=True)
    assert got.row.codes.shape == shape
    assert got.col.codes.shape == shape[::-1]
    assert torch.equal(got.col_sum, torch.zeros(shape[1], device="cuda"))


@LAYOUTS
def test_ops_keep_the_rules_of_torch(layout):
    """Schema, fake kernels and strides, as torch.compile relies on them."""
    x, spec = torch.randn(130, 70, device="cuda"), f"{E4M3}@{layout}"
    checks = ("test_schema", "test_faketensor")

    def check(op, *args):
        torch.library.opcheck(op.default, args, test_utils=checks)

    check(torch.ops.te_mx.quantize, x, spec, spec, "rceil", True, torch.float16)
    codes, scales, _, rows, k = ops.quantize_2d(x, spec).row[:5]
    side = (codes, scales, None, spec, rows, k)
    for precision in ("adaptive", "exact") if layout == "rows" else ("adaptive",):
        rest = (None, "", None, "", precision, 8, True, torch.bfloat16, torch.bfloat16, -1)
        check(torch.ops.te_mx.gemm, *side, *side, *rest)
    if layout == "rows":
        check(torch.ops.te_mx.convert, codes, scales, spec, rows, k, f"{E4M3}@sm90:8")
        check(torch.ops.te_mx.dequantize, codes, scales, spec, rows, k, torch.bfloat16)


@pytest.mark.parametrize("shapes", [((1024, 1024), (1024, 512)), ((300, 200), (4096, 4096))])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
def test_two_matrices_at_a_time(shapes, dtypes):
    """They overlap each other, and neither what made them nor what reads them."""
    source = [torch.randn(s, device="cuda", dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
    sides = [f"{E4M3}@sm90:8"] * 2
    want = [ops.quantize_2d(x.neg(), *sides, col_sum=i == 1) for i, x in enumerate(source)]
    wanted = [part for made in want for part in parts_of(made)]
    for _ in range(20):
        first, second = (x.neg() for x in source)  # kernels that end just before
        calls = ops.Quantize(first, *sides, "rceil"), ops.Quantize(second, *sides, "rceil", True)
        got = ops.quantize_two_2d(*calls)
        copies = [part.clone() for made in got for part in parts_of(made)]
        del got, first, second
        for mine, theirs in zip(copies, wanted, strict=True):
            assert torch.equal(mine, theirs)
