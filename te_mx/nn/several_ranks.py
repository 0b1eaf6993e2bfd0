"""The seam between the modules and te_mx.distributed, which stands above them: calls that concern
tensors of several ranks are handed up, and weight gradients that belong to several ranks find the
one who puts them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_mx.autograd.owned_gradients import Owner


class _Above:
    """What te_mx.distributed does, once it is imported, which te_mx does.

    run(module, inp, *args): the forward of a module on what this rank has of its tensors.
    """

    run: Callable[..., Any]


above = _Above()


def is_spread(*tensors: Any) -> bool:
    """Whether one of these is a DTensor, which takes seconds to import and so is known by name."""
    return any(type(tensor).__name__ == "DTensor" for tensor in tensors)


def here(tensor: Any) -> Any:
    """What this rank has of a tensor, without history: always the same object."""
    if not is_spread(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


class SeveralRanks:
    """Mixin of the modules, beside an nn.Module."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    _group: Any = None  # what te_mx.distributed knows of set_tensor_parallel_group
    _owned: dict[int, Owner] | None = None  # owners of local weights, by the id of these

    def _is_spread(self, inp: Any) -> bool:
        """Whether a call on this input concerns other ranks."""
        if self._group is not None:
            return True
        return is_spread(inp, *self._parameters.values())  # type: ignore[attr-defined]

    def _run_spread(self, inp: Any, *args: Any) -> Any:
        return above.run(self, inp, *args)
