"""Hooks that parallelize_module puts around the modules of a plan: which ones are known, and what
they do with what a layer takes and makes.
"""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from te_mx.distributed import styles
from te_mx.nn.guards import why_not_usual as _why_not_but_hooks

_MADE_BY = f"{distribute_module.__name__}.<locals>."
_INNER, _WHOLE = (Shard(-1),), (Replicate(),)
_OURS = {styles._prepare_input, styles._prepare_output}
# What torch's styles have distribute_module call are functions of these classes.
_THEIRS = {(one.__module__, one.__qualname__) for one in (ColwiseParallel, RowwiseParallel)}


# By hook what it closes over: to look takes longer than a layer has.
_held: weakref.WeakKeyDictionary[Any, Mapping[str, Any]] = weakref.WeakKeyDictionary()


def given(hook: Any, name: str) -> Any:
    """The function that distribute_module was given, of a hook that it made; None of others, and of
    functions that no style of torch or te_mx has."""
    if not getattr(hook, "__qualname__", "").startswith(_MADE_BY):
        return None
    held = _held.get(hook)
    if held is None:
        held = _held[hook] = inspect.getclosurevars(hook).nonlocals
    made = held.get(name)
    if not isinstance(made, partial):
        return None
    owner = made.func.__module__, made.func.__qualname__.rpartition(".")[0]
    return made if made.func in _OURS or owner in _THEIRS else None


class Wanted(NamedTuple):
    """What the hook behind a layer makes of its result: where that is to be, None where it already
    is but for sums, which every rank gets; and whether a plain tensor comes out."""

    layouts: tuple[Placement, ...] | None
    local: bool

    def whole(self) -> bool:
        """Whether every rank gets a sum."""
        return self.layouts in (None, _WHOLE)


def wanted_of(layer: Any) -> Wanted | None:
    """That of a layer with one known hook behind it; None of others."""
    if len(layer._forward_hooks) != 1 or layer._forward_hooks_with_kwargs:
        return None
    made = _of(layer, "_forward_hooks", "output_fn")
    return None if made is None else _wanted(made)


def _wanted(made: Any) -> Wanted:
    if made.func is not styles._prepare_output:
        return Wanted(*made.args)
    style = made.args[0]
    layouts = None if style.output_layouts is None else (style.output_layouts,)
    return Wanted(layouts, style.use_local_output)


def hooks_of(layer: Any) -> list[Any]:
    """In front of a layer, and behind it."""
    return [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]


def same_objects(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same ones."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


_usual: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def why_not_usual(name: str, layer: Any) -> str:
    """Why a layer is none that runs in a block on several ranks, but for its tensors."""
    if reason := _why_not_but_hooks(name, layer):
        return reason
    if layer._gathers:
        return f"{name} is gathered as codes"
    usual = (
        not (layer._backward_hooks or layer._backward_pre_hooks or "forward" in layer.__dict__)
        and not (layer._forward_pre_hooks_with_kwargs or layer._forward_hooks_with_kwargs)
        and _are_known(layer)
    )
    return "" if usual else f"{name} has hooks other than those of parallelize_module"


def _are_known(layer: Any) -> bool:
    now, before = hooks_of(layer), _usual.get(layer)
    if before is not None and same_objects(now, before):
        return True
    known = (
        all(given(hook, "input_fn") for hook in layer._forward_pre_hooks.values())
        and all(given(hook, "output_fn") for hook in layer._forward_hooks.values())
        and max(len(layer._forward_pre_hooks), len(layer._forward_hooks)) <= 1
    )
    if known:
        _usual[layer] = now
    return known


def _of(layer: Any, hooks: str, name: str) -> Any:
    return next((given(hook, name) for hook in getattr(layer, hooks).values()), None)


def why_not_between(first: list[Any], last: Any) -> str:
    """Why what the first layers make does not go to the last one as it is."""
    into = [_taken(_of(one, "_forward_pre_hooks", "input_fn")) for one in first]
    if any(one != into[0] for one in into):
        return "its first layers take their input differently"
    made = [_of(one, "_forward_hooks", "output_fn") for one in first]
    outs = [Wanted(None, False) if one is None else _wanted(one) for one in made]
    taken = _of(last, "_forward_pre_hooks", "input_fn")
    if any(one.local != outs[0].local for one in outs) or (outs[0].local and taken is None):
        return "its first layers give their results differently"
    layouts = [*(one.layouts for one in outs), *_taken(taken)[1:]]
    if all(one in (None, _INNER) for one in layouts):
        return ""
    return "its inner width is not sharded along the features on all ranks"


def _taken(made: Any) -> tuple[Any, ...]:
    """Of a hook in front of a layer its function, how it takes plain tensors as placed, and where
    torch's styles move them."""
    if made is None:
        return (None,)
    if made.func is styles._prepare_input:
        return made.func, (made.args[0].input_layouts,)
    return made.func, *made.args
