"""What ran: the kernel of the last GEMM with a tag, and one warning a kind of fallback."""

import itertools
import warnings
import weakref
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

# Kernel that the last GEMM with a tag ran on; `te_mx.audit` reads it. One entry a tag, written
# without a lock. Tags of modules come from `new_tags` and end with the module.
LAST_RUN: dict[int, str] = {}
TAGS = 9  # of a module: three GEMMs for each linear step, of which there are three at most

_first_tags = itertools.count(step=TAGS)
_living: dict[int, Any] = {}  # finalizers by first tag

_warned: set[str] = set()


def new_tags(module: Any) -> int:
    """The first of TAGS tags that are a module's own, while it lives."""
    first = next(_first_tags)
    # A backward pass may outlive its module and record once more.
    if len(LAST_RUN) > 2 * TAGS * (len(_living) + TAGS):
        for tag in list(LAST_RUN):
            if tag < first and tag - tag % TAGS not in _living:
                LAST_RUN.pop(tag, None)
    _living[first] = weakref.finalize(module, _end, first)
    _living[first].atexit = False
    return first


def end_tags(first: int) -> None:
    """For a module that lives on and is te_mx's no more."""
    if (finalizer := _living.get(first)) is not None:
        finalizer()


def _end(first: int) -> None:
    _living.pop(first, None)
    for tag in range(first, first + TAGS):
        LAST_RUN.pop(tag, None)


# Storages that ops read for somebody who does not record, as compiled code does not, by address: a
# number for each layer in its graphs would make every layer compile anew. Some of them are weights.
_read: dict[int, StorageWeakRef] = {}
_MOST_READ = 4096


def note_read(tensor: Tensor) -> None:
    """Called by ops behind the dispatcher, of weights and of whatever else is read as they are."""
    storage = tensor.untyped_storage()
    known = _read.get(storage.data_ptr())
    if known is not None and not known.expired():
        return
    if len(_read) >= _MOST_READ:
        living = [(at, ref) for at, ref in list(_read.items()) if not ref.expired()]
        _read.clear()
        _read.update(living[-_MOST_READ // 2 :])
    _read[storage.data_ptr()] = StorageWeakRef(storage)


def was_read(tensor: Tensor) -> bool:
    """Whether an op behind the dispatcher read the memory of a tensor while it was this one's."""
    if tensor.is_meta:
        return False
    storage = tensor.untyped_storage()
    known = _read.get(storage.data_ptr())
    return known is not None and known == StorageWeakRef(storage)


def note_written(out: Tensor) -> None:
    """Tell autograd what native code wrote behind its back."""
    if not out.is_inference():
        increment_version(out)


class FallbackWarning(RuntimeWarning):
    """Something ran on the slow reference backend on a device that has a native one."""


def warn_fallback(kind: str, why: str) -> None:
    """Warn once in this process about one kind of fallback."""
    if kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(
        f"te_mx runs {kind} on the plain torch reference backend, which is slow: {why}. "
        "te_mx.explain() tells more.",
        FallbackWarning,
        stacklevel=3,
    )
