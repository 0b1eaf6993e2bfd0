"""The reference backend against ml_dtypes, numpy and fp64: it is the specification of all
others.
"""

from __future__ import annotations

import format_oracle
import native_words as reference
import numpy as np
import oracles
import pytest
import strategies as our
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_words import Operand

from te_mx import formats
from te_mx.dispatch.calls import Epilogue

# (fmt, amax, scale byte): byte-exact cases of the rceil rule that Transformer Engine and torchao
# agree on.
GOLDEN = [
    ("e4m3", 0.0, 0), ("e4m3", 0.875, 118), ("e4m3", 0.9, 119), ("e4m3", 1.0, 119),
    ("e4m3", 1.75, 119), ("e4m3", 1.7578125, 120), ("e4m3", 3.5, 120), ("e4m3", 447.0, 127),
    ("e4m3", 448.0, 127), ("e4m3", 449.0, 128), ("e4m3", 57344.0, 134),
    ("e4m3", 65504.0, 135), ("e4m3", 3.3895e38, 247),
    ("e4m3", 2.0**-126, 0), ("e4m3", 2.0**-149, 0), ("e4m3", float("inf"), 255),
    ("e4m3", float("nan"), 255),
    ("e5m2", 1.0, 112), ("e5m2", 1.75, 112), ("e5m2", 2.0, 113), ("e5m2", 57344.0, 127),
]  # fmt: skip


def quantize(x, fmt="e4m3", rule="rceil", rowwise=True, columnwise=None, col_sum=False):
    return reference.quantize(x, fmt, rowwise, columnwise, rule, col_sum)


def same(x: torch.Tensor, y: np.ndarray) -> bool:
    return np.array_equal(x.numpy(), y)


@pytest.mark.parametrize(("fmt", "amax", "byte"), GOLDEN)
def test_golden_scales(fmt, amax, byte):
    for sign in (1.0, -1.0):
        parts = quantize(torch.tensor([[0.0, sign * amax]]), fmt)
        assert parts.row_scales.item() == byte


@given(x=our.matrices(), fmt=our.FORMATS, rule=our.RULES)
def test_quantize_matches_numpy(x, fmt, rule):
    parts = quantize(x, fmt, rule, columnwise="plain", col_sum=True)
    codes, scales = oracles.quantize(oracles.numpy_of(x), fmt, rule)
    assert same(parts.row_codes, codes)
    assert same(parts.row_scales, scales)
    codes, scales = oracles.columnwise(oracles.numpy_of(x), fmt, rule)
    assert same(parts.col_codes, codes)
    assert same(parts.col_scales, scales)
    transposed = quantize(x, fmt, rule, rowwise=False, columnwise="transposed")
    assert transposed.row_codes is None and transposed.row_scales is None
    assert same(transposed.col_codes, codes.T)
    assert same(transposed.col_scales, scales.T)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_quantize_every_bf16(fmt, rule):
    """All 65536 bf16 numbers, each beside an amax of 1 and alone in its block."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:, None]
    for x in (every, torch.cat([every, torch.ones_like(every)], 1)):
        parts = quantize(x, fmt, rule)
        codes, scales = oracles.quantize(oracles.numpy_of(x), fmt, rule)
        assert same(parts.row_codes, codes)
        assert same(parts.row_scales, scales)


def test_scale_boundary_of_subnormal_quotients():
    """Every fp32 amax around 448 * 2^-127 and 448 * 2^-126, where the quotient leaves the normal
    range.
    """
    for fmt in ("e4m3", "e5m2"):
        name = format_oracle.OF_ELEMENT[fmt]
        for power in (-127, -126, -125):
            middle = np.float32(format_oracle.MAX[name] * 2.0**power).view(np.int32)
            amax = np.arange(middle - 40, middle + 40, dtype=np.int32).view(np.float32)[:, None]
            expected = format_oracle.scale_bytes(amax[:, 0], name, "rceil")
            assert same(quantize(torch.from_numpy(amax), fmt).row_scales[:, 0], expected)


@given(x=our.matrices(our.FINITE_KINDS), fmt=our.FORMATS)
def test_rceil_does_not_saturate(x, fmt):
    """Rounding is the only error: half a step of the largest element at most."""
    parts = quantize(x, fmt)
    exact = oracles.numpy_of(x).astype(np.float64)
    got = oracles.values(parts.row_codes.numpy(), parts.row_scales.numpy(), fmt)
    element = formats.get(fmt).element
    exponents = parts.row_scales.numpy().astype(np.float64) - 127
    step = np.exp2(exponents + element.emin - element.mantissa_bits)
    step = np.repeat(step, 32, 1)[:, : x.shape[1]]
    relative = np.abs(exact) * 2.0 ** -(element.mantissa_bits + 1)
    assert (np.abs(got - exact) <= np.maximum(relative, step / 2)).all()


@given(seed=our.SEEDS, shift=st.integers(-40, 40), fmt=our.FORMATS, rule=our.RULES)
def test_scaling_a_block_moves_its_byte(seed, shift, fmt, rule):
    x = torch.from_numpy(our.array("normal", 3, 32, seed))
    one, other = quantize(x, fmt, rule), quantize(x * 2.0**shift, fmt, rule)
    assert torch.equal(one.row_codes, other.row_codes)
    assert torch.equal(one.row_scales.int() + shift, other.row_scales.int())


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush denormals")
def test_quantize_ignores_the_denormal_mode():
    x = torch.from_numpy(our.array("tiny", 16, 64, 7))
    expected = quantize(x)
    torch.set_flush_denormal(True)
    try:
        got = quantize(x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got.row_codes, expected.row_codes)
    assert torch.equal(got.row_scales, expected.row_scales)


def test_negative_zero_keeps_its_sign():
    parts = quantize(torch.tensor([[0.0, -0.0, -1e-30, 1.0]]))
    assert parts.row_codes.tolist()[0][:3] == [0, 0x80, 0x80]


def test_torchao_agrees():
    """torchao's eager quantizer on finite data (it has another rule for NaN)."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    modes = {"rceil": config.ScaleCalculationMode.RCEIL, "floor": config.ScaleCalculationMode.FLOOR}
    for kind in ("normal", "outliers", "row_scales", "block_scales"):
        x = torch.from_numpy(our.array(kind, 64, 128, 3))
        for fmt in ("e4m3", "e5m2"):
            for rule, mode in modes.items():
                scales, codes = mx.to_mx(x, formats.get(fmt).element.torch_dtype, 32, mode)
                parts = quantize(x, fmt, rule)
                assert torch.equal(parts.row_scales, scales.view(torch.uint8).view(64, 4))
                assert torch.equal(parts.row_codes, codes.view(torch.uint8).view(64, 128))


# --------------------------------------------------------------------------------------- dequantize
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_dequantize_every_code_and_scale(fmt):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 8))
    exact = oracles.values(codes, scales, fmt)
    got = reference.dequantize(
        torch.from_numpy(codes), torch.from_numpy(scales), fmt, "k_last", torch.float64
    )
    np.testing.assert_array_equal(got.numpy(), exact)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = reference.dequantize(
            torch.from_numpy(codes), torch.from_numpy(scales), fmt, "k_last", dtype
        )
        expected = (
            torch.from_numpy(exact).float().to(dtype)
        )  # fp64 to fp32 is exact here, but for Inf
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_dequantize_k_first():
    x = torch.from_numpy(our.array("row_scales", 70, 5, 1))
    parts = quantize(x, rowwise=False, columnwise="plain")
    turned = quantize(x.t())
    got = reference.dequantize(parts.col_codes, parts.col_scales, "e4m3", "k_first", torch.float32)
    expected = reference.dequantize(
        turned.row_codes, turned.row_scales, "e4m3", "k_last", torch.float32
    )
    assert torch.equal(got, expected.t())


# --------------------------------------------------------------------------------------------- gemm
def operand(kind, rows, k, seed, fmt="e4m3", order="k_last"):
    x = torch.from_numpy(our.array(kind, rows, k, seed))
    if order == "k_last":
        parts = quantize(x, fmt)
        return Operand(parts.row_codes, parts.row_scales, fmt, order)
    parts = quantize(x.t(), fmt, rowwise=False, columnwise="plain")
    return Operand(parts.col_codes, parts.col_scales, fmt, order)


def exact_values(o: Operand) -> np.ndarray:
    codes, scales = (o.codes, o.scales) if o.order == "k_last" else (o.codes.t(), o.scales.t())
    return oracles.values(codes.contiguous().numpy(), scales.contiguous().numpy(), o.fmt)


@given(
    m=our.SIZES, n=our.SIZES, k=our.SIZES, seed=our.SEEDS, kind=st.sampled_from(our.FINITE_KINDS),
    formats=st.tuples(our.FORMATS, our.FORMATS), order=st.sampled_from(["k_last", "k_first"]),
)  # fmt: skip
def test_gemm_bound_and_orders(m, n, k, seed, kind, formats, order):
    a = operand(kind, m, k, seed, formats[0], order)
    b = operand("outliers", n, k, seed + 1, formats[1])
    out = torch.empty(n, m)
    reference.gemm(a, b, Epilogue(), out, None)
    oracles.assert_gemm(out, exact_values(a), exact_values(b))


def test_relative_matmul_of_other_devices():
    """The fp32 path that devices without fast fp64 take, run on the CPU."""
    a, b = operand("row_scales", 33, 97, 1), operand("block_scales", 9, 97, 2, "e5m2")
    out = reference.relative_matmul(a, b)
    oracles.assert_gemm(out, exact_values(a), exact_values(b))
    a, b = operand("special", 33, 97, 1, "e4m3", "k_first"), operand("normal", 9, 97, 2)
    assert np.array_equal(
        reference.relative_matmul(a, b).isnan(), np.isnan(exact_values(b) @ exact_values(a).T)
    )
    assert (
        reference.relative_matmul(operand("normal", 3, 0, 1), operand("normal", 2, 0, 1)).any() == 0
    )


def test_gemm_extreme_scales():
    """Scale bytes at both ends meet: the product is representable though neither factor nor 2^e is
    in fp32's middle.
    """
    for byte_a, byte_b in ((254, 0), (0, 254), (240, 20), (127, 127), (60, 60)):
        one = torch.full((1, 32), 0x38, dtype=torch.uint8)  # 1.0 in e4m3
        a = Operand(one, torch.full((1, 1), byte_a, dtype=torch.uint8), "e4m3", "k_last")
        b = Operand(one, torch.full((1, 1), byte_b, dtype=torch.uint8), "e4m3", "k_last")
        out = torch.empty(1, 1)
        reference.gemm(a, b, Epilogue(), out, None)
        assert out.item() == 32 * 2.0 ** (byte_a + byte_b - 254)
