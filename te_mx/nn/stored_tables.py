"""What a rotary embedding of another library's model does once convert_model(fuse=True) has found
it: in compiled code its tables of cosines and sines are written once.

torch.compile would make them a part of every kernel that rotates queries and keys, forward and
back, where two sines and a cosine for each element take three to five times as long as reading
the tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from te_mx._ops.stored import stored
from te_mx.context import is_tracing
from te_mx.nn.linear import Linear
from te_mx.nn.reclassed import Reclassed

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
