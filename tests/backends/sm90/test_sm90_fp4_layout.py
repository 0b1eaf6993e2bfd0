"""MXFP4 in the tiles of Hopper, through their plain-torch description: codes of E4M3, aligned
without rounding. tests/gpu holds the kernels to the same functions, byte for byte.
"""

from __future__ import annotations

import pytest
import torch

from te_mx import formats, layouts
from te_mx.backends.sm90.layouts import SM90_NVFP4
from te_mx.backends.sm90.layouts import tiles as sm90_tiles

FP4 = formats.get("mxfp4")
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Many small operators: on a busy machine torch's threads would mostly wait for each other."""
    threads(1)


def operand(rows: int, k: int, low: int, high: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random codes [rows, k], one a byte, and scale bytes in low..high; some blocks are zeros."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, k), generator=g, dtype=torch.uint8)
    scales = torch.randint(low, high + 1, (rows, -(-k // 32)), generator=g).to(torch.uint8)
    zeros = torch.rand(scales.shape, generator=g) < 0.1
    codes[zeros.repeat_interleave(32, 1)[:, :k]] &= 8
    return codes, scales


def values_of(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return FP4.dequantize(FP4.pack(codes), scales, codes.shape[1], torch.float64)


def test_every_shifted_code_is_the_number_itself():
    table = sm90_tiles.shift_table("mxfp4")
    assert not table[15:].any()
    for d in range(15):
        for code, number in enumerate(NUMBERS):
            found = table[d, [code, code | 8]].view(torch.float8_e4m3fn).double()
            assert found.tolist() == [number * 2.0 ** (6 - d), -number * 2.0 ** (6 - d)]
            assert table[d, code | 8] == table[d, code] | 0x80


# 0..14 and 20..34 are the widest exact spans, at the end of the range of bytes and above it.
@pytest.mark.parametrize(("low", "high"), [(0, 14), (20, 34), (110, 124), (127, 127), (176, 190)])
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (127, 33), (129, 300), (300, 161)])
@pytest.mark.parametrize("spread", [0, 8])
def test_scales_up_to_14_octaves_apart_share_one_without_rounding(rows, k, low, high, spread):
    codes, scales = operand(rows, k, low, high)
    packed = sm90_tiles.pack(codes, scales, "mxfp4", spread)
    assert (sm90_tiles.classes(packed) == 0).all()
    assert torch.equal(sm90_tiles.packed_values(packed, k, "mxfp4"), values_of(codes, scales))
    # They are codes of E4M3 and their scales: the kernels need not know more.
    as_e4m3 = sm90_tiles.packed_values(packed, k, "mxfp8_e4m3")
    assert torch.equal(as_e4m3, values_of(codes, scales))


def test_the_spread_of_a_call_changes_nothing():
    codes, scales = operand(200, 300, 100, 130)
    first = sm90_tiles.pack(codes, scales, "mxfp4", 0)
    for part, other in zip(first, sm90_tiles.pack(codes, scales, "mxfp4", 8), strict=True):
        assert torch.equal(part, other)


@pytest.mark.parametrize(("apart", "cls"), [(14, 0), (15, 2)])
def test_the_exponent_lies_six_below_the_largest(apart, cls):
    codes = torch.full((128, 128), 1, dtype=torch.uint8)
    scales = torch.full((128, 4), 120, dtype=torch.uint8)
    scales[7, 2] = 120 - apart
    packed = sm90_tiles.pack(codes, scales, "mxfp4")
    assert sm90_tiles.classes(packed).item() == cls
    assert packed.scales[0, 0, 129] == 114
    if cls == 0:
        assert (packed.scales[0, 0, :128] == 114 << 23).all()
        assert (packed.codes[0] == 0x60).all()  # 0.5 * 2^6
        assert (packed.codes[7, 64:96] == 1).all()  # the smallest code
    else:
        assert (packed.codes == 0x30).all()  # 0.5


def test_rows_share_exponents_of_their_own():
    codes, _ = operand(128, 128, 127, 127)
    codes |= 1  # no zeros
    first = torch.arange(20, 148, dtype=torch.uint8)[:, None]
    scales = first + torch.tensor([0, 3, 9, 14], dtype=torch.uint8)
    packed = sm90_tiles.pack(codes, scales, "mxfp4")
    assert sm90_tiles.classes(packed).item() == 1
    assert torch.equal(packed.scales[0, 0, :128] >> 23, first[:, 0].int() + 8)
    assert torch.equal(sm90_tiles.packed_values(packed, 128, "mxfp4"), values_of(codes, scales))


@pytest.mark.parametrize(("low", "high", "cls"), [(1, 60, 2), (0, 60, 3), (180, 191, 3)])
def test_other_tiles_keep_the_scales_of_blocks(low, high, cls):
    codes, scales = operand(128, 256, low, high)
    codes |= 1
    scales[0, ::4], scales[1, ::4], scales[0, 1::4] = low, high, high
    packed = sm90_tiles.pack(codes, scales, "mxfp4")
    assert (sm90_tiles.classes(packed) == cls).all()
    assert torch.equal(sm90_tiles.packed_values(packed, 256, "mxfp4"), values_of(codes, scales))


def test_blocks_of_nan_stay_nan_and_zeros_keep_their_sign():
    codes, scales = operand(128, 128, 120, 125)
    scales[3, 2] = 255
    codes[5, :32], scales[5, 0] = 8, 250  # -0 under a byte that no quantizer gives it
    packed = sm90_tiles.pack(codes, scales, "mxfp4")
    assert sm90_tiles.classes(packed).item() == 0
    values = sm90_tiles.packed_values(packed, 128, "mxfp4")
    assert values[3, 64:96].isnan().all() and values.isnan().sum() == 32
    assert (packed.codes[5, :32] == 0x80).all()


@pytest.mark.parametrize("k", [31, 64, 77])
def test_the_layout_takes_packed_nibbles(k):
    layout = layouts.get("sm90:3")
    x = torch.randn(40, k)
    codes, scales = FP4.quantize(x, "rceil")
    made = layout.pack(FP4, codes, scales, k)
    assert made[0].shape == (40, k) and made[0].dtype == torch.uint8
    values = layout.values(FP4, *made, k, torch.float64)
    assert torch.equal(values, FP4.dequantize(codes, scales, k, torch.float64))


# How often tiles can be multiplied at class 0 speed: statements of docs/numerics.md.
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("gaussian", [16, 0, 0, 0]), ("outlier channels", [16, 0, 0, 0]), ("rows", [0, 16, 0, 0])],
)
def test_classes_of_known_distributions(kind, expected):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(512, 512, generator=g)
    if kind == "outlier channels":
        x[:, torch.randperm(512, generator=g)[:5]] *= 1000
    if kind == "rows":
        x *= torch.exp2(torch.randint(-20, 21, (512, 1), generator=g).float())
    codes, scales = FP4.quantize(x, "rceil")
    found = sm90_tiles.classes_of(FP4.unpack(codes, 512), scales, "mxfp4")
    assert torch.bincount(found.flatten().int(), minlength=4).tolist() == expected


# Of pairs 0 to 3 of a word, where the sign of a code lies and the other bits from the highest on.
PLACES = (15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (13, 11, 10, 14)


@pytest.mark.parametrize(("rows", "k"), [(1, 1), (64, 128), (70, 200), (129, 257), (4200, 33)])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_weights_that_stand_still_lie_as_their_header_says(name, rows, k):
    """csrc/include/te_mx/sm90_nvfp4.h; 4,200 rows are packed in two bands."""
    fmt, wide = formats.get(name), 32 if name == "mxfp4" else 16
    g = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (rows, k), generator=g, dtype=torch.uint8)
    scales = torch.randint(8, 127, (rows, -(-k // wide)), generator=g).to(torch.uint8)
    made = SM90_NVFP4.pack(fmt, fmt.pack(codes), scales, k)
    back = SM90_NVFP4.unpack(fmt, *made, k)
    assert torch.equal(back[0][:rows], fmt.pack(codes)) and torch.equal(back[1][:rows], scales)
    bands, steps, blocks = -(-rows // 64), -(-k // 128), 128 // wide
    words = made[0].flatten().view(torch.int32).view(bands, steps, 4, 2, 32, 4)
    of_blocks = made[1].view(bands, steps, 4, 8, 2 * blocks)
    for n in {0, rows - 1, *torch.randint(rows, (20,), generator=g).tolist()}:
        for at in {0, k - 1, *torch.randint(k, (20,), generator=g).tolist()}:
            quad, row, half = n % 64 // 16, n % 16, at % 128 // 64
            lane, pair = row % 8 * 4 + at % 8 // 2, row // 8 + at % 16 // 8 * 2
            word = int(words[n // 64, at // 128, quad, half, lane, at % 64 // 16])
            up = 16 * (at % 2 != (pair == 3))  # the second code, but of pair 3 the first
            code = sum((word >> place + up & 1) << 3 - i for i, place in enumerate(PLACES[pair]))
            assert code == codes[n, at]
            byte = of_blocks[n // 64, at // 128, quad, row % 8, at % 128 // wide * 2 + row // 8]
            scale = int(scales[n, at // wide])
            if name == "mxfp4":
                assert byte == (scale + 119) % 256
            else:
                value = torch.tensor([scale], dtype=torch.uint8).view(torch.float8_e4m3fn).double()
                assert (1 + byte % 8 / 8) * 2.0 ** (int(byte) // 8 - 22) == value
