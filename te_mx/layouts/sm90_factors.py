"""Operands with fp32 scales as the GEMM of Hopper reads them, in plain torch.

Legend: R rows of the operand, K its reduction dimension, T = ceil(R/128) tiles along R,
S = ceil(K/128) steps of 128 along K.

- codes: uint8 [R, ld], ld = K rounded up to 16: those of layout "rows", byte for byte. What lies
  right of K is padding.
- scales of blocks of 1 x 128: float32 [S, T', 128], T' = T rounded up to even. A step reads those
  of a tile's 128 rows in one piece; rows past the end have 1.
- scales of blocks of 128 x 128: float32 [S, T''], T'' = T rounded up to 4, 1 past the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.formats import Format
from te_mx.layouts.base import Layout, Parts, Shape
from te_mx.layouts.sm90_tiles import TILE, apart

BLOCKS = (1, TILE), (TILE, TILE)
ELEMENTS = torch.float8_e4m3fn, torch.float8_e5m2  # that the tensor cores multiply


class SM90Factors(Layout):
    """Codes as they are, scales in the order of steps along K."""

    name = "sm90_factors"
    scale_dtype = torch.float32

    def takes(self, fmt: Format) -> bool:
        scaling = fmt.scaling
        known = fmt.element.torch_dtype in ELEMENTS
        return known and scaling.scale == "fp32" and scaling.block in BLOCKS

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        steps, tiles = (k + 127) >> 7, (rows + 127) >> 7
        if fmt.scaling.block[0] == 1:
            return (rows, k), (steps, (tiles + 1) & -2, TILE)
        return (rows, k), (steps, (tiles + 3) & -4)

    def empty(self, fmt: Format, rows: int, k: int, device: torch.device) -> Parts:
        ld = (k + 15) & -16
        codes = torch.empty((rows, ld), dtype=torch.uint8, device=device)
        scales = torch.empty(self.shapes(fmt, rows, k)[1], dtype=torch.float32, device=device)
        return codes if ld == k else codes[:, :k], scales

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        shape = self.shapes(fmt, len(codes), k)[1]
        packed = torch.ones(shape, dtype=torch.float32, device=codes.device)
        packed.flatten(1)[:, : len(scales)] = scales.t()
        return self.aligned(codes, packed, k)

    def unpack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        rows = fmt.scales_shape(len(codes), k)[0]
        return codes.contiguous(), scales.flatten(1)[:, :rows].t().contiguous()

    def aligned(self, codes: Tensor, scales: Tensor, k: int) -> Parts:
        """Rows of codes start a multiple of 16 bytes apart."""
        return apart(codes, (k + 15) & -16), scales.contiguous()


SM90_FACTORS = SM90Factors()
