"""Memory that was reached through `Tensor.data`, or put into a tensor through it: writes there
change no version that other tensors of the same memory would show, so what is remembered about them
could become stale unseen.

torch has no hook for it. `torch.Tensor.data` is replaced by a property that does the same and notes
the memory, by its storage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_MANY = 1 << 12  # noted storages before the dead ones are looked for
_noted: dict[int, StorageWeakRef] = {}  # alive or not: an address is not used again meanwhile
_data: Any = torch._C.TensorBase.data
_limit = _MANY


def is_exposed(x: Tensor) -> bool:
    """Whether the memory of x has more than one version: `.data` of any tensor reached it."""
    return bool(_noted) and x.untyped_storage()._cdata in _noted


def _note(x: Tensor) -> None:
    global _limit
    try:
        with torch._C.DisableTorchFunctionSubclass():
            storage = x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # no memory: sparse, functorch's
        return
    key = storage._cdata
    if key in _noted:
        return
    if len(_noted) >= _limit:
        for old in [k for k, ref in list(_noted.items()) if ref.expired()]:
            _noted.pop(old, None)
        _limit = max(_MANY, 2 * len(_noted))
    _noted[key] = StorageWeakRef(storage)


class _Data(property):
    """The descriptor of `Tensor.data`, in torch's meaning. A property, whose `__get__` is a method
    of C: that is how uninitialized parameters tell attributes, which they have, from functions."""

    __name__ = "data"


def _get(x: Tensor) -> Tensor:
    made: Tensor = _data.__get__(x, type(x))
    _note(x)
    return made


def _set(x: Tensor, value: Tensor) -> None:
    _data.__set__(x, value)
    _note(value)


def _delete(x: Tensor) -> None:
    _data.__delete__(x)


def install() -> None:
    """Put the property in the place of torch's, once."""
    if not isinstance(torch.Tensor.__dict__.get("data"), _Data):
        torch.Tensor.data = _Data(_get, _set, _delete, _data.__doc__)  # type: ignore[assignment]
