"""Words of grouped problems: which rows belong to which group, and one operand for every group.

Groups are the experts of a mixture. Group i owns rows [start_i, end_i) of a matrix of R rows; rows
outside of every group belong to nobody. `offs` holds the end offsets, int32 or int64 [G]; a group
starts where the one before ends, or, with a `capacity`, at i * capacity.

Blocks of 32 rows start anew with every group. Their scale rows lie at start_i // 32 + i, a closed
form that needs no scan over the groups, so a columnwise copy of [R, cols] has scales
[R // 32 + G, cols] on every device, whatever the splits are.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.backends.base import BLOCK, Operand

INDEX_DTYPES = (torch.int32, torch.int64)


class Bounds(NamedTuple):
    """Where groups start and end, known to the host."""

    starts: list[int]
    ends: list[int]

    def addresses(self) -> tuple[tuple[int, int, int], tuple[array[int], array[int]]]:
        """(count, starts, ends) as native code takes them, and what must be kept meanwhile."""
        starts, ends = array("q", self.starts), array("q", self.ends)
        return (len(starts), starts.buffer_info()[0], ends.buffer_info()[0]), (starts, ends)


class StackedOperand(NamedTuple):
    """The operand of every group, one after another: logical [G, rows, k].

    order "k_last": codes [G, rows, k], scales [G, rows, ceil(k/32)]. order "k_first": codes
    [G, k, rows], scales [G, ceil(k/32), rows]. `packed`: uint8 [G, bytes], or None. order "sm90":
    packed for Hopper, codes [G, rows, k] with padded rows, scales int32 [G, ceil(k/128), tiles,
    132].
    """

    codes: Tensor
    scales: Tensor
    fmt: str
    order: str
    packed: Tensor | None = None

    @property
    def groups(self) -> int:
        return self.codes.shape[0]

    @property
    def rows(self) -> int:
        return self.codes.shape[2 if self.order == "k_first" else 1]

    @property
    def k(self) -> int:
        return self.codes.shape[1 if self.order == "k_first" else 2]

    def group(self, i: int) -> Operand:
        """The operand of one group, without its packed form."""
        return Operand(self.codes[i], self.scales[i], self.fmt, self.order)


def scale_rows(rows: int, groups: int) -> int:
    """Scale rows of a columnwise copy of `rows` rows in groups."""
    return rows // BLOCK + groups


def first_scale_row(start: int, group: int) -> int:
    """The scale row of a group's first block."""
    return start // BLOCK + group


def rows_of(tokens: Operand, start: int, end: int) -> Operand:
    """A group's rows of an operand whose rows are grouped (order "k_last")."""
    return tokens._replace(codes=tokens.codes[start:end], scales=tokens.scales[start:end])


def k_of(operand: Operand, start: int, end: int, group: int) -> Operand:
    """A group's part of an operand whose k is grouped (order "k_first", grouped scale rows)."""
    first = first_scale_row(start, group)
    blocks = -(-(end - start) // BLOCK)
    return operand._replace(
        codes=operand.codes[start:end], scales=operand.scales[first : first + blocks]
    )


def known_to_host(offs: Tensor) -> bool:
    """Whether reading offs waits for nothing."""
    return offs.device.type == "cpu"


def host_bounds(offs: Tensor, capacity: int, rows: int) -> Bounds:
    """The bounds of offs on the CPU. Raises ValueError when they are not those of groups of `rows`
    rows.
    """
    ends = offs.tolist()
    starts = [i * capacity for i in range(len(ends))] if capacity else [0, *ends[:-1]][: len(ends)]
    at = 0
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if start < at or end < start or end > rows:
            raise ValueError(
                f"offs must be end offsets that rise from 0 to at most the {rows} rows there are"
                f"{f', within {capacity} rows a group' if capacity else ''}, got {ends}: group {i} "
                f"would be rows {start} to {end}"
            )
        at = end
    return Bounds(starts, ends)


def device_bounds(offs: Tensor, capacity: int, rows: int) -> tuple[Tensor, Tensor]:
    """(starts, ends), int64 [G] on the device of offs, forced into bounds unseen."""
    ends = offs.to(torch.int64).clamp(0, rows)
    if capacity:
        starts = torch.arange(len(offs), device=offs.device) * capacity
        return starts, torch.minimum(torch.maximum(ends, starts), starts + capacity)
    ends = ends.cummax(0).values if len(offs) else ends
    return torch.nn.functional.pad(ends[:-1], (1, 0)) if len(offs) else ends, ends
