"""Parameters of which this rank has a part, as autograd functions take them: the function is given
the parameter, reads what is here, and makes of the gradient of that one of the parameter.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Lent(Protocol):
    """A parameter; te_mx.distributed knows what kind of one."""

    @property
    def parameter(self) -> Any:
        """Itself."""

    @property
    def local(self) -> Tensor:
        """What is here, a plain tensor without history."""

    def whole(self, grad: Tensor | None) -> Any:
        """The gradient of the parameter, of that of `local`."""


def here(parameter: Any, lent: Lent | None) -> Any:
    """What steps read of a parameter."""
    return parameter if lent is None else lent.local
