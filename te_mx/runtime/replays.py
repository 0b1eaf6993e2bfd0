"""How often CUDA graphs were replayed: a replay writes to tensors that eager code holds, and
changes the version of none, so what is remembered of them could become stale unseen.

torch has no hook for it. `torch.cuda.CUDAGraph.replay` is replaced by one that counts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_count = 0


def count() -> int:
    """A number that is another one after a replay."""
    return _count


def install() -> None:
    """Put the counting method in the place of torch's, once."""
    graph: Any = torch.cuda.CUDAGraph
    replay = graph.replay
    if getattr(replay, "_te_mx_counts", False):
        return

    @functools.wraps(replay)
    def counted(self: Any) -> None:
        global _count
        _count += 1
        replay(self)

    counted._te_mx_counts = True  # type: ignore[attr-defined]
    graph.replay = counted
