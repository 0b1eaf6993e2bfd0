"""Operands with fp32 scales as the GEMM of Hopper reads them, in plain torch.

Legend: R rows of the operand, K its reduction dimension, T = ceil(R/128) tiles along R,
S = ceil(K/128) steps of 128 along K.

- codes: uint8 [R, ld], ld = K rounded up to 16: those of layout "rows", byte for byte. What lies
  right of K is padding.
- scales of blocks of 1 x 128: float32 [S, T', 128], T' = T rounded up to even. A step reads those
  of a tile's 128 rows in one piece; rows past the end have 1.
- scales of blocks of 128 x 128: float32 [S, T''], T'' = T rounded up to 4, 1 past the end.

Tokens of groups have tiles of their own for every group, where `groups` has them:
"sm90_factors_rows" and "sm90_factors_k" are its layouts with 128 numbers for a tile instead of 132
words."""

import torch
from torch import Tensor

from te_mx.backends.sm90.layouts.groups import KGroups, RowGroups, shapes_k, shapes_rows
from te_mx.backends.sm90.layouts.tiles import MULTIPLIED, TILE, takes_wide
from te_mx.formats import Format
from te_mx.layouts.base import Layout, Parts, Shape

BLOCKS = (1, TILE), (TILE, TILE)


class SM90Factors(Layout):
    """Codes as they are, scales in the order of steps along K."""

    name = "sm90_factors"
    scale_dtype, pitch = torch.float32, 16

    def takes(self, fmt: Format) -> bool:
        scaling = fmt.scaling
        known = fmt.element.torch_dtype in MULTIPLIED
        return known and scaling.scale == "fp32" and scaling.block in BLOCKS

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        steps, tiles = (k + 127) >> 7, (rows + 127) >> 7
        if fmt.scaling.block[0] == 1:
            return (rows, k), (steps, (tiles + 1) & -2, TILE)
        return (rows, k), (steps, (tiles + 3) & -4)

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        """Of one matrix, or of several with their groups in front. Waits for no device."""
        *groups, rows, _ = codes.shape
        shape = self.shapes(fmt, rows, k)[1]
        packed = torch.ones((*groups, *shape), dtype=torch.float32, device=codes.device)
        flat = packed.flatten(-2) if len(shape) == 3 else packed
        flat[..., : scales.shape[-2]] = scales.transpose(-1, -2)
        return self.aligned(codes, packed)

    def unpack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        rows = fmt.scales_shape(len(codes), k)[0]
        return codes.contiguous(), scales.flatten(1)[:, :rows].t().contiguous()


class _Grouped(Layout):
    """Tokens of groups."""

    scale_dtype, pitch = torch.float32, 16
    exact = False  # where a group lies, its ends say
    of_matrices = False
    alone = SM90Factors.name
    refused = "formats of other elements or blocks, or whose blocks hold several rows"

    def takes(self, fmt: Format) -> bool:
        return takes_wide(fmt)


class SM90FactorRows(RowGroups, _Grouped):
    """Tokens whose rows are grouped."""

    name = "sm90_factors_rows"

    def grouped_shapes(self, fmt: Format, rows: int, k: int, groups: int) -> tuple[Shape, Shape]:
        return (rows, k), (*shapes_rows(rows, k, groups)[1][:2], TILE)


class SM90FactorColumns(KGroups, _Grouped):
    """Tokens whose k are grouped."""

    name = "sm90_factors_k"

    def grouped_shapes(self, fmt: Format, rows: int, k: int, groups: int) -> tuple[Shape, Shape]:
        codes, words = shapes_k(k, rows, groups)
        return codes, (*words[:2], TILE)


def factors_of_tiles(words: Tensor) -> Tensor:
    """float32 [.., 128]: the scale of every row of aligned tiles of blocks of 1 x 128
    (tiles.py), from their words int32 [.., 132]. Waits for no device."""
    rows, cls = words[..., :TILE], words[..., TILE : TILE + 1]
    # Of class 3: the scale byte of a block with codes; all four are alike, or 0 for zeros.
    e = rows & 0xFF
    for shift in (8, 16, 24):
        e = torch.maximum(e, rows >> shift & 0xFF)
    own = torch.where(e == 0, 127, e) << 23
    own = torch.where(e == 255, 0x7FC00000, own)
    return torch.where(cls < 2, rows, own).to(torch.int32).view(torch.float32)


SM90_FACTORS, SM90_FACTOR_ROWS, SM90_FACTOR_K = SM90Factors(), SM90FactorRows(), SM90FactorColumns()
