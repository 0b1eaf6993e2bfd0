"""sm90_frozen: tiles of weights that stand still give back the bytes that they are made of."""

from __future__ import annotations

import as_on_hopper
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from te_mx import formats
from te_mx._ops import quantize_2d, settled
from te_mx.backends.sm90.layouts import SM90_FROZEN, frozen, tiles

SIZES = [(1, 1), (16, 32), (128, 128), (130, 96), (257, 200), (300, 417)]


def scale_bytes(kind: str, shape: tuple[int, int], g: torch.Generator) -> Tensor:
    least, most = {
        "any": (0, 256), "near": (118, 125), "row": (100, 109), "wide": (90, 140),
        "far": (185, 256), "low": (0, 12),
    }[kind]  # fmt: skip
    return torch.randint(least, most, shape, generator=g).to(torch.uint8)


def weight(kind: str, rows: int, k: int, seed: int, holes: float) -> tuple[Tensor, Tensor]:
    """Random codes, some blocks of which are zeros and some NaN."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, k), generator=g).to(torch.uint8)
    blocks = -(-k // 32)
    scales = scale_bytes(kind, (rows, blocks), g)
    chance = torch.rand(rows, blocks, generator=g)
    zeros = (chance < holes).repeat_interleave(32, 1)[:, :k]
    signs = torch.where(torch.rand(rows, k, generator=g) < 0.1, 0x80, 0).to(torch.uint8)
    codes = torch.where(zeros, signs, codes)
    other = torch.tensor([0, 127, 1, 200, 254, 255], dtype=torch.uint8)
    at = torch.randint(0, len(other), scales.shape, generator=g)
    return codes, torch.where(chance < holes / 2, other[at], scales)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["any", "near", "row", "wide", "far", "low"]), st.sampled_from(SIZES),
    st.integers(0, 1 << 30), st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)  # fmt: skip
def test_the_bytes_come_back(kind, size, seed, holes):
    codes, scales = weight(kind, *size, seed, holes)
    packed = frozen.pack(codes, scales)
    back = frozen.unpack(packed, packed.aside, size[1])
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], scales)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_weights_take_little_more_than_a_byte(spread):
    w = torch.randn(512, 1024) * torch.exp2(spread * torch.randn(512, 1))
    row = quantize_2d(w, "mxfp8_e4m3@rows").row
    packed = frozen.pack(row.codes, row.scales)
    assert sum(t.nbytes for t in packed) <= 1.04 * w.numel()
    assert 0 < packed.aside.shape[1] < 1e-3 * w.numel()


def test_products_see_the_tiles_of_the_gemm():
    """Where few codes are rounded: the same codes, classes and exponents."""
    codes, scales = quantize_2d(torch.randn(300, 417), "mxfp8_e4m3@rows").row[:2]
    packed, other = frozen.pack(codes, scales), tiles.pack(codes, scales, "mxfp8_e4m3")
    assert torch.equal(packed.codes, other.codes)
    words, aligned = packed.scales.clone(), other.scales[..., tiles.TILE] < 2
    words[..., : tiles.TILE][aligned] &= -0x10000
    assert torch.equal(words, other.scales)
    assert aligned[:-1].all() and not aligned[-1].all()
    fmt = formats.get("mxfp8_e4m3")
    values = SM90_FROZEN.values(fmt, packed.codes, packed.scales, 417, torch.float32)
    expected = tiles.packed_values(other, 417, "mxfp8_e4m3").float()
    assert torch.equal(values, expected)


def test_a_tile_that_would_round_many_keeps_its_codes():
    """Half of the rows are 2^7 smaller: many of their codes become subnormal under one exponent of
    the tile, none under one of a row; with blocks alternating, under neither."""
    w = torch.randn(128, 256)
    w[::2, :128] *= 2.0**-7
    w[:, 128:].view(128, 4, 32)[:, ::2] *= 2.0**-7
    row = quantize_2d(w, "mxfp8_e4m3@rows").row
    packed = frozen.pack(row.codes, row.scales)
    assert tiles.classes(packed).tolist() == [[1, 2]]
    assert torch.equal(packed.codes[:, 128:], row.codes[:, 128:])


def test_rows_of_odd_bytes_stay_where_they_are():
    row = quantize_2d(torch.randn(3, 40), "mxfp8_e4m3@rows").row
    with as_on_hopper.hopper():
        assert settled(row) is row
