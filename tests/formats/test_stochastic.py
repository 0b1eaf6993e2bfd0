"""Stochastic rounding: Philox against published words, codes against exact fractions in Python."""

from __future__ import annotations

import bisect
import functools
from fractions import Fraction

import format_oracle
import numpy as np
import pytest
import torch

import te_mx
from te_mx import formats
from te_mx._ops import quantize_2d
from te_mx.formats.stochastic import philox, random_bits

# Random123's known answers of philox4x32-7: counter, key -> words.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]
NAMES = sorted(format_oracle.DTYPES)
pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")


def words(values):
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(counter, key, expected):
    assert tuple(word.item() for word in philox(words(counter), words(key))) == expected


@pytest.mark.parametrize("seed", [0, 7, -1, (1 << 62) + 12345, -(1 << 63)])
@pytest.mark.parametrize("first", [0, 5, (1 << 34) - 2])
def test_elements_draw_by_their_place(seed, first):
    drawn = random_bits(torch.tensor([seed]), 3, 19, first)
    key = words((seed >> shift) & 0xFFFFFFFF for shift in (0, 32))
    for r in range(3):
        for c in range(19):
            counter = words((c // 8, (first + r) & 0xFFFFFFFF, 0, 0))
            word = philox(counter, key)[c % 8 // 2].item()
            assert drawn[r, c] == (word >> 16 if c % 2 else word & 0xFFFF)


def test_draws_are_uniform_and_neighbours_do_not_know_each_other():
    """In each half of every word: bits, means, and products of neighbours along both dimensions."""
    drawn = random_bits(torch.tensor([20261128]), 2048, 512)
    count = drawn.numel()
    for bit in range(16):
        ones = (drawn >> bit & 1).sum().item()
        assert abs(ones - count / 2) < 5 * count**0.5 / 2
    u = drawn.double() / 65535 - 0.5
    assert (u.view(-1, 8).mean(0).abs() < 5 * (8 / 12 / count) ** 0.5).all()
    for rows, cols in ((0, 1), (1, 0), (0, 2), (0, 8), (1, 1), (8, 0)):
        a, b = u[rows:, cols:], u[: len(u) - rows, : u.shape[1] - cols]
        assert (a * b).mean().abs() < 5 / 12 / a.numel() ** 0.5


@functools.cache
def levels_of(name: str) -> list[Fraction]:
    """All values of a format that are not negative, by their codes."""
    codes = np.arange(1 << (format_oracle.BITS[name] - 1), dtype=np.uint8)
    values = codes.view(format_oracle.DTYPES[name]).astype(np.float64)
    return [Fraction(value) for value in values if np.isfinite(value)]


def expected_code(x: float, byte: int, name: str, bits: int) -> int:
    """The code of one element, in fractions: the neighbours of q among all values of the format,
    and 16 bits of the distance between them."""
    levels = levels_of(name)
    q = min(abs(Fraction(x)) * Fraction(2) ** (127 - byte), levels[-1])
    low = bisect.bisect_right(levels, q) - 1
    if low + 1 < len(levels):
        part = (q - levels[low]) / (levels[low + 1] - levels[low])
        low += bits + int(part * 2**16) >> 16
    sign = 1 << (format_oracle.BITS[name] - 1) if np.signbit(x) else 0
    return low | sign


@pytest.mark.parametrize("rule", ["rceil", "floor", "even"])
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_those_of_exact_fractions(name, rule):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 70, generator=generator)
    x *= torch.exp2(torch.randint(-30, 3, x.shape, generator=generator).float())
    x[1] *= 2.0**-120  # scale bytes near 0, subnormal numbers
    x[2, :32] = 0.0
    x[2, 40], x[2, 41] = -0.0, 0.0
    random = random_bits(torch.tensor([99]), *x.shape)
    random[3, :8] = torch.tensor([0, 1, (1 << 16) - 1, 1 << 15] * 2)
    fmt = formats.get(name)
    codes, scales = fmt.quantize(x, rule + "+sr", random)
    assert torch.equal(scales, fmt.quantize(x, rule)[1])
    codes = fmt.unpack(codes, x.shape[1])
    for r in range(4):
        for c in range(70):
            byte = int(scales[r, c // 32])
            wanted = expected_code(float(x[r, c]), byte, name, int(random[r, c]))
            assert codes[r, c] == wanted, (r, c, float(x[r, c]), byte)


@pytest.mark.parametrize("name", NAMES)
def test_values_of_the_format_stay_and_others_keep_their_mean(name):
    fmt = formats.get(name)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    codes, scales = fmt.quantize(x, "rceil")
    exact = fmt.dequantize(codes, scales, 64, torch.float32)
    random = random_bits(torch.tensor([5]), 6, 64)
    again = fmt.quantize(exact, "rceil+sr", random)
    assert torch.equal(fmt.dequantize(*again, 64, torch.float32), exact)
    many = x[:1].expand(1024, 64)
    made = fmt.quantize(many, "rceil+sr", random_bits(torch.tensor([6]), 1024, 64))
    mean = fmt.dequantize(*made, 64, torch.float64).mean(0)
    gap = 2.0 ** (float(made[1].max()) - 127 + fmt.element.emax - fmt.element.mantissa_bits)
    # Five standard deviations of the mean of 1024 draws, each within half a gap of its mean.
    assert (mean - x[0].double()).abs().max() < 5 * 0.5 * gap / 32


def test_what_is_not_finite_is_nan_as_without_it():
    for name in NAMES:
        fmt = formats.get(name)
        x = torch.ones(2, 64)
        x[0, 3], x[1, 40] = torch.inf, torch.nan
        made = fmt.quantize(x, "rceil+sr", random_bits(torch.tensor([0]), 2, 64))
        plain = fmt.quantize(x, "rceil")
        assert made[1].tolist() == plain[1].tolist()
        assert torch.equal(fmt.dequantize(*made, 64, torch.float32).isnan(),
                           fmt.dequantize(*plain, 64, torch.float32).isnan())  # fmt: skip


def test_both_directions_round_with_the_bits_of_the_element():
    """The same scale everywhere, so that both directions have the same codes."""
    x = torch.rand(64, 96, generator=torch.Generator().manual_seed(2)) * 5 + 0.01
    x[::32], x[:, ::32] = 6.0, 6.0
    made = quantize_2d(
        x, "mxfp4@rows", "mxfp4@cols", rule="rceil+sr", seed=torch.tensor([11]), col_sum=True
    )
    assert torch.equal(made.row.values(), made.col.values().t())
    torch.testing.assert_close(made.col_sum, x.sum(0, dtype=torch.float32))
    other = quantize_2d(x, "mxfp4@rows", rule="rceil+sr", seed=torch.tensor([12])).row
    assert not torch.equal(made.row.codes, other.codes)


@pytest.mark.parametrize("fmt", ["mxfp4", "e4m3", "mxfp4+rht16:0x00001234"])
def test_the_public_function(fmt):
    x = torch.randn(2, 19, 40, dtype=torch.bfloat16)
    ways = {"fmt": fmt, "columnwise": True, "scale_rule": "even", "rounding": "stochastic"}
    made = te_mx.quantize(x, seed=-5, **ways)
    assert made.equal(te_mx.quantize(x, seed=torch.tensor([-5]), **ways))
    assert not made.equal(te_mx.quantize(x, seed=-4, **ways))
    spec = formats.get(fmt)
    random = random_bits(torch.tensor([-5]), 38, 40)
    codes, scales = spec.quantize(x.view(38, 40), "even+sr", random)
    assert torch.equal(made.operand("rowwise").codes, codes)
    assert torch.equal(made.operand("rowwise").scales, scales)
    columns = spec.quantize(x.view(38, 40).t(), "even+sr", random.t())
    expected = spec.dequantize(*columns, 38, torch.float32)
    assert torch.equal(made.operand("columnwise").values(), expected)


def test_seeds_and_rules_belong_together():
    x, seed = torch.ones(4, 32), torch.tensor([1])
    with pytest.raises(ValueError, match=r"a seed belongs to rules that end in '\+sr', got no"):
        quantize_2d(x, "mxfp4@rows", rule="rceil+sr")
    with pytest.raises(ValueError, match="got a seed with rule 'rceil'"):
        quantize_2d(x, "mxfp4@rows", rule="rceil", seed=seed)
    for bad in (torch.tensor(1), torch.tensor([1, 2]), torch.tensor([1.0])):
        with pytest.raises(ValueError, match=r"the seed must be int64 \[1\] on cpu, got"):
            quantize_2d(x, "mxfp4@rows", rule="rceil+sr", seed=bad)
    fmt = formats.get("mxfp4")
    with pytest.raises(ValueError, match="random bits belong to a rule"):
        fmt.quantize(x, "rceil", random_bits(seed, 4, 32))
    with pytest.raises(ValueError, match="random must have the shape and device of x"):
        fmt.quantize(x, "rceil+sr", random_bits(seed, 4, 31))
    for rule in ("+sr", "sr", "rceil+", "rceil+sr+sr", "pow2+sr"):
        with pytest.raises(ValueError, match="scale rule of mxfp4 must be one of"):
            fmt.quantize(x, rule)
    with pytest.raises(ValueError, match="scale rule of fp8_e4m3_1x128 must be one of"):
        formats.get("fp8_e4m3_1x128").quantize(x, "pow2+sr")
