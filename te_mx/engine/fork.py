"""Work that runs beside other work of the same step, inside a captured CUDA graph.

Small problems leave most of a GPU idle. In a CUDA graph two of them can run at the same time for
nothing; outside of one the host is what such problems wait for, and forking would only add calls.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from te_mx.engine.streams import capturing

SMALL = 1 << 21  # elements of the larger operand or result: 2048 x 1024 is half a wave of tiles


class _Streams(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[int, torch.cuda.Stream] = {}


_streams = _Streams()


class Branch:
    """A branch of the graph: it starts after all work so far, and `join` waits for it.

    Memory: whatever a branch allocates is used after the join, and every branch starts after what
    was enqueued before, so a block that the allocator hands out twice is never in use twice.
    """

    __slots__ = ("_context", "_main", "_side")

    def __init__(self, device: torch.device) -> None:
        index = device.index
        side = _streams.by_device.get(index)
        if side is None:
            side = _streams.by_device[index] = torch.cuda.Stream(device)
        self._side = side
        self._main = torch.cuda.current_stream(device)
        self._context: Any = torch.cuda.stream(side)

    def __enter__(self) -> None:
        self._side.wait_stream(self._main)
        self._context.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self._context.__exit__(*exc_info)

    def join(self) -> None:
        self._main.wait_stream(self._side)


def branch(device: torch.device, size: int) -> Branch | None:
    """A branch for work that may run beside what follows until `join`; None where it would not pay.

    It pays while a CUDA graph is captured and `size`, the elements of the largest matrix, is small.
    """
    if device.type != "cuda" or size > SMALL or torch.compiler.is_compiling():
        return None
    return Branch(device) if capturing(device) else None
