"""Weights that stand still as the decode kernels of Hopper read them, in plain torch.

Legend: N rows, K columns, G = ceil(N/16) groups of rows, Q = ceil(K/128) quads of four MX blocks.

- codes: uint8 [G, Q, 2112] of 8 bits, [G, Q, 1088] of 4. A quad has the codes of 16 rows x 128 K in
  the order in which the lanes of a warp feed them to the tensor cores, and behind them 64 bytes of
  scales: four of a row, or one fp32 number; csrc/include/te_mx/sm90_decode.h has every byte. Rows
  and columns past the end are zero.
- scales: uint8 [N, 1], whether the kernels multiply this row: the scales of its blocks, those of
  nothing but zeros aside, lie in LEAST .. MOST (fp32 ones in 2^-60 .. 2^60) or are NaN. So a scale
  times the sum of a block stays inside fp32, whatever the scale of the other side is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_mx.formats import Format
from te_mx.layouts.base import Layout, Parts, Shape

ROWS, QUAD, BLOCK = 16, 128, 32
LEAST, MOST, NAN = 24, 215, 255
UP = 6  # of scale bytes beside codes of 4 bits, which the kernels read as E4M3 codes times 2^-6
LEAST_FACTOR, MOST_FACTOR = 2.0**-60, 2.0**60
ELEMENTS = "e4m3", "e2m1"


class SM90Decode(Layout):
    """Codes and scales of 16 rows x 128 K in one piece."""

    name = "sm90_decode"
    scale_dtype = torch.uint8

    def takes(self, fmt: Format) -> bool:
        if fmt.transform is not None:
            return False
        scaling = fmt.scaling
        if scaling.scale == "e8m0" and scaling.block == (1, BLOCK):
            return fmt.element.name in ELEMENTS
        return _has_factors(fmt) and fmt.element.name == "e4m3"

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        quad = ROWS * QUAD * fmt.element.bits // 8 + ROWS * 4
        return (-(-rows // ROWS), -(-k // QUAD), quad), (rows, 1)

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        """Waits for no device."""
        rows = codes.shape[0]
        groups, quads, _ = self.shapes(fmt, rows, k)[0]
        below = groups * ROWS - rows
        one = pad(fmt.unpack(codes, k), (0, quads * QUAD - k, 0, below))
        # [group, half, row, quad, block, half, lane of four, code] to the order of lanes.
        lanes = one.view(groups, 2, 8, quads, 4, 2, 4, 4).permute(0, 3, 4, 2, 6, 5, 1, 7)
        if fmt.element.bits == 4:
            lanes = _to_words(lanes.flatten(-2))
        if _has_factors(fmt):
            if fmt.scaling.block[0] > 1:
                scales = scales.repeat_interleave(fmt.scaling.block[0], 0)[:rows]
            blocks = pad(scales, (0, quads - scales.shape[1], 0, below))
            bytes_ = blocks.view(torch.uint8)
        else:
            bytes_ = blocks = pad(scales, (0, quads * 4 - scales.shape[1], 0, below))
            if fmt.element.bits == 4:
                bytes_ = torch.where(blocks < NAN - UP, blocks + UP, blocks)
        bytes_ = bytes_.view(groups, 2, 8, quads, 4).permute(0, 3, 2, 1, 4)
        packed = torch.cat((lanes.flatten(2), bytes_.flatten(2)), 2)
        return packed, _fits(one, blocks, fmt.element.sign)[:rows]

    def unpack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        rows, (groups, quads, size) = scales.shape[0], codes.shape
        lanes, bytes_ = codes.split((size - ROWS * 4, ROWS * 4), 2)
        if fmt.element.bits == 4:
            lanes = _of_words(lanes)
        one = lanes.reshape(groups, quads, 4, 8, 4, 2, 2, 4).permute(0, 6, 3, 1, 2, 5, 4, 7)
        one = one.reshape(groups * ROWS, quads * QUAD)[:rows, :k]
        bytes_ = bytes_.reshape(groups, quads, 8, 2, 4).permute(0, 3, 2, 1, 4)
        blocks = bytes_.reshape(groups * ROWS, quads * 4)[:rows]
        if _has_factors(fmt):
            step = fmt.scaling.block[0]
            given = blocks.contiguous().view(torch.float32)[::step].contiguous()
        else:
            given = blocks[:, : fmt.blocks(k)].contiguous()
            if fmt.element.bits == 4:
                given = torch.where(given < NAN, given - UP, given)
        return fmt.pack(one.contiguous()), given


def _has_factors(fmt: Format) -> bool:
    """Whether scales are fp32 numbers for 128 of k."""
    scaling = fmt.scaling
    return scaling.scale == "fp32" and scaling.block in ((1, QUAD), (QUAD, QUAD))


def _fits(codes: Tensor, scales: Tensor, sign: int) -> Tensor:
    """uint8 [rows, 1]: whether the kernels multiply a row."""
    blocks = codes.unflatten(1, (scales.shape[1], -1))
    zeros = (blocks & (sign - 1)).amax(2) == 0
    if scales.dtype == torch.uint8:
        fits = (scales == NAN) | ((scales <= MOST) & ((scales >= LEAST) | zeros))
    else:
        inside = (scales <= MOST_FACTOR) & ((scales >= LEAST_FACTOR) | zeros)
        fits = scales.isnan() | inside
    return fits.all(1, keepdim=True).to(torch.uint8)


def _to_words(codes: Tensor) -> Tensor:
    """Eight codes of 4 bits [.., 8] as four bytes: see te_mx/sm90_decode.h."""
    low, high = codes.split(4, -1)
    return low >> 3 << 7 | (low & 7) << 2 | (high & 4) << 4 | high >> 3 << 5 | high & 3


def _of_words(words: Tensor) -> Tensor:
    """The other way: bytes [.., n] to codes [.., 2 n]."""
    w = words.unflatten(-1, (-1, 4))
    low = w >> 7 << 3 | w >> 2 & 7
    high = (w >> 5 & 1) << 3 | (w >> 6 & 1) << 2 | w & 3
    return torch.cat((low, high), -1).flatten(-2)


SM90_DECODE = SM90Decode()
