"""Words of grouped problems: which rows belong to which group, and one operand for every group.

Groups are the experts of a mixture. Group i owns rows [start_i, end_i) of a matrix of R rows; rows
outside of every group belong to nobody. `offs` holds the end offsets, int32 or int64 [G]; a group
starts where the one before ends, or, with a `capacity`, at i * capacity.

Blocks of 32 rows (128 in blockwise FP8) start anew with every group. Their scale rows lie at
start_i // 32 + i, a closed form that needs no scan over the groups, so a columnwise copy of
[R, cols] has scales [R // 32 + G, cols] on every device, whatever the splits are."""

from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)
BLOCK = 32  # rows of a group that share a scale in a columnwise copy of MX formats


class Bounds(NamedTuple):
    """Where groups start and end, known to the host."""

    starts: list[int]
    ends: list[int]

    def addresses(self) -> tuple[tuple[int, int, int], tuple[Any, Any]]:
        """(count, starts, ends) as native code takes them, and what must be kept meanwhile."""
        starts, ends = array("q", self.starts), array("q", self.ends)
        return (len(starts), starts.buffer_info()[0], ends.buffer_info()[0]), (starts, ends)


def scale_rows(rows: int, groups: int, block: int = BLOCK) -> int:
    """Scale rows of a columnwise copy of `rows` rows in groups."""
    return rows // block + groups


def known_to_host(offs: Tensor) -> bool:
    """Whether reading offs waits for nothing."""
    return offs.device.type == "cpu"


def readable(tensor: Tensor) -> bool:
    """Whether looking at values waits for nothing and breaks no graph: code that is compiled or
    exported has none to look at."""
    return known_to_host(tensor) and not torch.compiler.is_compiling()


def host_bounds(offs: Tensor, capacity: int, rows: int) -> Bounds:
    """The bounds of offs on the CPU. Raises ValueError where they do not fit `rows` rows."""
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


def inside_groups(starts: Tensor, ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(group of every row, whether it is inside one), [rows]; the group is 0 where it is not."""
    row = torch.arange(rows, device=ends.device)
    group = torch.searchsorted(ends, row, right=True)
    known = group < len(ends)
    group = torch.where(known, group, 0)
    return group, known & (row >= starts[group])


@torch.no_grad()
def col_sums_on_device(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Sums of x [R, cols] over the rows of every group, fp32 [G, cols]."""
    group, inside = inside_groups(starts, ends, x.shape[0])
    values = x.detach().to(torch.float32)
    own = [(inside & (group == g)).unsqueeze(1) for g in range(len(ends))]
    return torch.stack([torch.where(mask, values, 0.0).sum(0) for mask in own])
