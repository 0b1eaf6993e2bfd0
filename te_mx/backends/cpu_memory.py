"""Large results on the CPU, in memory that is used again.

A C library gives blocks of tens of megabytes back to the system as soon as they are free, and the
next one comes with fresh pages again. Touching those costs several times what writing the codes of
a weight costs. So large results lie in blocks of our own:

- A block belongs to the storage of a tensor. It is idle when that storage is gone, whoever held it
  last, and only then serves another.
- Idle and used blocks together take at most a quarter more than was used at one time. What is kept
  is what the process needed before; te_mx.workspace.reset() gives it back.
- Small results, and those of every other device, come from torch's allocator.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from math import prod

import torch
from torch import Tensor

CPU = torch.device("cpu")  # said at every allocation, as torch.set_default_device may be in force
LEAST = 16 << 20  # smaller ones the C library reuses well
_STEP = 2 << 20  # sizes are whole huge pages, so that a block fits several shapes


class Pool:
    """Blocks of memory for tensors: `idle_bytes`, `used_bytes`, and the most that was ever used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []  # the longest idle first
        # Storages may die anywhere, inside of `_take` too: what they give back waits here.
        self._returned: deque[mmap.mmap] = deque()
        self.idle_bytes = self.used_bytes = self.peak_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous CPU tensor of undefined values."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LEAST:
            return torch.empty(shape, dtype=dtype, device=CPU)
        block = self._take(nbytes)
        # The storage keeps the memoryview alive, and nothing else does.
        view = memoryview(block)
        weakref.finalize(view, self._returned.append, block).atexit = False
        storage = torch.frombuffer(view, dtype=torch.uint8, count=nbytes).untyped_storage()
        # set_ and not a view, because views returned by autograd functions cannot change in place.
        return torch.empty(0, dtype=dtype, device=CPU).set_(storage, 0, shape)  # type: ignore[call-overload]

    def empty_like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The same in the shape of a contiguous tensor."""
        return self.empty(tuple(tensor.shape), dtype)

    def _take(self, nbytes: int) -> mmap.mmap:
        size = -(-nbytes // _STEP) * _STEP
        with self._lock:
            self._collect()
            fits = [block for block in self._idle if size <= len(block) <= 2 * size]
            if fits:
                block = min(fits, key=len)
                self._idle.remove(block)
                self.idle_bytes -= len(block)
            else:
                block = _fresh(size)
            self.used_bytes += len(block)
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            while self._idle and self.used_bytes + self.idle_bytes > self.peak_bytes * 5 // 4:
                self.idle_bytes -= len(self._idle.pop(0))  # the system has it back here
        return block

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self.used_bytes -= len(block)
            self.idle_bytes += len(block)
            self._idle.append(block)

    def reset(self) -> None:
        """Give idle blocks back to the system, and forget the most that was used."""
        with self._lock:
            self._collect()
            self._idle.clear()
            self.idle_bytes, self.peak_bytes = 0, self.used_bytes

    def after_fork(self) -> None:
        """For the child: another thread may have held the lock."""
        self._lock = threading.Lock()


def _fresh(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


_pool = Pool()
empty, empty_like, reset = _pool.empty, _pool.empty_like, _pool.reset

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.after_fork)
