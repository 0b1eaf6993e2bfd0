"""Large results on the CPU, in memory that is used again.

A C library gives blocks of some megabytes back to the system as soon as they are free, and the
next one comes with fresh pages again. Touching those costs several times what writing the codes of
a weight costs. So large results lie in blocks that are kept:

- A block is a storage of torch with exactly the bytes of its tensor, so that a result behaves as
  any tensor: it can be resized, shared and saved. (A storage around foreign memory cannot.) The
  pool holds one reference; a block is idle while there is no other, also no weak one, and only then
  it serves another tensor.
- Idle and used blocks together take at most a half more than was used at one time. What is kept is
  what the process needed before; te_mx.workspace.reset() gives it back.
- Small results, and those of every other device, come from torch's allocator."""

import contextlib
import ctypes
import mmap
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import to_dlpack

from te_mx.torch_internals import storage_uses

CPU = torch.device("cpu")  # said at every allocation, as torch.set_default_device may be in force
_HUGE = 2 << 20  # bytes of a huge page, on x86
LEAST = 4 << 20  # writing less costs little more with fresh pages
_MOST_KEPT = 1.5  # times what was used at one time


class Block:
    """A storage with the bytes and the address that it was made with."""

    __slots__ = ("address", "nbytes", "storage", "where")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.nbytes = storage.nbytes()
        self.address = storage.data_ptr()
        self.where = StorageWeakRef(storage).cdata  # of the storage itself

    def is_idle(self) -> bool:
        """Whether nobody else refers to the storage, no tensor and no variable of Python."""
        storage = self.storage
        # Python's references: the slot, the variable, the argument.
        alone = storage_uses(self.where) == 1 and sys.getrefcount(storage) == 3
        # Who looks whether a tensor is still the one it was (weights/changes.py).
        return alone and not weakref.getweakrefcount(storage)

    def is_whole(self) -> bool:
        """Whether its memory is still there: a storage can be resized, and move elsewhere."""
        return self.storage.nbytes() == self.nbytes and self.storage.data_ptr() == self.address

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """All of it as a tensor."""
        # set_ and not a view, because views returned by autograd functions cannot change in place.
        made = torch.empty(0, dtype=dtype, device="cpu")
        return made.set_(self.storage, 0, shape)  # type: ignore[call-overload]


class Pool:
    """Blocks of memory for tensors: `idle_bytes` and `used_bytes` as the last call found them, and
    the most that was ever used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[Block] = []  # the longest idle first
        self.idle_bytes = self.used_bytes = self.peak_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous CPU tensor of undefined values."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LEAST or not idle_is_known():
            return torch.empty(shape, dtype=dtype, device=CPU)
        block, _storage = self._take(nbytes)
        return block.tensor(shape, dtype)

    def empty_like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The same in the shape of a contiguous tensor."""
        return self.empty(tuple(tensor.shape), dtype)

    def _take(self, nbytes: int) -> tuple[Block, torch.UntypedStorage]:
        """A block, and its storage: for other threads it is idle until somebody refers to that."""
        with self._lock:
            idle = self._find_idle()
            found = next((block for block in idle if block.nbytes == nbytes), None)
            if found is None:
                block = _fresh(nbytes)
            else:
                self._drop(found, idle)
                block = found
            storage = block.storage
            self._blocks.append(block)
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            while idle and self.used_bytes + self.idle_bytes > self.peak_bytes * _MOST_KEPT:
                self._drop(idle[0], idle)  # the system has it back here
        return block, storage

    def _find_idle(self) -> list[Block]:
        """The idle blocks, the longest idle first; what has lost its memory is forgotten."""
        used, idle = [], []
        for block in self._blocks:
            if not block.is_idle():
                used.append(block)
            elif block.is_whole():
                idle.append(block)
        self._blocks = idle + used
        self.idle_bytes = sum(block.nbytes for block in idle)
        self.used_bytes = sum(block.nbytes for block in used)
        return idle

    def _drop(self, block: Block, idle: list[Block]) -> None:
        self._blocks.remove(block)
        idle.remove(block)
        self.idle_bytes -= block.nbytes

    def reset(self) -> None:
        """Give idle blocks back to the system, and forget the most that was used."""
        with self._lock:
            idle = self._find_idle()
            while idle:
                self._drop(idle[0], idle)
            self.peak_bytes = self.used_bytes

    def after_fork(self) -> None:
        """For the child: another thread may have held the lock."""
        self._lock = threading.Lock()


@cache
def idle_is_known() -> bool:
    """Whether this torch and this Python count references as `Block.is_idle` reads them. Without
    that nothing is used again."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # references are counted in another way
        return False
    block = Block(torch.UntypedStorage(64, device="cpu"))
    referring: tuple[Callable[[], object], ...] = (
        lambda: block.storage,
        lambda: block.tensor((64,), torch.uint8),
        lambda: block.tensor((64,), torch.uint8)[1:],
        lambda: to_dlpack(block.tensor((64,), torch.uint8)),  # as numpy and others hold one
        lambda: block.tensor((64,), torch.uint8).untyped_storage(),
        lambda: weakref.ref(block.tensor((64,), torch.uint8).untyped_storage()),
    )
    known = block.is_idle()
    for refer in referring:
        held = refer()
        known = known and not block.is_idle()
        del held
        known = known and block.is_idle()
    return known


def _fresh(nbytes: int) -> Block:
    """New memory, in huge pages where the system has them."""
    block = Block(torch.UntypedStorage(nbytes, device="cpu"))
    page = mmap.PAGESIZE
    first = -(-block.address // page) * page
    _advise_huge_pages(first, (block.address + nbytes - first) // page * page)
    return block


def in_huge_pages(nbytes: int) -> Tensor:
    """uint8 [nbytes] for what is read over and over: in huge pages where the system has them and
    one would be filled. The second level of a core's cache knows lines by their physical address;
    of an operand in small pages that would fit, some lines push out others."""
    if nbytes < _HUGE:
        return torch.empty(nbytes, dtype=torch.uint8, device=CPU)
    room = torch.empty(nbytes + _HUGE, dtype=torch.uint8, device=CPU)  # what is not touched is free
    skip = -room.data_ptr() % _HUGE
    _advise_huge_pages(room.data_ptr() + skip, nbytes // _HUGE * _HUGE)
    return room[skip : skip + nbytes]


def _advise_huge_pages(address: int, nbytes: int) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError, AttributeError):  # a system without
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE
            )


_pool = Pool()
empty, empty_like, reset = _pool.empty, _pool.empty_like, _pool.reset

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.after_fork)
