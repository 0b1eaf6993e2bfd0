"""Packed operands of groups of rows (experts of a mixture) for the Hopper backend, in plain torch.

Legend: R rows of the tokens, C columns, G groups, T = R // 128 + G.

Every group has tiles of its own, packed as `tiles` packs the group alone. Those of group i
start at tile start_i // 128 + i: a closed form, in which no two groups meet and T tiles are enough
for all splits. Nobody reads tiles of no group.

====================  ==============================  =============================================
layout                codes uint8                     scales int32
====================  ==============================  =============================================
"sm90_rows"           [R, C], rows as they are        [ceil(C/128), T rounded up to even, 132]
"sm90_k", whose k     [C, T * 128], group i from      [T, ceil(C/128) rounded up to even, 132]
are the rows          128 * its first tile on
====================  ==============================  =============================================

In "sm90_k" codes are 0 from the end of a group to the end of its last tile (0x7F in a block of
NaN). Weights are one operand of layout "sm90" a group, behind each other.
"""

import torch

from te_mx.backends.sm90.layouts import tiles as packed_tiles
from te_mx.backends.sm90.layouts.tiles import (
    BY_ROWS,
    MAX_SPREAD,
    SCALE_WORDS,
    TILE,
    PackedOperand,
    check_spread,
    takes_wide,
)
from te_mx.formats import Format
from te_mx.layouts.base import HasParts, Layout, Shape

Shapes = tuple[tuple[int, int], tuple[int, int, int]]


def group_tiles(rows: int, groups: int) -> int:
    """Tiles of 128 rows that groups of `rows` rows in all can take, unused ones included."""
    return rows // TILE + groups


def first_tile(start: int, group: int) -> int:
    """The first tile of a group."""
    return start // TILE + group


def shapes_rows(rows: int, cols: int, groups: int) -> Shapes:
    """Shapes of codes, with the padding of their rows, and scales of layout "sm90_rows"."""
    tiles = (group_tiles(rows, groups) + 1) // 2 * 2
    return (rows, -(-cols // 16) * 16), (-(-cols // TILE), tiles, SCALE_WORDS)


def shapes_k(rows: int, cols: int, groups: int) -> Shapes:
    """The same of layout "sm90_k"."""
    tiles = group_tiles(rows, groups)
    return (cols, tiles * TILE), (tiles, -(-cols // (2 * TILE)) * 2, SCALE_WORDS)


def put_rows(into: HasParts, part: HasParts, start: int, end: int, group: int) -> None:
    """Put a group's rows [end - start, C], packed alone, where they lie in layout "sm90_rows"."""
    first, tiles = first_tile(start, group), -(-(end - start) // TILE)
    into.codes[start:end] = part.codes
    into.scales[:, first : first + tiles] = part.scales[:, :tiles]


def put_k(into: HasParts, part: HasParts, start: int, end: int, group: int) -> None:
    """Put a group's columns [C, end - start], packed alone, where they lie in layout "sm90_k"."""
    first, tiles = first_tile(start, group), -(-(end - start) // TILE)
    codes = into.codes[:, first * TILE : (first + tiles) * TILE]
    codes.zero_()
    codes[:, : end - start] = part.codes
    into.scales[first : first + tiles] = part.scales


def rows_of(tokens: HasParts, start: int, end: int, group: int) -> PackedOperand:
    """A group's operand in layout "sm90", from one in "sm90_rows"."""
    first, tiles = first_tile(start, group), -(-(end - start) // TILE)
    words = tokens.scales[:, first : first + tiles]
    words = torch.nn.functional.pad(words, (0, 0, 0, tiles % 2))
    return PackedOperand(tokens.codes[start:end], words)


def k_of(tokens: HasParts, start: int, end: int, group: int) -> PackedOperand:
    """A group's operand in layout "sm90", from one in "sm90_k"."""
    first, tiles = first_tile(start, group), -(-(end - start) // TILE)
    codes = tokens.codes[:, first * TILE : first * TILE + end - start]
    return PackedOperand(codes, tokens.scales[first : first + tiles])


class RowGroups(Layout):
    """Tokens whose rows are grouped: where a group lies."""

    tokens = "rows"
    put_group, group_of = staticmethod(put_rows), staticmethod(rows_of)


class KGroups(Layout):
    """Tokens whose k are grouped: where a group lies."""

    tokens = "k"
    put_group, group_of = staticmethod(put_k), staticmethod(k_of)


class _Grouped(Layout):
    family: str
    scale_dtype, pitch = torch.int32, 16
    exact = False
    of_matrices = False

    def __init__(self, spread: int) -> None:
        check_spread(spread)
        self.spread = spread
        self.beside = MAX_SPREAD if spread == BY_ROWS else spread  # as in tiles.py
        self.name, self.alone = f"{self.family}:{spread}", f"sm90:{spread}"

    def takes(self, fmt: Format) -> bool:
        return packed_tiles.takes(fmt)


class SM90Rows(RowGroups, _Grouped):
    """Tokens whose rows are grouped."""

    family = "sm90_rows"

    def grouped_shapes(self, fmt: Format, rows: int, k: int, groups: int) -> tuple[Shape, Shape]:
        return (rows, k), shapes_rows(rows, k, groups)[1]


class SM90Columns(KGroups, _Grouped):
    """Tokens whose k are grouped."""

    family = "sm90_k"

    def takes(self, fmt: Format) -> bool:
        return packed_tiles.takes(fmt) or takes_wide(fmt)

    def grouped_shapes(self, fmt: Format, rows: int, k: int, groups: int) -> tuple[Shape, Shape]:
        return shapes_k(k, rows, groups)
