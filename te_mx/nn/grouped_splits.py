"""m_splits of grouped layers: rows of every group, as a list or an int tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import accumulate

import torch
from torch import Tensor

from te_mx.arguments import check_size, shown
from te_mx.autograd.grouped_operands import Groups
from te_mx.dispatch.groups import INDEX_DTYPES, readable


def groups_of(
    m_splits: Sequence[int] | Tensor,
    num_gemms: int,
    rows: int,
    device: torch.device,
    label: Callable[[], str],
) -> Groups:
    """End offsets of splits, checked where the host can look at them without waiting.

    Raises ValueError or TypeError for splits that are not those of num_gemms groups of `rows` rows.
    """
    if isinstance(m_splits, Tensor):
        if m_splits.dtype not in INDEX_DTYPES:
            raise TypeError(
                f"{label()}: m_splits must be int32 or int64, got {m_splits.dtype}; use .long()"
            )
        if m_splits.shape != (num_gemms,):
            raise ValueError(
                f"{label()}: m_splits must have one entry for each of {num_gemms} groups, got "
                f"shape {tuple(m_splits.shape)}"
            )
        if m_splits.device != device and m_splits.device.type != "cpu":
            if device.type != "cpu" or m_splits.is_meta:
                raise ValueError(
                    f"{label()}: inp is on {device} and m_splits on {m_splits.device}; move "
                    "m_splits to that device, or to the CPU"
                )
            m_splits = m_splits.cpu()
        if readable(m_splits):
            check_splits(m_splits.tolist(), num_gemms, rows, label)
        return Groups(m_splits.cumsum(0))
    splits = _listed(m_splits, label)
    check_splits(splits, num_gemms, rows, label)
    return Groups(torch.tensor(list(accumulate(splits)), dtype=torch.int64, device="cpu"))


def _listed(m_splits: Iterable[int], label: Callable[[], str]) -> list[int]:
    """Splits that are no tensor as ints. Raises TypeError for what is no row of integers."""
    other = isinstance(m_splits, str | bytes | Mapping | Set) or getattr(m_splits, "ndim", 1) != 1
    if other or not isinstance(m_splits, Iterable):
        raise TypeError(
            f"{label()}: m_splits must be a list of ints or an int tensor, got {shown(m_splits)}"
        )
    splits = list(m_splits)
    if all(type(split) is int for split in splits):
        return splits
    return [check_size(f"{label()}: m_splits[{i}]", split) for i, split in enumerate(splits)]


def check_splits(splits: list[int], num_gemms: int, rows: int, label: Callable[[], str]) -> None:
    """Raise ValueError unless splits are rows of num_gemms groups among `rows` rows."""
    if len(splits) != num_gemms:
        raise ValueError(
            f"{label()}: m_splits must have one entry for each of {num_gemms} groups, got "
            f"{len(splits)}"
        )
    if min(splits, default=0) < 0:
        raise ValueError(f"{label()}: m_splits must be 0 or more, got {splits}")
    if sum(splits) > rows:
        raise ValueError(
            f"{label()}: m_splits {splits} add up to {sum(splits)} rows, inp has {rows}; pass the "
            "rows of all groups, one group after the other"
        )
