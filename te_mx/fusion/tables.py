"""What a rotary embedding of another library's model does once convert_model(fuse=True) has found
it: in compiled code its tables of cosines and sines are written once.

torch.compile would make them a part of every kernel that rotates queries and keys, forward and
back, where two sines and a cosine for each element take three to five times as long as reading
the tables.

Rotary embeddings, whose tables compiled code is to write once (te_mx/fusion/tables.py).

They are known by what they hold: frequencies under the name that all libraries give them, and
neither parameters nor submodules. Whatever else that were, storing its result changes no value.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor, nn

from te_mx._ops.stored import stored
from te_mx.context.region import is_tracing
from te_mx.fusion.class_swap import Reclassed
from te_mx.fusion.sequences import Fusion
from te_mx.nn.guards import hooked
from te_mx.nn.linear import Linear

ATTRIBUTE = "_te_mx_tables"


class TablesPlan(NamedTuple):
    """One of the layers of the model, whose recipe counts."""

    beside: nn.Linear


class StoredTables(Reclassed):
    """Mixin in front of the class of a module."""

    def _te_mx_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        made = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not is_tracing() or not self._in_region():
            return made
        if type(made) is tuple and all(_is_table(one) for one in made):
            return tuple([stored(one) for one in made])
        return stored(made) if _is_table(made) else made

    def _in_region(self) -> bool:
        beside: Any = self.__dict__[ATTRIBUTE].beside
        return type(beside) is Linear and beside._settings() is not None


def _is_table(made: Any) -> bool:
    """Whether a result is one that nothing is differentiated through."""
    return isinstance(made, Tensor) and made.is_floating_point() and not made.requires_grad


_FREQUENCIES = "inv_freq"


class Tables(NamedTuple):
    """A module whose results are tables."""

    module: nn.Module
    plan: TablesPlan


def plan_tables(
    model: nn.Module, converts: Collection[nn.Module]
) -> tuple[list[Fusion], list[Tables]]:
    """The report and what `fuse_in_place` is to do. converts: the layers that are te_mx.Linear
    afterwards."""
    found: list[Fusion] = []
    tables: list[Tables] = []
    beside = next((module for module in model.modules() if module in converts), None)
    for name, module in model.named_modules():
        frequencies = module._buffers.get(_FREQUENCIES)
        if frequencies is None or frequencies.dim() != 1 or not isinstance(beside, nn.Linear):
            continue
        others = any(True for _ in module.parameters()) or module._modules
        if others or isinstance(module, Reclassed) or hooked(module):
            continue
        what = f"{type(module).__name__}: its tables are written once in compiled code"
        found.append(Fusion(name or "(root)", str(2 * len(frequencies)), what, ""))
        tables.append(Tables(module, TablesPlan(beside)))
    return found, tables
