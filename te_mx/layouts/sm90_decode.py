"""Weights that stand still as the decode kernels of Hopper read them, in plain torch.

Legend: N rows, K columns, G = ceil(N/16) groups of rows, Q = ceil(K/128) quads of blocks.

- codes: uint8 [G, Q, 2112] of 8 bits, [G, Q, 1088] of 4. A quad has the codes of 16 rows x 128 K in
  the order in which the lanes of a warp feed them to the tensor cores, and behind them its 64 scale
  bytes; csrc/include/te_mx/sm90_decode.h has every byte. Rows and columns past the end are zero.
- scales: uint8 [N, 1], whether the kernels multiply this row: the scale bytes of its blocks, those
  of nothing but zeros aside, lie in LEAST .. MOST or are NaN. So a scale times the sum of a block
  stays inside fp32, whatever the scale of the other side is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_mx.formats import Format
from te_mx.layouts.base import Layout, Parts, Shape

ROWS, QUAD, BLOCK = 16, 128, 32
LEAST, MOST, NAN = 24, 215, 255
ELEMENTS = "e4m3", "e5m2", "e2m1"


class SM90Decode(Layout):
    """Codes and scales of 16 rows x 128 K in one piece."""

    name = "sm90_decode"

    def takes(self, fmt: Format) -> bool:
        scaling = fmt.scaling
        mx = scaling.scale == "e8m0" and scaling.block == (1, BLOCK)
        return mx and fmt.element.name in ELEMENTS and fmt.transform is None

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        quad = ROWS * QUAD * fmt.element.bits // 8 + ROWS * QUAD // BLOCK
        return (-(-rows // ROWS), -(-k // QUAD), quad), (rows, 1)

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        """Waits for no device."""
        rows = codes.shape[0]
        groups, quads, _ = self.shapes(fmt, rows, k)[0]
        one = pad(fmt.unpack(codes, k), (0, quads * QUAD - k, 0, groups * ROWS - rows))
        blocks = pad(scales, (0, quads * 4 - scales.shape[1], 0, groups * ROWS - rows))
        # [group, half, row, quad, block, lane of four, code] to the order of lanes.
        lanes = one.view(groups, 2, 8, quads, 4, 4, 8).permute(0, 3, 4, 2, 5, 1, 6)
        if fmt.element.bits == 4:
            lanes = _to_words(lanes)
        bytes_ = blocks.view(groups, 2, 8, quads, 4).permute(0, 3, 2, 1, 4)
        packed = torch.cat((lanes.flatten(2), bytes_.flatten(2)), 2)
        return packed, _fits(one, blocks, fmt.element.sign)[:rows]

    def unpack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        rows, (groups, quads, size) = scales.shape[0], codes.shape
        lanes, bytes_ = codes.split((size - ROWS * 4, ROWS * 4), 2)
        if fmt.element.bits == 4:
            lanes = _of_words(lanes)
        one = lanes.reshape(groups, quads, 4, 8, 4, 2, 8).permute(0, 5, 3, 1, 2, 4, 6)
        one = one.reshape(groups * ROWS, quads * QUAD)[:rows, :k]
        blocks = bytes_.reshape(groups, quads, 8, 2, 4).permute(0, 3, 2, 1, 4)
        blocks = blocks.reshape(groups * ROWS, quads * 4)[:rows, : fmt.blocks(k)]
        return fmt.pack(one.contiguous()), blocks.contiguous()


def _fits(codes: Tensor, scales: Tensor, sign: int) -> Tensor:
    """uint8 [rows, 1]: whether the kernels multiply a row."""
    zeros = (codes.unflatten(1, (-1, BLOCK)) & (sign - 1)).amax(2) == 0
    fits = (scales == NAN) | ((scales <= MOST) & ((scales >= LEAST) | zeros))
    return fits.all(1, keepdim=True).to(torch.uint8)


def _to_words(codes: Tensor) -> Tensor:
    """Eight codes of 4 bits [.., 8] as four bytes, whose bits are a shift away from fp16 numbers:
    see decode_fragments.cuh."""
    c = codes.unbind(-1)
    pairs = ((c[2], c[6]), (c[0], c[4]), (c[3], c[7]), (c[1], c[5]))
    return torch.stack([(a & 8) << 4 | (a & 7) << 1 | (b & 7) << 4 | b >> 3 for a, b in pairs], -1)


def _of_words(words: Tensor) -> Tensor:
    """The other way: bytes [.., n] to codes [.., 2 n]."""
    w = words.unflatten(-1, (-1, 4)).unbind(-1)
    first = [one >> 7 << 3 | one >> 1 & 7 for one in w]
    second = [(one & 1) << 3 | one >> 4 & 7 for one in w]
    order = (first[1], first[3], first[0], first[2], second[1], second[3], second[0], second[2])
    return torch.stack(order, -1).flatten(-2)


SM90_DECODE = SM90Decode()
