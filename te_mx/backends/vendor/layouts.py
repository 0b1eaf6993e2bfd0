"""What torch.nn.functional.scaled_mm asks of scales, in plain torch."""

import torch
from torch import Tensor

from te_mx.dispatch.groups import BLOCK, inside_groups, scale_rows
from te_mx.formats import Format
from te_mx.layouts.base import Layout, Parts, Shape

_TALL, _WIDE = 128, 4  # scales of a tile: 128 rows, 4 blocks
_ROUND = 32


class Swizzled(Layout):
    """Codes by rows, scales [rows rounded up to 128, blocks rounded up to 4] as SWIZZLE_32_4_4.

    Tiles of 128 rows and 4 blocks lie behind each other, those of the same rows first; in a tile
    the scale of row r and block b is byte (r % 32) * 16 + r // 32 * 4 + b. What pads is 0. cuBLAS,
    "1D Block Scaling Factors Layout"."""

    name = "torch_swizzled"
    refused = "formats but MX ones and NVFP4 with blocks of one row"

    def takes(self, fmt: Format) -> bool:
        return fmt.scaling.scale != "fp32" and fmt.scaling.block[0] == 1

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        padded = -(-rows // _TALL) * _TALL, -(-fmt.blocks(k) // _WIDE) * _WIDE
        return fmt.codes_shape(rows, k), padded

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        return codes, _swizzled(scales)

    def unpack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        tall, wide = scales.shape
        tiles = scales.reshape(tall // _TALL, wide // _WIDE, _ROUND, _TALL // _ROUND, _WIDE)
        plain = tiles.permute(0, 3, 2, 1, 4).reshape(tall, wide)
        return codes, plain[: len(codes), : fmt.blocks(k)].contiguous()


def _swizzled(scales: Tensor) -> Tensor:
    rows, blocks = scales.shape
    pad = torch.nn.functional.pad(scales, (0, -blocks % _WIDE, 0, -rows % _TALL))
    tiles = pad.view(-(-rows // _TALL), _TALL // _ROUND, _ROUND, -(-blocks // _WIDE), _WIDE)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(pad.shape)


def of_rows(scales: Tensor) -> Tensor:
    """fp32 scales [rows, blocks] of blocks of 1 x 128, columns behind each other."""
    return scales.t().contiguous().t()


def of_squares(scales: Tensor) -> Tensor:
    """fp32 scales [rows, blocks along k] of blocks of 128 x 128 as [blocks along k rounded up to 4,
    rows], columns behind each other."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4)).t()


def of_stack(scales: Tensor) -> Tensor:
    """Scales [groups, rows, blocks] of weights, swizzled, those of a group [rows rounded up to 128
    * blocks rounded up to 4] behind each other."""
    groups, rows, _ = scales.shape
    tall = torch.nn.functional.pad(scales, (0, 0, 0, -rows % _TALL)).flatten(0, 1)
    return _swizzled(tall).view(groups, -1)


def of_groups(scales: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Scales [rows, blocks] of tokens, swizzled, the rows of every group rounded up to 128: [rows
    // 128 * 128 + groups * 128, blocks rounded up to 4], for every split."""
    rows, blocks = scales.shape
    tall = scale_rows(rows, len(ends), _TALL) * _TALL
    padded = (ends - starts + _TALL - 1) // _TALL * _TALL
    group, inside = inside_groups(starts, ends, rows)
    first = (padded.cumsum(0) - padded - starts)[group]
    room = scales.new_zeros(tall + 1, blocks)
    room[torch.where(inside, first + torch.arange(rows, device=ends.device), tall)] = scales
    return _swizzled(room[:-1])


def of_k(scales: Tensor, blocks: Tensor, ends: Tensor) -> Tensor:
    """Scales [blocks, rows] along k, by the block of each in a copy where groups of k start at
    tiles and end at `ends` (a number behind it: of none), swizzled, the tiles of a group behind
    each other: [rows rounded up to 128, blocks of the copy]."""
    placed = scales.new_zeros(len(blocks) + 1, scales.shape[1])
    placed[:-1] = torch.nn.functional.pad(scales, (0, 0, 0, 1))[blocks]
    tiles = _swizzled(placed[:-1].t()).view(-1, len(blocks) // _WIDE, _TALL * _WIDE)
    stop = ends // (_WIDE * BLOCK)
    tile = torch.arange(tiles.shape[1], device=ends.device)
    group = torch.searchsorted(stop, tile, right=True)
    start = torch.nn.functional.pad(stop, (1, 0))
    inside = group < len(stop)
    first = torch.where(inside, start[group], tile)
    across = torch.where(inside, torch.nn.functional.pad(stop, (0, 1))[group] - first, 1)
    down = torch.arange(len(tiles), device=ends.device)[:, None]
    made = torch.empty_like(tiles).flatten(0, 1)
    made[len(tiles) * first + down * across + tile - first] = tiles
    return made.view(-1, len(blocks))


SWIZZLED = Swizzled()
