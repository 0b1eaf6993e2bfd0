"""Bytes written down once, by hand and from other projects: nothing here is computed."""

from __future__ import annotations

import pytest
import torch

from te_mx import formats

RULES = ("floor", "rceil", "even")
# amax -> byte by floor, rceil and even. The OCP specification, torchao and compressed-tensors.
E2M1_SCALES = [
    (0.0, 0, 0, 0), (1.0, 125, 125, 125), (1.5, 125, 125, 125), (1.6, 125, 126, 125),
    (1.75, 125, 126, 126), (3.0, 126, 126, 126), (3.01, 126, 127, 126), (4.0, 127, 127, 127),
    (6.0, 127, 127, 127), (6.5, 127, 128, 127), (7.0, 127, 128, 128), (8.0, 128, 128, 128),
    (2.0**-149, 0, 0, 0), (float("inf"), 255, 255, 255), (float("nan"), 255, 255, 255),
]  # fmt: skip
# amax -> byte by rceil, as Transformer Engine and torchao have it.
RCEIL_SCALES = {
    "mxfp8_e4m3": [
        (0.0, 0), (0.875, 118), (0.9, 119), (1.75, 119), (1.7578125, 120), (447.0, 127),
        (448.0, 127), (449.0, 128), (57344.0, 134), (65504.0, 135), (3.3895e38, 247),
        (2.0**-126, 0), (2.0**-149, 0),
    ],
    "mxfp8_e5m2": [(1.0, 112), (1.75, 112), (2.0, 113), (57344.0, 127), (57345.0, 128)],
    "mxfp6_e3m2": [(28.0, 127), (28.5, 128), (14.0, 126), (1.0, 123)],
    "mxfp6_e2m3": [(7.5, 127), (7.6, 128), (3.75, 126), (1.0, 125)],
}  # fmt: skip
# Values at scale 1 -> codes: ties go to the even code.
E2M1_CODES = [
    (0.25, 0), (0.26, 1), (0.75, 2), (1.0, 2), (1.25, 2), (1.75, 4), (2.0, 4), (2.5, 4), (3.5, 6),
    (5.0, 6), (5.1, 7), (6.0, 7), (-0.5, 9), (-5.0, 14), (-0.2, 8),
]  # fmt: skip
# The first 6 of 8 codes 1 .. 8 as 6-bit fields: 1 | 2 << 6 | 3 << 12 | 4 << 18, low byte first.
PACKED_6 = [0x81, 0x30, 0x10, 0x85, 0x01]


@pytest.mark.parametrize(("amax", *RULES), E2M1_SCALES)
def test_scales_of_mxfp4(amax, floor, rceil, even):
    for rule, byte in zip(RULES, (floor, rceil, even), strict=True):
        _, scales = formats.get("mxfp4").quantize(torch.tensor([[0.0, -amax]]), rule)
        assert scales.item() == byte


@pytest.mark.parametrize("name", RCEIL_SCALES)
def test_scales_by_rceil(name):
    for amax, byte in RCEIL_SCALES[name]:
        _, scales = formats.get(name).quantize(torch.tensor([[0.0, amax]]), "rceil")
        assert scales.item() == byte, amax


def test_codes_of_mxfp4():
    fmt = formats.get("mxfp4")
    x = torch.tensor([[value for value, _ in E2M1_CODES] + [6.0]])
    codes, scales = fmt.quantize(x, "rceil")
    assert scales.item() == 127
    assert fmt.unpack(codes, x.shape[1])[0, :-1].tolist() == [code for _, code in E2M1_CODES]


def test_codes_of_mxfp8_e4m3():
    """Every magnitude class at scale 1: subnormal, normal, ties to even, the largest."""
    x = torch.tensor([[448.0, 1.0, -1.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 1.0625, 1.1875, -0.0]])
    codes, scales = formats.get("e4m3").quantize(x, "rceil")
    assert scales.tolist() == [[127]]
    assert codes.tolist() == [[0x7E, 0x38, 0xB8, 0x01, 0x00, 0x02, 0x38, 0x3A, 0x80]]


def test_the_first_element_is_the_low_nibble():
    fmt = formats.get("mxfp4")
    codes, scales = fmt.quantize(torch.tensor([[1.0, 2.0, 6.0]]), "rceil")
    assert (codes.tolist(), scales.tolist()) == ([[0x42, 0x07]], [[127]])


def test_four_codes_of_6_bits_in_three_bytes():
    for name in ("mxfp6_e2m3", "mxfp6_e3m2"):
        fmt = formats.get(name)
        packed = fmt.pack(torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.uint8))
        assert packed.tolist() == PACKED_6
        assert fmt.unpack(packed, 6).tolist() == [1, 2, 3, 4, 5, 6]


def test_scale_byte_zero_is_not_zero():
    codes = torch.tensor([[0x38]], dtype=torch.uint8)  # 1.0
    for byte, value in ((0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127)):
        scales = torch.tensor([[byte]], dtype=torch.uint8)
        got = formats.get("e4m3").dequantize(codes, scales, 1, torch.float32)
        assert got.item() == value
