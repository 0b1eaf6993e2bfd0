"""Blockwise FP8 formats against numpy and ml_dtypes, and bytes written down by hand."""

from __future__ import annotations

import blockwise_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
import strategies as our
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_mx import _ops as ops
from te_mx import formats

NAMES = tuple(name for name in formats.names() if name.startswith("fp8_"))
FORMATS = st.sampled_from(NAMES)
RULES = ("pow2", "fp32")
# Around one block, two and three: a block of 128, its neighbours, tails, primes, nothing.
SIZES = st.sampled_from([0, 1, 5, 127, 128, 129, 257, 300])
EPSILONS = st.sampled_from([0.0, 1e-12, 1e-4, 2.0])


def test_names():
    elements = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
    blocks = ("1x128", "128x1", "128x128")
    assert set(NAMES) == {f"fp8_{one}_{block}" for one in elements for block in blocks}
    for name in NAMES:
        fmt = formats.get(name)
        element, height, width = oracle.words(name)
        assert (fmt.element.name, fmt.scaling.block) == (element, (height, width))
        assert fmt.scaling.rules == RULES and fmt.scaling.storage == torch.float32


@given(x=our.matrices(sizes=SIZES), name=FORMATS, rule=st.sampled_from(RULES), epsilon=EPSILONS)
def test_quantize_matches_the_oracle(x, name, rule, epsilon):
    fmt = formats.get(name)
    codes, scales = fmt.quantize(x, f"{rule}:{epsilon}" if epsilon else rule)
    expected, expected_scales = oracle.quantize(x.float().numpy(), name, rule, epsilon)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.numpy(), expected)
    assert scales.dtype == torch.float32 and scales.shape == fmt.scales_shape(*x.shape)
    assert codes.is_contiguous() and scales.is_contiguous()
    finite = scales[scales.isfinite()]
    assert bool((finite >= torch.finfo(torch.float32).tiny).all())  # normal numbers
    if rule == "pow2":
        assert bool((torch.frexp(finite).mantissa == 0.5).all())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", oracle.DTYPES)
def test_factors_around_every_step(element, rule):
    """The neighbours of max and of 1 times every power of two: where a rule steps, where the factor
    is held at 2^126, and the ends of fp32."""
    name = f"fp8_{element}_1x128"
    top = float(ml_dtypes.finfo(oracle.DTYPES[element]).max)
    steps = np.concatenate([np.ldexp(s, np.arange(-150, 128)) for s in (top, 1.0)])
    bits = steps[steps < 3.4e38].astype(np.float32).view(np.int32).astype(np.int64)
    bits = np.unique(np.clip(bits[:, None] + np.arange(-3, 4), 0, 0x7F7FFFFF)).astype(np.int32)
    x = bits.view(np.float32)[:, None]
    codes, scales = formats.get(name).quantize(torch.from_numpy(x), rule)
    expected, expected_scales = oracle.quantize(x, name, rule)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.numpy(), expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", oracle.DTYPES)
def test_every_bf16_beside_one(element, rule):
    """Every bf16 number, of both signs, in the block of one 1: subnormal codes, ties, NaN, Inf."""
    every = torch.arange(32768, dtype=torch.int16).view(torch.bfloat16)
    x = torch.stack([every, -every, torch.ones_like(every)], 1)
    codes, scales = formats.get(f"fp8_{element}_1x128").quantize(x, rule)
    expected, expected_scales = oracle.quantize(x.float().numpy(), f"fp8_{element}_1x128", rule)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.numpy(), expected)


@pytest.mark.parametrize(
    ("amax", "pow2", "fp32"),
    [
        (0.0, 1.0, 1.0),
        (448.0, 1.0, 1.0),
        (449.0, 2.0, 449 / 448),
        (447.0, 1.0, 447 / 448),
        (1.75, 2.0**-8, 1.75 / 448),
        (1.0, 2.0**-8, 1 / 448),
        (2.0**-149, 2.0**-126, 2.0**-126),
    ],
)
def test_scales_of_e4m3_by_hand(amax, pow2, fp32):
    fmt = formats.get("fp8_e4m3_1x128")
    for rule, scale in (("pow2", pow2), ("fp32", fp32)):
        got = fmt.quantize(torch.tensor([[0.0, -amax]]), rule)[1].item()
        assert got == pytest.approx(scale, rel=0 if rule == "pow2" else 2.0**-23)


def test_codes_by_hand():
    """At scale 1 (e4m3) and 240/448: subnormal, normal, ties to even, both zeros, the largest."""
    x = torch.tensor([[448.0, 1.0, -1.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 1.0625, 1.1875, -0.0]])
    codes, scales = formats.get("fp8_e4m3_1x128").quantize(x, "fp32")
    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[0x7E, 0x38, 0xB8, 0x01, 0x00, 0x02, 0x38, 0x3A, 0x80]]
    x = torch.tensor([[240.0, 1.0, -1.0, 2.0**-10, 2.0**-11, 3 * 2.0**-11, -(2.0**-11), -0.0]])
    codes, scales = formats.get("fp8_e4m3fnuz_1x128").quantize(x, "fp32")
    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[0x7F, 0x40, 0xC0, 0x01, 0x00, 0x02, 0x00, 0x00]]


@given(name=FORMATS, rows=SIZES, k=SIZES, seed=our.SEEDS)
def test_dequantize_any_codes(name, rows, k, seed):
    """Any codes, NaN and Inf among them, with any scales: exact, or rounded to fp32 first."""
    fmt, rng = formats.get(name), np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, k), dtype=np.uint8)
    scales = np.ldexp(rng.random(fmt.scales_shape(rows, k)) + 1, 10).astype(np.float32)
    scales[rng.random(scales.shape) < 0.1] = np.nan
    exact = oracle.values(codes, scales, name)
    parts = torch.from_numpy(codes), torch.from_numpy(scales)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        got = fmt.dequantize(*parts, k, dtype)
        want = torch.from_numpy(exact)
        want = want if dtype == torch.float64 else want.float().to(dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert got.is_contiguous()


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
@given(x=our.matrices(sizes=SIZES), name=FORMATS, rule=st.sampled_from(RULES))
def test_ops_give_the_bytes_and_values_of_the_format(x, name, rule):
    """Whatever kernel runs: rows as they are, columns where they lie in x."""
    fmt = formats.get(name)
    made = ops.quantize_2d(x, f"{name}@rows", f"{name}@cols", rule=rule)
    for operand, of, turned in ((made.row, x, False), (made.col, x.t(), True)):
        codes, scales = fmt.quantize(of, rule)
        got = (operand.codes.t(), operand.scales.t()) if turned else operand[:2]
        assert torch.equal(got[0], codes)
        torch.testing.assert_close(got[1], scales, rtol=0, atol=0, equal_nan=True)
        values = fmt.dequantize(codes, scales, operand.k, torch.bfloat16)
        torch.testing.assert_close(
            ops.dequantize_2d(operand, torch.bfloat16), values, rtol=0, atol=0, equal_nan=True
        )


@given(x=our.matrices(sizes=SIZES), element=st.sampled_from(sorted(oracle.DTYPES)))
def test_columns_that_stay_as_they_lie(x, element):
    """128x1 has the bytes of 1x128 along the columns; 128x128 the same ones in both directions."""
    held = formats.get(f"fp8_{element}_128x1").quantize(x, "fp32")
    turned = formats.get(f"fp8_{element}_1x128").quantize(x.t(), "fp32")
    square = formats.get(f"fp8_{element}_128x128")
    for mine, theirs in (
        (held, turned), (square.quantize(x, "fp32"), square.quantize(x.t(), "fp32")),
    ):  # fmt: skip
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b.t(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush denormals")
@pytest.mark.parametrize("rule", [*RULES, "fp32:1e-40"])
def test_quantize_ignores_the_denormal_mode(rule):
    x = torch.from_numpy(our.array("tiny", 8, 300, 3))
    x[:4] *= 2.0**-10
    fmt = formats.get("fp8_e4m3_1x128")
    expected = fmt.quantize(x, rule)
    assert bool((expected[0][:4] & 0x7F).any())
    torch.set_flush_denormal(True)
    try:
        got = fmt.quantize(x, rule)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize(
    "rule", ["", "rceil", "pow2:", "pow2:x", "pow2:-1", "pow2:nan", "fp32:inf", "fp32:1e39", 1]
)
def test_unknown_rules_and_epsilons(rule):
    with pytest.raises(ValueError, match=r"must be one of 'pow2', 'fp32', or 'pow2:1e-12' with"):
        formats.get("fp8_e4m3_1x128").quantize(torch.zeros(1, 1), rule)
    with pytest.raises(ValueError, match="scale rule of mxfp4 must be one of"):
        formats.get("mxfp4").quantize(torch.zeros(1, 1), "rceil:1e-12")
