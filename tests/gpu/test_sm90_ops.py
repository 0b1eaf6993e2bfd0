"""Quantize, pack and dequantize through the ops on CUDA: the bytes of the CPU backend."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import quantize_oracle
import strategies
import torch

import te_mx
from te_mx import ops
from te_mx.backends import sm90_layout
from te_mx.backends.base import PLAIN

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = pytest.mark.parametrize("form", ["transposed", "plain"], ids=["transposed", "as_it_lies"])
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


def assert_parts(got, want):
    for name, mine, theirs in zip(want._fields, got, want, strict=True):
        if name == "col_sum":
            continue
        assert (mine is None) == (theirs is None), name
        if theirs is not None:
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.cpu(), theirs), name


def assert_packed(codes, words, plain, fmt, spread):
    want = sm90_layout.pack(*plain, fmt, spread)
    assert torch.equal(codes.cpu(), want.codes[:, : codes.shape[1]])
    assert torch.equal(words.cpu(), want.scales)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids="-".join)
def test_codes_and_scales_are_those_of_the_cpu(source, dtype, form):
    for i, fmt in itertools.product(range(len(SHAPES)), ("e4m3", "e5m2")):
        rule = ("rceil", "floor")[(i + (fmt == "e5m2")) % 2]
        x = matrix(source, *SHAPES[i], dtype)
        for directions in ((True, form), (False, form), (True, None)):
            if directions[1] is None and form == "plain":
                continue  # seen with the other form
            args = dict(zip(("rowwise", "columnwise"), directions, strict=True), scale_rule=rule)
            assert_parts(ops.quantize_2d(x.cuda(), fmt, **args), ops.quantize_2d(x, fmt, **args))


@pytest.mark.parametrize("spread", [0, 3, 8])
@pytest.mark.parametrize("source", SOURCES, ids="-".join)
def test_packed_operands_are_the_plain_bytes_packed(source, spread):
    shapes = ((1, 200), (200, 1), (129, 257), (40, 1031))
    for i, fmt in itertools.product(range(len(shapes)), ("e4m3", "e5m2")):
        x = matrix(source, *shapes[i], DTYPES[(i + spread) % 3])
        args = {"rowwise": True, "columnwise": "transposed", "scale_rule": "rceil"}
        plain = ops.quantize_2d(x, fmt, **args)
        got = ops.quantize_2d(x.cuda(), fmt, **args, spread=spread)
        assert_packed(got.row_codes, got.row_scales, plain[:2], fmt, spread)
        assert_packed(got.col_codes, got.col_scales, plain[2:4], fmt, spread)


@FORMS
@pytest.mark.parametrize("source", SOURCES, ids="-".join)
def test_a_standing_operand_is_the_same_operand_packed(source, form):
    order = "k_last" if form == "transposed" else "k_first"
    for shape, fmt, spread in itertools.product(
        ((200, 1), (129, 257)), ("e4m3", "e5m2"), (0, 3, 8)
    ):
        x = matrix(source, *shape, torch.float32)
        args = {"rowwise": False, "columnwise": form, "scale_rule": "rceil"}
        _, _, codes, scales, _ = ops.quantize_2d(x.cuda(), fmt, **args)
        operand = ops.Operand(codes, scales, fmt, order)
        got = ops.standing_2d(operand, "a", ops.Mode("adaptive", spread))
        assert got.order == "sm90"
        args["columnwise"] = "transposed"
        plain = ops.quantize_2d(x, fmt, **args)[2:4]
        assert_packed(got.codes, got.scales, plain, fmt, spread)
        assert ops.standing_2d(operand, "a", ops.Mode("exact")) is operand
        assert ops.standing_2d(got, "a", ops.Mode("adaptive", spread)) is got


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


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(strided(1, 1, torch.float32)))
@pytest.mark.parametrize("shape", [(130, 200), (64, 33), (5, 256)], ids=str)
def test_any_strides(shape, name, dtype, form):
    x = strided(*shape, dtype)[name]
    view = on_the_device(x)
    args = {"rowwise": True, "columnwise": form, "scale_rule": "rceil"}
    want = ops.quantize_2d(x.resolve_neg(), "e4m3", **args)
    assert_parts(ops.quantize_2d(view, "e4m3", **args), want)


@FORMS
@pytest.mark.parametrize("shape", [(3, 70, 96), (2, 1, 5, 33), (64,)], ids=str)
def test_mxtensors_are_equal_and_decode_alike(shape, form):
    transposed = form == "transposed"
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, shape).float())
    want = te_mx.quantize(x, columnwise=True, columnwise_transposed=transposed)
    got = te_mx.quantize(x.cuda(), columnwise=True, columnwise_transposed=transposed)
    assert got.device.type == "cuda"
    assert got.to("cpu").equal(want)
    for dtype in (*DTYPES, torch.float64):
        for usage in ("rowwise", "columnwise"):
            assert torch.equal(got.dequantize(dtype, usage).cpu(), want.dequantize(dtype, usage))


def test_the_default_form_is_what_the_gemm_reads_best():
    made = te_mx.quantize(torch.randn(40, 50, device="cuda"), columnwise=True)
    assert made.columnwise_transposed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (300, 200), (4097, 65)], ids=str)
@pytest.mark.parametrize("spread", [PLAIN, 8])
def test_column_sums(shape, spread, dtype):
    x = strategies.tensor("outliers", *shape, 5, dtype).cuda()
    args = {"rowwise": True, "columnwise": "transposed", "scale_rule": "rceil", "spread": spread}
    sums = [ops.quantize_2d(x, "e4m3", col_sum=True, **args).col_sum for _ in range(3)]
    exact, magnitude = x.double().sum(0), x.double().abs().sum(0)
    assert sums[0].dtype == torch.float32
    assert ((sums[0].double() - exact).abs() <= shape[0] * 2.0**-24 * magnitude).all()
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("spread", [PLAIN, 8])
def test_nothing_to_quantize(shape, spread):
    x = torch.empty(shape, device="cuda")
    args = {"rowwise": True, "columnwise": "transposed", "scale_rule": "rceil", "spread": spread}
    got = ops.quantize_2d(x, "e4m3", col_sum=True, **args)
    assert got.row_codes.shape == shape
    assert got.col_codes.shape == shape[::-1]
    assert torch.equal(got.col_sum, torch.zeros(shape[1], device="cuda"))


@pytest.mark.parametrize("spread", [PLAIN, 8])
def test_ops_keep_the_rules_of_torch(spread):
    """Schema, fake kernels and strides, as torch.compile relies on them."""
    x = torch.randn(130, 70, device="cuda")
    checks = ("test_schema", "test_faketensor")
    args = ("e4m3", True, "transposed", "rceil", True, torch.float16, spread)
    torch.library.opcheck(torch.ops.te_mx.quantize.default, (x, *args), test_utils=checks)
    q = ops.quantize_2d(x, "e4m3", rowwise=True, columnwise=None, scale_rule="rceil", spread=spread)
    order = "k_last" if spread == PLAIN else "sm90"
    side = (q.row_codes, q.row_scales, None, "e4m3", order)
    for precision in ("adaptive", "exact") if spread == PLAIN else ("adaptive",):
        rest = (None, "", None, "", precision, 8, True, torch.bfloat16, torch.bfloat16, -1)
        torch.library.opcheck(
            torch.ops.te_mx.gemm.default, (*side, *side, *rest), test_utils=checks
        )
    if spread == PLAIN:
        given = (*side[:2], "e4m3", "k_last", 8)
        torch.library.opcheck(torch.ops.te_mx.pack_sm90.default, given, test_utils=checks)


@pytest.mark.parametrize("shapes", [((1024, 1024), (1024, 512)), ((300, 200), (4096, 4096))])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
def test_two_matrices_at_a_time(shapes, dtypes):
    """They overlap each other, and neither what made them nor what reads them."""
    source = [torch.randn(s, device="cuda", dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
    wide = {"rowwise": True, "columnwise": "transposed", "spread": 8}
    args = {"fmt": "e4m3", "scale_rule": "rceil", **wide}
    want = [ops.quantize_2d(x.neg(), **args, col_sum=i == 1) for i, x in enumerate(source)]
    for _ in range(20):
        first, second = (x.neg() for x in source)  # kernels that end just before
        calls = ops.Quantize(first, **args), ops.Quantize(second, **args, col_sum=True)
        got = ops.quantize_two_2d(*calls)
        copies = [None if part is None else part.clone() for parts in got for part in parts]
        wanted = [part for parts in want for part in parts]
        del got, first, second
        for mine, theirs in zip(copies, wanted, strict=True):
            assert (mine is None) == (theirs is None)
            assert theirs is None or torch.equal(mine, theirs)
