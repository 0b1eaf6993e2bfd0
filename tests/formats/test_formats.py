"""Every MX format against numpy, ml_dtypes and fp64: shapes with tails, all kinds of data,
all rules.
"""

from __future__ import annotations

import math

import format_oracle as oracle
import numpy as np
import pytest
import strategies as our
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_mx import _ops as ops
from te_mx import formats
from te_mx.formats.scaling import scale_bytes

RULES = ("rceil", "floor", "even")
# Those of blockwise FP8 have a file of their own.
NAMES = tuple(name for name in formats.names() if not name.startswith("fp8_"))
FORMATS = st.sampled_from(NAMES)
ANY_RULE = st.sampled_from(RULES)


def numpy_of(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float32).numpy()


@given(x=our.matrices(), name=FORMATS, rule=ANY_RULE)
def test_quantize_matches_the_oracle(x, name, rule):
    fmt = formats.get(name)
    rows, k = x.shape
    codes, scales = fmt.quantize(x, rule)
    expected, expected_scales = oracle.quantize(numpy_of(x), name, rule)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(fmt.unpack(codes, k).numpy(), expected)
    np.testing.assert_array_equal(codes.numpy(), oracle.pack(expected, oracle.BITS[name]))
    assert codes.shape == fmt.codes_shape(rows, k) and codes.is_contiguous()
    assert scales.shape == fmt.scales_shape(rows, k) and scales.is_contiguous()
    assert codes.dtype == torch.uint8 and scales.dtype == fmt.scaling.storage


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
@given(x=our.matrices(), name=FORMATS, rule=ANY_RULE)
def test_ops_give_the_bytes_and_values_of_the_format(x, name, rule):
    """Whatever kernel runs: rows as they are, columns where they lie in x."""
    fmt = formats.get(name)
    rows = len(x)
    made = ops.quantize_2d(x, f"{name}@rows", f"{name}@cols", rule=rule)
    codes, scales = fmt.quantize(x, rule)
    assert torch.equal(made.row.codes, codes) and torch.equal(made.row.scales, scales)
    col_codes, col_scales = fmt.quantize(x.t(), rule)
    assert torch.equal(made.col.codes, fmt.unpack(col_codes, rows).t())
    assert torch.equal(made.col.scales, col_scales.t())
    for operand, parts in ((made.row, (codes, scales)), (made.col, (col_codes, col_scales))):
        got = ops.dequantize_2d(operand, torch.bfloat16)
        expected = fmt.dequantize(*parts, operand.k, torch.bfloat16)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_bf16_beside_one(name):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:, None]
    x = torch.cat([every, torch.ones_like(every)], 1)
    codes, scales = formats.get(name).quantize(x, "rceil")
    expected, expected_scales = oracle.quantize(numpy_of(x), name, "rceil")
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.numpy(), oracle.pack(expected, oracle.BITS[name]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_scale_bytes_around_every_step(name, rule):
    """Bytes are monotone in amax, so the neighbours of the steps decide: max, 1.75 and 1 times
    every power of two, and where the quotient by max leaves the normal range.
    """
    steps = [oracle.MAX[name], 1.75, 1.0]
    middle = np.concatenate([np.ldexp(s, np.arange(-150, 128)) for s in steps])
    middle = middle[middle < 3.4e38].astype(np.float32).view(np.int32).astype(np.int64)
    bits = np.unique(np.clip(middle[:, None] + np.arange(-8, 9), 0, 0x7F800001))
    amax = bits.astype(np.int32)
    got = scale_bytes(torch.from_numpy(amax), formats.get(name).element, rule).numpy()
    assert (np.diff(got) >= 0).all()
    np.testing.assert_array_equal(got, oracle.scale_bytes(amax.view(np.float32), name, rule))


@given(
    seed=our.SEEDS, shift=st.integers(-40, 40), name=FORMATS, rule=ANY_RULE, k=st.integers(1, 70)
)  # fmt: skip
def test_scaling_a_block_moves_its_byte_and_keeps_its_codes(seed, shift, name, rule, k):
    x = torch.from_numpy(our.array("normal", 3, k, seed))
    codes, scales = formats.get(name).quantize(x, rule)
    codes2, scales2 = formats.get(name).quantize(x * 2.0**shift, rule)
    assert torch.equal(codes, codes2) and torch.equal(scales.int() + shift, scales2.int())


@given(x=our.matrices(our.FINITE_KINDS), name=FORMATS)
def test_rceil_does_not_saturate(x, name):
    """Rounding is the only error: half a step at most, in the range of the block."""
    fmt = formats.get(name)
    codes, scales = fmt.quantize(x, "rceil")
    got = fmt.dequantize(codes, scales, x.shape[1], torch.float64).numpy()
    exact = numpy_of(x).astype(np.float64)
    scale = np.repeat(np.exp2(scales.numpy() - 127.0), 32, axis=1)[:, : x.shape[1]]
    bits = fmt.element.mantissa_bits
    half_step = np.maximum(np.abs(exact) * 2.0**-bits, scale * 2.0 ** (fmt.element.emin - bits)) / 2
    assert (np.abs(got - exact) <= half_step).all()


@given(
    rows=our.SIZES, k=our.SIZES, name=FORMATS, seed=our.SEEDS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)  # fmt: skip
def test_dequantize_any_bytes(rows, k, name, seed, dtype):
    """Any codes, NaN and Inf among them, with any scales: exact, then rounded once."""
    fmt = formats.get(name)
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << fmt.element.bits, (rows, k), dtype=np.uint8)
    scales = rng.integers(0, 256, fmt.scales_shape(rows, k), dtype=np.uint8)
    packed = torch.from_numpy(oracle.pack(codes, fmt.element.bits))
    got = fmt.dequantize(packed, torch.from_numpy(scales), k, dtype)
    expected = torch.from_numpy(oracle.values(codes, scales, name)).to(dtype)
    assert got.shape == (rows, k) and got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_every_code_with_every_scale(name):
    fmt = formats.get(name)
    codes = np.tile(np.arange(1 << fmt.element.bits, dtype=np.uint8), (256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, fmt.blocks(codes.shape[1])))
    packed = fmt.pack(torch.from_numpy(codes))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        got = fmt.dequantize(packed, torch.from_numpy(scales), codes.shape[1], dtype)
        expected = torch.from_numpy(oracle.values(codes, scales, name)).to(dtype)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@given(x=our.matrices(our.FINITE_KINDS), name=FORMATS, rule=ANY_RULE)
def test_values_quantize_to_themselves(x, name, rule):
    """A block whose largest code is the largest there is keeps its scale and its codes."""
    fmt = formats.get(name)
    rows, k = x.shape
    codes, scales = fmt.quantize(x, rule)
    unpacked = fmt.unpack(codes, k)
    unpacked[:, ::32] = fmt.element.max_code
    codes, scales = fmt.pack(unpacked), scales.clamp(8, 230)
    values = fmt.dequantize(codes, scales, k, torch.float32)
    again, scales_again = fmt.quantize(values, "rceil")
    assert torch.equal(scales_again, scales) and torch.equal(again, codes)
    assert values.shape == (rows, k)


@pytest.mark.parametrize("cell", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_block_with_a_special_cell(name, cell):
    fmt = formats.get(name)
    x = torch.ones(2, 70)
    x[1, 33] = cell
    for rule in RULES:
        codes, scales = fmt.quantize(x, rule)
        assert (scales == 255).tolist() == [[False] * 3, [False, True, False]]
        block = fmt.unpack(codes, 70)[1, 32:64]
        nan = fmt.element.nan_code
        assert (block == (0 if nan is None else nan)).all()
        values = fmt.dequantize(codes, scales, 70, torch.bfloat16)
        assert values[1, 32:64].isnan().all() and not values[:, :32].isnan().any()
        assert not values[:, 64:].isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_their_signs(name):
    fmt = formats.get(name)
    for rule in RULES:
        codes, scales = fmt.quantize(torch.tensor([[0.0, -0.0, 0.0]]), rule)
        assert fmt.unpack(codes, 3).tolist() == [[0, fmt.element.sign, 0]]
        assert scales.tolist() == [[0]]


@given(
    lead=st.sampled_from([(), (0,), (3,), (2, 3)]), k=st.integers(0, 70), name=FORMATS,
    seed=our.SEEDS,
)  # fmt: skip
def test_pack_and_unpack(lead, k, name, seed):
    fmt = formats.get(name)
    bits = fmt.element.bits
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (*lead, k), dtype=np.uint8)
    packed = fmt.pack(torch.from_numpy(codes))
    size = fmt.code_bytes(k)
    assert packed.shape == (*lead, size) and 8 * size - 7 <= k * bits <= 8 * size
    rows = math.prod(lead)
    expected = oracle.pack(codes.reshape(rows, k), bits)
    np.testing.assert_array_equal(packed.reshape(rows, size).numpy(), expected)
    assert np.array_equal(fmt.unpack(packed, k).numpy(), codes)


@pytest.mark.parametrize("name", NAMES)
def test_decode_multiplies_by_the_factors_of_blocks(name):
    fmt = formats.get(name)
    codes, _ = fmt.quantize(torch.randn(3, 70), "rceil")
    factors = torch.randn(3, 3)
    plain = fmt.decode(codes, 70)
    expected = plain * factors.repeat_interleave(32, 1)[:, :70]
    assert torch.equal(fmt.decode(codes, 70, factors), expected)
    assert fmt.decode(codes, 70, factors.double()).dtype == torch.float64


def test_under_torch_compile():
    """In one graph, for one format after the other."""

    def there_and_back(fmt, x):
        codes, scales = fmt.quantize(x, "even")
        return codes, scales, fmt.dequantize(codes, scales, x.shape[1], torch.bfloat16)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    for name in ("mxfp8_e5m2", "mxfp6_e2m3", "mxfp4"):
        fmt, x = formats.get(name), torch.randn(5, 71)
        for got, expected in zip(compiled(fmt, x), there_and_back(fmt, x), strict=True):
            assert torch.equal(got, expected)


def test_an_unknown_rule():
    with pytest.raises(ValueError, match="scale rule of mxfp4 must be one of 'rceil', 'floor'"):
        formats.get("mxfp4").quantize(torch.ones(1, 1), "ceil")
