"""The kernels of the Hopper backend on a machine without one: fake_sm90.py stands in for the
native module, and CPU tensors for those on the device.
"""

from __future__ import annotations

import as_on_hopper
import fake_sm90
import pytest
import strategies
import torch

import te_mx
from te_mx import _ops as ops
from te_mx._ops import Epilogue, Mode, Quantize
from te_mx.backends.base import PLAIN
from te_mx.backends.reference import gemm
from te_mx.backends.reference.quantize import quantize as reference_quantize
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.backends.sm90.quantize import Quantizer
from te_mx.dispatch import run
from te_mx.runtime.kernel_log import LAST_RUN

# (m, n, k): tails everywhere, one of each, whole tiles.
SHAPES = ((75, 130, 200), (1, 1, 1), (128, 128, 128))
E4M3, E5M2, FP4 = "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"
PAIRS = ((E4M3, E4M3), (FP4, FP4), (E4M3, FP4), (E5M2, E4M3))


@pytest.fixture(autouse=True)
def hopper(threads):
    threads(1)  # many small operators
    with as_on_hopper.hopper():
        yield


def operands(m, n, k, kind="block_scales", layouts=("rows", "cols"), fmts=(E4M3, E4M3)):
    """Plain operands lhs [m, k] and rhs [n, k]."""
    made = []
    for rows, layout, fmt, seed in zip((m, n), layouts, fmts, (1, 2), strict=True):
        x = strategies.tensor(kind, k, rows, seed, torch.float32).clamp(-1e9, 1e9)
        made.append(reference_quantize(Quantize(x, "", f"{fmt}@{layout}", "rceil")).col)
    return made


def packed(operand, spread=8):
    codes, scales = operand.codes, operand.scales
    if operand.layout.k_first:
        codes, scales = codes.t().contiguous(), scales.t().contiguous()
    else:
        codes = operand.format.unpack(codes, operand.k)
    made = sm90_tiles.pack(codes, scales, operand.format.name, spread)
    spec = f"{operand.format.name}@sm90:{spread}"
    return ops.Operand(*made.operand_parts(codes), spec, operand.rows, operand.k)


def same_operand(got, want):
    assert (got is None) == (want is None)
    if want is not None:
        assert got[2:] == want[2:]
        assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)


def same_quantized(got, want):
    same_operand(got.row, want.row)
    same_operand(got.col, want.col)
    assert (got.col_sum is None) == (want.col_sum is None)
    if want.col_sum is not None:
        assert got.col_sum.dtype == want.col_sum.dtype
        assert torch.equal(got.col_sum, want.col_sum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", [PLAIN, 0, 8])
@pytest.mark.parametrize("shape", [(75, 130), (1, 1)], ids=str)
@pytest.mark.parametrize("fmt", [E5M2, FP4])
def test_quantize(fmt, shape, spread, dtype):
    x = strategies.tensor("outliers", *shape, 3, dtype)
    wide = torch.nn.functional.pad(x, (2, 3))[:, 2:-3]  # rows apart, off by two elements
    for given in (x, wide, x.t().contiguous().t()):
        for row, col, rule, sums in (
            ("rows", "", "floor", False),
            ("", "cols", "rceil", True),
            ("rows", "cols", "even", False),
            ("rows", "rows", "rceil", True),
        ):
            row, col = (
                layout and f"{fmt}@{layout if spread == PLAIN else f'sm90:{spread}'}"
                for layout in (row, col)
            )
            got = ops.quantize_2d(
                given, row, col, rule=rule, col_sum=sums, sum_dtype=torch.bfloat16
            )
            want = reference_quantize(Quantize(x, row, col, rule, sums, torch.bfloat16))
            same_quantized(got, want)
            for made in got[:2]:
                assert spread == PLAIN or made is None or made.codes.stride(0) % 16 == 0


def test_two_at_a_time():
    calls = (
        Quantize(torch.randn(75, 130).t(), f"{E4M3}@sm90:8", f"{E4M3}@sm90:8", "rceil"),
        Quantize(torch.randn(33, 40), "", f"{E5M2}@cols", "floor", True, torch.bfloat16),
    )
    for made in (run.quantize_two(*calls), ops.quantize_two_2d(*calls)):
        for got, what in zip(made, calls, strict=True):
            same_quantized(got, reference_quantize(what))


def test_two_at_a_time_are_one_call_on_a_gpu(monkeypatch):
    """As far as it shows without one: a tensor that says it is there."""

    class There(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr("te_mx._ops.quantize.is_direct", lambda *tensors: True)
    seen = []
    two = lambda self, one, plan, other: seen.append(plan) or (one, other)  # noqa: E731
    monkeypatch.setattr(Quantizer, "two", two)
    x, w = (torch.randn(40, 64).as_subclass(There) for _ in range(2))
    calls = [Quantize(t, f"{E4M3}@sm90:8", "", "rceil") for t in (x, w)]
    assert ops.quantize_two_2d(*calls) == tuple(calls) and len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmts", PAIRS[:2], ids=str)
def test_dequantize(fmts, dtype):
    for operand in operands(75, 130, 333, fmts=fmts):
        got = ops.dequantize_2d(operand, dtype)
        assert got.shape == (operand.rows, operand.k)
        assert torch.equal(got, operand.values(dtype))


@pytest.mark.parametrize("spread", [0, 8])
@pytest.mark.parametrize("shape", (*SHAPES, (5, 6, 77)), ids=str)
@pytest.mark.parametrize("fmts", PAIRS[:2], ids=str)
def test_pack(fmts, shape, spread):
    for operand in operands(*shape, fmts=fmts):
        want = packed(operand, spread)
        for got in (
            ops.convert_2d(operand, want.spec),
            ops.kept_form(operand, "lhs", Mode("adaptive", spread)),
        ):
            same_operand(got, want)
            assert got.codes.stride(0) % 16 == 0
            assert ops.kept_form(got, "lhs", Mode("adaptive", spread)) is got
        assert ops.kept_form(operand, "rhs", Mode("exact", spread)) is operand


@pytest.mark.parametrize("form", ["packed", "one packed", "plain"])
@pytest.mark.parametrize(
    ("shape", "fmts"),
    [(shape, PAIRS[0]) for shape in SHAPES] + [((75, 130, 77), fmts) for fmts in PAIRS[1:]],
    ids=str,
)
def test_gemm(shape, fmts, form, guarded):
    m, n, _ = shape
    lhs, rhs = operands(*shape, fmts=fmts)
    mode = Mode("adaptive", 3)
    ready = packed(lhs, 3), packed(rhs, 3)
    if form == "packed":
        lhs, rhs = ready
    elif form == "one packed":
        lhs = ready[0]
    old, gelu_in = torch.randn(m, n), torch.randn(m, n).half()
    bias = torch.randn(2 * n)[::2]
    for epilogue in (
        Epilogue(),
        Epilogue(bias=bias),
        Epilogue(bias=bias, gelu="tanh"),
        Epilogue(gelu="erf", gelu_in=gelu_in, bias_grad="result"),
        Epilogue(accumulate=True),
    ):
        out = old.clone()
        version = out._version
        got = ops.gemm_2d(
            lhs, rhs, epilogue, out=out, out_dtype=out.dtype, aux_dtype=torch.bfloat16, tag=5,
            mode=mode,
        )  # fmt: skip
        want, aux = old.clone(), torch.empty(m, n, dtype=torch.bfloat16)
        keeps = epilogue.gelu is not None and epilogue.gelu_in is None
        bias_grad = gemm.gemm(*ready, epilogue, want, aux if keeps else None)
        assert got.out is out and torch.equal(out, want) and out._version > version
        assert (got.aux is not None) == keeps
        assert not keeps or torch.equal(got.aux, aux)
        assert (got.bias_grad is None) == (bias_grad is None)
        assert bias_grad is None or torch.equal(got.bias_grad, bias_grad)
        assert LAST_RUN[5] == "sm90_adaptive"


@pytest.mark.parametrize("layout", ["rows", "cols"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gradient_of_a_plain_operand(shape, layout, guarded):
    lhs, rhs = operands(*shape, layouts=(layout, "cols"))
    got = ops.gemm_2d(lhs, rhs, Epilogue(bias_grad="operand"), out_dtype=torch.float32)
    assert torch.equal(got.bias_grad, lhs.values(torch.float64).sum(1).float())


@pytest.mark.parametrize("layout", ["rows", "cols", "sm90:8"])
def test_bias_gradient_of_an_operand_of_4_bits(layout, guarded):
    plain = "cols" if layout == "cols" else "rows"
    lhs, rhs = operands(75, 130, 77, "normal", (plain, "cols"), (FP4, FP4))
    given = lhs if layout == plain else ops.convert_2d(lhs, f"{FP4}@{layout}")
    got = ops.gemm_2d(given, rhs, Epilogue(bias_grad="operand"), out_dtype=torch.float32)
    want = lhs.values(torch.float64).sum(1).float()
    torch.testing.assert_close(got.bias_grad, want, rtol=1e-5, atol=1e-5)


def test_explain_says_what_becomes_of_4_bits():
    A, B = te_mx.quantize(torch.randn(40, 64)), te_mx.quantize(torch.randn(30, 64), fmt=FP4)
    told = te_mx.explain(A, B)
    assert told.kernel == "sm90_adaptive"
    assert "4-bit codes are unpacked to FP8 tiles before the main loop" in told.note


@pytest.mark.parametrize("k", [33, 40, 48])
def test_operands_whose_rows_lie_elsewhere_are_copied(k):
    sides = [packed(operand) for operand in operands(75, 130, k)]
    want = ops.gemm_2d(*sides, out_dtype=torch.float32)
    moved, unaligned = [], []
    for operand in sides:
        apart = torch.full((operand.rows, k + 64), 7, dtype=torch.uint8)[:, 3 : k + 3]
        words = torch.empty(*operand.scales.shape[:2], 140, dtype=torch.int32)[..., :132]
        moved.append(
            operand._replace(codes=apart.copy_(operand.codes), scales=words.copy_(operand.scales))
        )
        ld = operand.codes.stride(0)  # rows as far apart as they should be, from an odd address on
        odd = torch.zeros(operand.rows * ld + 1, dtype=torch.uint8)[1:].view(-1, ld)[:, :k]
        unaligned.append(operand._replace(codes=odd.copy_(operand.codes)))
    for given in (moved, unaligned):
        got = ops.gemm_2d(*given, out_dtype=torch.float32)
        assert torch.equal(got.out, want.out)
        for side in given:
            assert side.checked("lhs").codes.data_ptr() % 16 == 0


def test_exact_refuses_packed_operands():
    lhs, rhs = operands(5, 6, 64)
    for pair in ((packed(lhs), rhs), (lhs, packed(rhs)), (packed(lhs), packed(rhs))):
        with pytest.raises(ValueError, match=r"precision 'exact' needs plain operands.*sm90:8"):
            ops.gemm_2d(*pair, out_dtype=torch.float32, mode=Mode("exact"))


def test_what_native_code_refuses_runs_on_the_reference(monkeypatch, fresh_warnings):
    for name in ("quantize", "dequantize", "gemm"):
        monkeypatch.setattr(fake_sm90, name, lambda *_: 2)
    lhs, rhs = operands(5, 6, 64)
    x = torch.randn(5, 64)
    with pytest.warns(RuntimeWarning, match="quantize on cuda:0 .*native code does not take"):
        ops.quantize_2d(x, f"{E4M3}@rows")
    with pytest.warns(RuntimeWarning, match="dequantize on cuda:0 .*native code does not take"):
        ops.dequantize_2d(lhs, torch.float32)
    with pytest.warns(RuntimeWarning, match="gemm on cuda:0 .*native code does not take"):
        out = ops.gemm_2d(packed(lhs), packed(rhs), out_dtype=torch.float32, tag=5).out
    want = torch.empty(5, 6)
    gemm.gemm(packed(lhs), packed(rhs), Epilogue(), want, None)
    assert torch.equal(out, want) and LAST_RUN[5] == "reference"


def test_a_wrong_status_is_a_bug_that_shows(monkeypatch):
    monkeypatch.setattr(fake_sm90, "dequantize", lambda *_: 1)
    with pytest.raises(RuntimeError, match="status 1"):
        ops.dequantize_2d(operands(5, 6, 64)[0], torch.float32)
