"""The packing rules of the Hopper backend, through their plain-torch description. No GPU is needed.

tests/gpu/ holds the kernels to the same functions, byte for byte.
"""

from __future__ import annotations

import math

import pytest
import torch

from te_mx.backends.sm90.layouts import tiles as layout

MAX = {"e4m3": 448.0, "e5m2": 57344.0}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Many small operators: on a busy machine torch's threads would mostly wait for each other."""
    threads(1)


def quantize(x, fmt):
    """A short MX quantizer of fp32 [R, K], round-up rule; blocks of zeros get byte 0."""
    rows, k = x.shape
    blocks = -(-k // 32)
    padded = torch.zeros(rows, blocks * 32, dtype=torch.float64)
    padded[:, :k] = x.double()
    grouped = padded.view(rows, blocks, 32)
    amax = grouped.abs().amax(-1)
    exponent = torch.ceil(torch.log2(amax / MAX[fmt])) + 127
    byte = torch.where(amax == 0, 0.0, exponent).clamp(0, 254)
    scaled = grouped * torch.exp2(127 - byte)[..., None]
    codes = scaled.float().clamp(-MAX[fmt], MAX[fmt]).to(FLOAT8[fmt]).view(torch.uint8)
    return codes.view(rows, -1)[:, :k].contiguous(), byte.to(torch.uint8)


def dequantize(codes, scales, fmt):
    scale = torch.exp2(scales.double() - 127)
    scale[scales == 255] = torch.nan
    values = layout.code_values(fmt).double()[codes.long()]
    return values * scale.repeat_interleave(32, 1)[:, : codes.shape[1]]


def operand(rows, k, kind, fmt, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g)
    if kind == "rows":
        x *= torch.exp2(torch.randint(-40, 41, (rows, 1), generator=g).float())
    elif kind == "spread":
        blocks = -(-k // 32)
        s = torch.exp2(torch.randint(-30, 31, (rows, blocks), generator=g).float())
        x *= s.repeat_interleave(32, 1)[:, :k]
    elif kind == "far":
        x *= 2.0**90
    elif kind == "tiny":
        x *= 1e-38
    elif kind == "holes":
        x[torch.rand(rows, k, generator=g) < 0.5] = 0
        x[::3] = 0
    return quantize(x, fmt)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_shift_table_is_one_rounding_to_nearest_even(fmt):
    table, values = layout.shift_table(fmt).tolist(), layout.code_values(fmt).tolist()
    finite = [c for c in range(256) if math.isfinite(values[c])]
    for d in range(9):
        for code in range(256):
            got = table[d][code]
            if code not in finite:
                assert got == code
                continue
            target = values[code] * 2.0**-d
            assert (got ^ code) & 0x80 == 0
            distance = {c: abs(values[c] - target) for c in finite if (c ^ code) & 0x80 == 0}
            nearest = min(distance.values())
            ties = [c for c in distance if distance[c] == nearest]
            assert got in ties
            assert len(ties) == 1 or got % 2 == 0


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("plain", {0}),
        ("rows", {1}),
        ("spread", {2}),
        ("far", {3}),
        ("holes", {0}),
        ("tiny", {0, 3}),
    ],
)
def test_each_kind_of_data_gets_its_class(fmt, kind, expected):
    codes, scales = operand(256, 256, kind, fmt)
    assert set(layout.classes(layout.pack(codes, scales, fmt)).flatten().tolist()) <= expected


# 1 and 127: tails inside one tile; 129 and 300: tails in both directions, an odd number of tiles.
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["plain", "rows", "spread", "far", "tiny", "holes"])
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (127, 33), (129, 300), (300, 160)])
@pytest.mark.parametrize("spread", [0, 3, 8])
def test_an_element_moves_by_at_most_half_the_smallest_shared_code(fmt, kind, rows, k, spread):
    codes, scales = operand(rows, k, kind, fmt)
    packed = layout.pack(codes, scales, fmt, spread)
    assert tuple(packed.codes.shape) == layout.packed_shapes(rows, k)[0]
    assert tuple(packed.scales.shape) == layout.packed_shapes(rows, k)[1]
    assert torch.equal(layout.classes_of(codes, scales, fmt, spread), layout.classes(packed))
    exact = dequantize(codes, scales, fmt)
    got = layout.packed_values(packed, k, fmt)
    half_smallest = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}[fmt]
    e = scales.double().repeat_interleave(32, 1)[:, :k]
    bound = half_smallest * torch.exp2(e + spread - 127)
    assert ((got - exact).abs() <= bound).all()
    if kind in ("spread", "far"):
        cls = layout.classes(packed)
        untouched = (cls >= 2).repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :k]
        assert torch.equal(got[untouched], exact[untouched])


def test_zero_blocks_never_count_and_keep_their_sign():
    codes, scales = operand(128, 128, "plain", "e4m3")
    codes[5, 32:64] = 0x80
    scales[5, 1] = 250  # a byte that no quantizer gives to a block of zeros
    packed = layout.pack(codes, scales, "e4m3")
    assert layout.classes(packed).item() == 0
    assert (packed.codes[5, 32:64] == 0x80).all()
    far = operand(128, 128, "spread", "e4m3")
    far[0][7, :32] = 0
    far[1][7, 0] = 250
    words = layout.pack(*far, "e4m3").scales
    assert words[0, 0, 7] & 0xFF == 0


def test_nan_blocks_stay_nan_without_touching_the_class():
    codes, scales = operand(128, 128, "plain", "e4m3")
    scales[3, 2] = 255
    packed = layout.pack(codes, scales, "e4m3")
    assert layout.classes(packed).item() == 0
    values = layout.packed_values(packed, 128, "e4m3")
    assert values[3, 64:96].isnan().all()
    assert values.isnan().sum() == 32


def test_byte_zero_is_a_scale():
    codes = torch.full((1, 32), 0x38, dtype=torch.uint8)  # 1.0
    scales = torch.zeros(1, 1, dtype=torch.uint8)
    packed = layout.pack(codes, scales, "e4m3")
    assert layout.classes(packed).item() == 0
    assert (layout.packed_values(packed, 32, "e4m3") == 2.0**-127).all()


def test_an_empty_tile_is_neutral():
    packed = layout.pack(
        torch.zeros(3, 40, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8), "e4m3"
    )
    assert layout.classes(packed).item() == 0
    assert (packed.scales[:, :, :128] == 127 << 23).all()


def test_shapes_and_spread_are_checked():
    codes, scales = operand(4, 64, "plain", "e4m3")
    with pytest.raises(ValueError, match="scales must have shape"):
        layout.pack(codes, scales[:, :1], "e4m3")
    with pytest.raises(ValueError, match="spread"):
        layout.pack(codes, scales, "e4m3", 10)


@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4"])
@pytest.mark.parametrize("kind", ["plain", "rows", "spread", "far", "holes"])
def test_rows_alone_are_aligned_whatever_is_beside_them(fmt, kind):
    codes, scales = operand(300, 200, kind, "e4m3")
    codes = codes & 15 if fmt == "mxfp4" else codes
    whole = layout.pack(codes, scales, fmt, layout.BY_ROWS)
    assert set(layout.classes(whole).flatten().tolist()) <= {0, 1}
    values = layout.packed_values(whole, 200, fmt)
    for rows in (slice(0, 1), slice(130, 200), slice(299, 300)):
        part = layout.pack(codes[rows], scales[rows], fmt, layout.BY_ROWS)
        assert torch.equal(layout.packed_values(part, 200, fmt), values[rows])
    # Nothing moves further than its bound from what the codes stand for.
    scale = torch.exp2(scales.double() - 127).repeat_interleave(32, 1)[:, :200]
    exact = layout.code_values(fmt).double()[codes.long()] * scale
    held = torch.where(exact != 0, scale, 0)
    most = torch.nn.functional.pad(held, (0, 56)).unflatten(1, (2, 128)).amax(2)
    most *= (6 if fmt == "mxfp4" else 448) * 2.0**-15
    assert bool(((values - exact).abs() <= most.repeat_interleave(128, 1)[:, :200]).all())
