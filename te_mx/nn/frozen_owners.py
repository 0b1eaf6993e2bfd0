"""Which frozen module holds a tensor: code that got tensors alone finds what is kept of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

_owners: dict[int, weakref.ref[Any]] = {}  # by id of the first tensor of a weight


def register(module: Any) -> None:
    """Note a frozen module as the owner of its weights, as they are held now."""
    for key in module._weight_keys:
        held = module._held_tensors(key)
        if held is None:
            continue
        number = id(held[0])

        def gone(owner: weakref.ref[Any], number: int = number) -> None:
            if _owners.get(number) is owner:
                del _owners[number]

        _owners[number] = weakref.ref(module, gone)


def owner_of(tensors: Sequence[Tensor], key: str) -> Any:
    """The frozen module that holds these very tensors as a weight of this key, or None."""
    reference = _owners.get(id(tensors[0]))
    module = None if reference is None else reference()
    if module is None or module._frozen is None or key not in module._weight_keys:
        return None
    held = module._held_tensors(key)
    if held is None or len(held) != len(tensors):
        return None
    return module if all(a is b for a, b in zip(held, tensors, strict=True)) else None
