"""Modules of other libraries that get a class of te_mx in place: a subclass of their own, made when
it is first needed, with a mixin in front.

The module stays the same object, an instance of its own class and of that name (which wrapping
policies go by), with its parameters, submodules, hooks and state_dict, and its forward keeps the
signature of its own. It can be copied and pickled: what is written is its own class and the mixin,
which make the same subclass again.

What the layers of other libraries that run in MXFP8 in place have in common."""

import copyreg
import functools
from typing import Any

from torch import nn

from te_mx.nn.base import MXModule

_made: dict[tuple[type, type], type] = {}


class Reclassed:
    """Base of the mixins, which have `_te_mx_forward` and in it call ``super().forward``. `_own` is
    the class that the module had, `_mixin` what is in front, `_followed` the forward that `_own`
    had when the subclass was made."""

    _own: type[nn.Module]
    _mixin: type
    _followed: tuple[Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds classes by name, and these have none. Protocols 0 and 1 know other forms.
        made: Any = super().__reduce_ex__(max(protocol, 2))
        kind = type(self)
        if isinstance(made, tuple) and made[0] is copyreg.__newobj__ and "_own" in kind.__dict__:  # type: ignore[attr-defined]
            return (_new, (kind._mixin, kind._own), *made[2:])
        return made


def _class(mixin: type, own: type) -> type:
    made = _made.get((mixin, own))
    if made is None:

        @functools.wraps(own.forward)  # type: ignore[attr-defined]
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # with the signature of its own
            return self._te_mx_forward(*args, **kwargs)

        names = {
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
            "__doc__": own.__doc__,
            "forward": forward,
            "_own": own,
            "_mixin": mixin,
            "_followed": (own.forward,),  # type: ignore[attr-defined]
        }
        made = _made[mixin, own] = type(own.__name__, (mixin, own), names)
    return made


def _new(mixin: type, own: type) -> Any:
    """An empty module for pickle and copy to fill."""
    kind: Any = _class(mixin, own)
    return kind.__new__(kind)


def give(module: nn.Module, mixin: type) -> None:
    """Put a mixin in front of the class of a module."""
    module.__class__ = _class(mixin, type(module))


def why_not_back(module: Any) -> str:
    """Why a module cannot get its own class back, or an empty string."""
    kind = type(module)
    if "_own" in kind.__dict__:
        return ""
    return f"its class is {kind.__name__} now, which something else made"


def take_back(module: Any, *attributes: str) -> str:
    """Give a module its own class back, without these attributes; returns why not, or ""."""
    if reason := why_not_back(module):
        return reason
    for attribute in attributes:
        module.__dict__.pop(attribute, None)
    module.__class__ = type(module)._own
    return ""


class LayerInPlace(Reclassed, MXModule):
    """Mixin before the class of such a layer."""

    def _label(self) -> str:
        kind = f"te_mx.{type(self).__name__}"
        return f"{kind} {self.name!r}" if self.name else kind

    @property
    def reset_parameters(self) -> Any:
        """Hidden, from whoever initializes what has such a method: the model does that."""
        raise AttributeError("reset_parameters: the model initializes this layer")
