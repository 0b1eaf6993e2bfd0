"""Modules of other libraries that get a class of te_mx in place: a subclass of their own, with a
mixin in front.

The module stays the same object, an instance of its own class and of that name, with its
parameters, submodules, hooks and state_dict. It can be copied and pickled: what is written is its
own class and the mixin, which make the same subclass again.
"""

from __future__ import annotations

import copyreg
import functools
from typing import Any

import torch
from torch import nn

from te_mx.nn.linear import Linear

_made: dict[tuple[type, type], type] = {}
_PLAIN = (bool, int, float, str, type(None))
_OF_MODULES = {*nn.Module().__dict__, "name"}
# Marks that libraries put on modules, come and go and change no forward.
_MARKS = ("_is_hf_", "_hf_", "_fsdp", "_ddp", "_te_mx")
# What the last forward did, kept on the instance: FUSED, why its own forward ran, or "" in high
# precision.
RAN, FUSED = "_te_mx_ran", "fused"
_everywhere = torch.nn.modules.module


class Reclassed:
    """Base of the mixins, which have `_forward` and in it call ``super().forward``. `_own` is the
    class that the module had, `_mixin` what is in front, `_followed` the forward that `_own` had
    when the subclass was made."""

    _own: type[nn.Module]
    _mixin: type
    _followed: tuple[Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        kind = type(self)
        if isinstance(made, tuple) and made[0] is copyreg.__newobj__ and "_own" in kind.__dict__:  # type: ignore[attr-defined]
            return (_new, (kind._mixin, kind._own), *made[2:])
        return made


def _class(mixin: type, own: type) -> type:
    made = _made.get((mixin, own))
    if made is None:

        @functools.wraps(own.forward)  # type: ignore[attr-defined]
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # with the signature of its own
            return self._forward(*args, **kwargs)

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
    kind: Any = _class(mixin, own)
    return kind.__new__(kind)


def give(module: nn.Module, mixin: type) -> None:
    """Put a mixin in front of the class of a module."""
    module.__class__ = _class(mixin, type(module))


def take_back(module: Any) -> str:
    """Give a module its own class back; returns why that cannot be done, or an empty string."""
    kind = type(module)
    if "_own" not in kind.__dict__:
        return f"its class is {kind.__name__} now, which something else made"
    module.__class__ = kind._own
    return ""


# ---------------------------------------------------------------------- what a forward depends on
def surroundings(module: nn.Module, but: tuple[str, ...] = ()) -> tuple[tuple[str, Any], ...]:
    """What the forward of a module may read beside parameters and the submodules `but`: its plain
    attributes, functions and other submodules, by name."""
    found: list[tuple[str, Any]] = []
    for name, value in module.__dict__.items():
        if name in _OF_MODULES or name.startswith(_MARKS):
            continue
        if isinstance(value, _PLAIN) or callable(value):
            found.append((name, value))
    found += [(name, child) for name, child in module._modules.items() if name not in but]
    return tuple(found)


def changed(module: nn.Module, before: tuple[tuple[str, Any], ...]) -> str:
    """Which of `surroundings` is another one now, or an empty string. Numbers are compared,
    everything else is the same object or changed."""
    attributes, children = module.__dict__, module._modules
    for name, value in before:
        now = children[name] if name in children else attributes.get(name)
        if now is not value and not (isinstance(value, (int, float, str)) and now == value):
            return name
    return ""


def hooked(module: nn.Module) -> bool:
    """Whether calling a module does more than run its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def hooked_everywhere() -> bool:
    """Whether hooks were registered for all modules."""
    return bool(
        _everywhere._global_forward_hooks
        or _everywhere._global_forward_pre_hooks
        or _everywhere._global_backward_hooks
        or _everywhere._global_backward_pre_hooks
    )


def why_not_plain(name: str, layer: Any) -> str:
    """Why what is in the place of a converted layer is not just act(x @ w^T + b) on parameters of
    its own that train as usual, or an empty string."""
    if type(layer) is not Linear:
        return f"{name} was replaced by a {type(layer).__name__}"
    if hooked(layer):
        return f"{name} has hooks or a forward of its own"
    if layer._frozen is not None:
        return f"{name} is frozen"
    if layer.return_bias or layer._split is not None or layer.delay_wgrad_compute:
        return f"{name} has return_bias, parameters_split or delay_wgrad_compute"
    return ""
