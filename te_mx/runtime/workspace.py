"""Scratch memory of GEMMs: one cache of buffers, one for every (device, thread) on the CPU and for
every (device, stream, thread) on CUDA.

Contract: - The size of a workspace comes from the backend's `workspace_bytes` alone, the only
formula.
- A buffer grows to exactly the largest need (in pages). Only past `EXACT_UP_TO` it grows by a
  quarter at least, so that a slowly rising need does not reallocate at every call.
- A caller holds the tensor that `acquire` returned until its kernel has ended or is enqueued, so
  growth, `reset` or a re-entrant call never frees memory under a running CPU kernel.
- CUDA kernels run later. A buffer is allocated on the stream that uses it and by no other, so when
  it is replaced torch's allocator hands its memory only to later work of the same stream.
- While a CUDA graph is captured nothing of the cache is handed out and nothing enters it: scratch
  comes from the graph's own pool and lives as long as the graph.
- The buffer of a thread goes with the thread. A forked child keeps that of the forking thread.
- A problem that needs nothing gets nothing: `acquire(device, 0)` returns None and touches no cache.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from te_mx.runtime import cpu_memory, streams
from te_mx.runtime.arguments import check_size, usable_device

PAGE = 4096
EXACT_UP_TO = 256 << 20
GUARD_BYTES = 4096
_GUARD_VALUE, _POISON = 0xA5, 0xFF  # poison: bf16 and fp32 NaN, so that reading stale scratch shows


class Slot:
    """The buffer of one (device, thread), with what `stats` reports about it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer: Tensor | None = None
        self.requests = self.allocations = self.largest_need = 0

    def get(self, nbytes: int) -> Tensor:
        """A buffer of at least nbytes bytes."""
        self.requests += 1
        buffer = self.buffer
        if buffer is None or buffer.numel() < nbytes:
            buffer = self.grow(nbytes)
        return buffer

    def grow(self, nbytes: int) -> Tensor:
        """Replace the buffer by one of at least nbytes bytes."""
        old = self.buffer
        self.buffer = None
        size = grown_size(nbytes, old.numel() if old is not None else 0)
        if old is not None:
            del old  # a CPU buffer is free before the larger one is made
        self.largest_need = max(self.largest_need, nbytes)
        self.allocations += 1
        # Not in the memory pool of a graph that torch.compile is about to capture.
        self.buffer = streams.apart(self.device, lambda: _allocate(size, self.device))
        return self.buffer


def grown_size(need: int, held: int) -> int:
    """Size in bytes of the buffer that serves `need` when one of `held` bytes is too small."""
    size = need if need <= EXACT_UP_TO else max(need, held + held // 4)
    return -(-size // PAGE) * PAGE


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    # Not an inference tensor, even inside inference_mode: the buffer outlives the mode.
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class _Slots(threading.local):
    def __init__(self) -> None:
        self.by_place: dict[tuple[torch.device, int], Slot] = {}


_slots = _Slots()
_all_slots: weakref.WeakSet[Slot] = weakref.WeakSet()
_lock = threading.Lock()
_guard = False


def _reset_lock() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it when this process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_lock)


def _slot(device: torch.device) -> Slot:
    place = (device, streams.current(device) if device.type == "cuda" else 0)
    slot = _slots.by_place.get(place)
    if slot is None:
        slot = Slot(device)
        with _lock:
            _all_slots.add(slot)
        _slots.by_place[place] = slot
    return slot


def acquire(device: torch.device, nbytes: int) -> Tensor | None:
    """Scratch of at least nbytes bytes for one kernel of the calling thread; None when nbytes is 0.

    The content is undefined. Keep the tensor until the kernel has ended, then pass it to `release`.
    """
    if nbytes == 0:
        return None
    if _guard:
        buffer = _allocate(nbytes + GUARD_BYTES, device)
        buffer[:nbytes] = _POISON
        buffer[nbytes:] = _GUARD_VALUE
        return buffer
    if device.type == "cuda" and streams.capturing(device):
        return _allocate(nbytes, device)
    return _slot(device).get(nbytes)


def release(buffer: Tensor | None, nbytes: int) -> None:
    """End of a use. Checks the guard bytes when `guarded` is active; otherwise it does nothing."""
    if _guard and buffer is not None and not bool((buffer[nbytes:] == _GUARD_VALUE).all()):
        raise AssertionError(f"a kernel wrote behind its workspace of {nbytes} bytes")


@contextmanager
def guarded() -> Iterator[None]:
    """Test hook: every workspace is fresh, poisoned, and has guard bytes right behind it."""
    global _guard
    before, _guard = _guard, True
    try:
        yield
    finally:
        _guard = before


def reserve(device: torch.device | str, nbytes: int) -> None:
    """Make the calling thread's buffer (on CUDA: that of the current stream) at least nbytes bytes,
    so that later calls find it.

    Raises:
        TypeError, ValueError: what is no device, or no size.
    """
    where, nbytes = usable_device("device", device), check_size("nbytes", nbytes)
    if nbytes:
        _slot(_with_index(where)).get(nbytes)


def reset(device: torch.device | str | None = None) -> None:
    """Drop the buffers of every thread, on one device or on all, and on the CPU what is kept of
    large results that are gone. Running kernels keep theirs until they end."""
    only = None if device is None else _with_index(usable_device("device", device))
    for slot in _snapshot():
        if only is None or slot.device == only:
            slot.buffer = None
    if only is None or only.type == "cpu":
        cpu_memory.reset()


def stats() -> dict[str, dict[str, int]]:
    """Per device: buffers and bytes held now, and of the living threads the requests, allocations
    and largest need."""
    result: dict[str, dict[str, int]] = {}
    for slot in _snapshot():
        buffer = slot.buffer
        entry = result.setdefault(
            str(slot.device),
            {"buffers": 0, "bytes": 0, "requests": 0, "allocations": 0, "largest_need": 0},
        )
        entry["buffers"] += buffer is not None
        entry["bytes"] += 0 if buffer is None else buffer.numel()
        entry["requests"] += slot.requests
        entry["allocations"] += slot.allocations
        entry["largest_need"] = max(entry["largest_need"], slot.largest_need)
    return result


def _snapshot() -> list[Slot]:
    with _lock:
        return list(_all_slots)


def _with_index(device: torch.device) -> torch.device:
    """torch.device with its index, as tensors report it; the CPU has none."""
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.empty(0, device=device).device if device.index is None else device
