"""The layouts of a quantized matrix at rest: compact, row-major, unpadded.

rows  codes [rows, k], scales [rows, blocks of k]: rowwise copies, and columnwise ones that are
      stored transposed
cols  codes [k, rows], one a byte, scales [blocks of k, rows]: columnwise copies as they lie in the
      matrix that was quantized"""

from typing import Any

from torch import Tensor

from te_mx.formats import Format
from te_mx.layouts.base import HasParts, Layout, Parts, Shape


class Rows(Layout):
    """Blocks along the last dimension."""

    name = alone = tokens = "rows"

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        return fmt.codes_shape(rows, k), fmt.scales_shape(rows, k)

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        return codes, scales

    unpack = pack

    def put_group(self, into: HasParts, part: HasParts, start: int, end: int, group: int) -> None:
        into.codes[start:end], into.scales[start:end] = part.codes, part.scales

    def group_of(self, tokens: HasParts, start: int, end: int, group: int) -> Parts:
        return tokens.codes[start:end], tokens.scales[start:end]


class Cols(Layout):
    """Blocks along the first dimension."""

    name = "cols"
    k_first = True

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        scales = fmt.scales_shape(rows, k)
        return (k, rows), (scales[1], scales[0])

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        return fmt.unpack(codes, k).t().contiguous(), scales.t().contiguous()

    def unpack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        return fmt.pack(codes.t()), scales.t()


class GroupedCols(Layout):
    """Columnwise copies whose k are the rows of several groups: blocks start anew with every group.

    The scale rows of the group that starts at row s lie at s // block + its number, a closed form
    that needs no scan over the groups: scales [R // block + groups, columns] for every split.
    Blocks hold one column: those of several would be of no use here, groups know no columns."""

    name = "grouped_cols"
    k_first = True
    of_matrices = False
    refused = "formats whose blocks hold several rows, which may belong to several groups"
    tokens, alone = "k", "cols"

    def takes(self, fmt: Format) -> bool:
        return fmt.scaling.block[0] == 1

    def grouped_shapes(self, fmt: Format, rows: int, k: int, groups: int) -> tuple[Shape, Shape]:
        """Shapes for `rows` columns and k rows in groups."""
        return (k, rows), (k // fmt.scaling.block[1] + groups, rows)

    def put_group(self, into: Any, part: HasParts, start: int, end: int, group: int) -> None:
        first = start // into.format.block + group
        into.codes[start:end] = part.codes
        into.scales[first : first + len(part.scales)] = part.scales

    def group_of(self, tokens: Any, start: int, end: int, group: int) -> Parts:
        block = tokens.format.block
        first = start // block + group
        return tokens.codes[start:end], tokens.scales[first : first - (start - end) // block]


ROWS, COLS, GROUPED_COLS = Rows(), Cols(), GroupedCols()
