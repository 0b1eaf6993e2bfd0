"""Weights that stand still on Hopper: the kernels write and read what the layout says."""

from __future__ import annotations

import pytest
import torch

from te_mx._ops import Operand, Stack, convert_2d, gemm_2d, plain, quantize_2d, settled
from te_mx.backends.sm90.layouts import SM90_FROZEN, frozen

KINDS = {"near": (118, 125), "wide": (90, 140), "far": (185, 256), "low": (0, 12)}


def weight(kind: str, rows: int, k: int, holes: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes, some blocks of which are zeros and some NaN, in memory of other numbers."""
    codes = torch.randint(0, 256, (rows, k)).to(torch.uint8)
    scales = torch.randint(*KINDS[kind], (rows, -(-k // 32))).to(torch.uint8)
    chance = torch.rand(scales.shape)
    codes[(chance < holes).repeat_interleave(32, 1)[:, :k]] = 0x80
    other = torch.tensor([0, 127, 1, 200, 254, 255], dtype=torch.uint8)
    return codes, torch.where(chance < holes / 2, other[torch.randint(6, chance.shape)], scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 16), (128, 128), (130, 96), (257, 432), (300, 1024)])
@pytest.mark.parametrize("holes", [0.0, 0.3])
def test_the_kernels_write_the_layout_and_read_it(kind, size, holes):
    codes, scales = weight(kind, *size, holes)
    held = settled(Operand(codes.cuda(), scales.cuda(), "mxfp8_e4m3@rows", *size))
    expected = frozen.pack(codes, scales)
    assert held.spec == "mxfp8_e4m3@sm90_frozen"
    assert torch.equal(held.codes.cpu(), expected.codes[:, : size[1]])
    assert torch.equal(held.scales.cpu(), expected.scales)
    assert held.packed is not None
    assert torch.equal(held.packed.cpu(), expected.aside)
    back = plain(held)
    assert torch.equal(back.codes.cpu(), codes)
    assert torch.equal(back.scales.cpu(), scales)


def test_weights_of_groups():
    each = [weight("near", 130, 96, 0.1) for _ in range(3)]
    codes, scales = (torch.stack(parts).cuda() for parts in zip(*each, strict=True))
    back = plain(settled(Stack(codes, scales, "mxfp8_e4m3@rows", 3, 130, 96)))
    assert torch.equal(back.codes, codes)
    assert torch.equal(back.scales, scales)


def test_bytes_of_a_weight():
    row = quantize_2d(torch.randn(1024, 2048).cuda(), "mxfp8_e4m3@rows").row
    held = settled(row)
    assert sum(t.nbytes for t in (held.codes, held.scales, held.packed)) <= 1.04 * 1024 * 2048


def test_products_leave_out_what_lies_in_words():
    w, x = torch.randn(200, 256).cuda(), torch.randn(40, 256).cuda()
    row = quantize_2d(w, "mxfp8_e4m3@rows").row
    left = quantize_2d(x, "mxfp8_e4m3@sm90:8").row
    made, expected = (
        gemm_2d(left, right, out_dtype=torch.float32).out
        for right in (settled(row), convert_2d(row, "mxfp8_e4m3@sm90:8"))
    )
    assert torch.equal(made, expected)


@pytest.mark.parametrize("rows", [(256, 512), (256, 130)])
def test_parts_of_a_weight_as_one(rows):
    """Gate and up of a block: tiles behind each other, where they are whole."""
    each = [weight("near", n, 96, 0.1) for n in rows]
    codes, scales = (torch.cat(parts) for parts in zip(*each, strict=True))
    held = [
        settled(Operand(one[0].cuda(), one[1].cuda(), "mxfp8_e4m3@rows", n, 96))
        for one, n in zip(each, rows, strict=True)
    ]
    made = SM90_FROZEN.joined(held)
    assert (made is None) == (rows[1] % 256 != 0)
    if made is not None:
        back = plain(made)
        assert torch.equal(back.codes.cpu(), codes) and torch.equal(back.scales.cpu(), scales)
