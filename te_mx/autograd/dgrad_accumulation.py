"""The input gradients of layers that read one tensor add up in their GEMMs: each adds to what the
ones before left, and the last one of a backward pass gives the sum to autograd. Without this each
writes a gradient of its own, and autograd adds them in a pass over memory for each.

The sum is rounded to the dtype of the input after every GEMM, as autograd's is after every
addition, but what is added is the fp32 sum of the GEMM. Which layers take part in a backward pass,
the engine says (`torch.autograd.grad` may leave some out). A layer whose node has a hook, which
would see what the node gives to autograd, is left out from then on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from te_mx.torch_internals import knows_passes, pass_id, will_run


class Pass:
    """One backward pass: how many layers are still to come, and the sum so far."""

    __slots__ = ("__weakref__", "left", "total")

    def __init__(self, left: int) -> None:
        self.left = left
        self.total: Tensor | None = None


class Siblings:
    """The nodes of layers that read one tensor and want its gradient. Passes over one graph may run
    at the same time, in other threads or one inside the other. One that an error ended is kept,
    with what it summed up, until the graph is gone."""

    __slots__ = ("_nodes", "_passes")

    def __init__(self) -> None:
        self._nodes: list[weakref.ref[Any]] = []
        self._passes: dict[int, Pass] = {}  # by their numbers, of which no two passes have the same

    def join(self, node: Any) -> None:
        """Called in the forward of a layer."""
        _watch_hooks(type(node))
        self._nodes = [*self._alive_but(None), weakref.ref(node)]

    def leave(self, node: Any) -> None:
        """No backward pass that begins later counts on this node."""
        self._nodes = self._alive_but(node)

    def enter(self) -> Pass | None:
        """Called once in the backward of each; None for a layer that is alone in the pass."""
        task = pass_id() if knows_passes else -1
        if len(self._nodes) < 2 or task == -1 or _apart.on:
            return None
        found = self._passes.get(task)
        if found is None:
            count = sum(_runs(ref()) for ref in self._nodes)
            if count < 2:
                return None
            found = self._passes[task] = Pass(count)
        found.left -= 1
        if not found.left:
            del self._passes[task]
        return found

    def _alive_but(self, node: Any) -> list[weakref.ref[Any]]:
        return [ref for ref in self._nodes if (held := ref()) is not None and held is not node]


def _runs(node: Any) -> bool:
    return node is not None and will_run(node)


class _Apart(threading.local):
    on = False


_apart = _Apart()


@contextmanager
def apart() -> Iterator[None]:
    """Gradients that get a history of their own do not add up here."""
    before, _apart.on = _apart.on, True
    try:
        yield
    finally:
        _apart.on = before


_watched: set[type] = set()


def _watch_hooks(node_class: Any) -> None:
    """Have nodes of an autograd function of te_mx leave their siblings when they get a hook, so
    that it sees the gradient of this layer alone, and may change it."""
    if node_class in _watched:
        return
    _watched.add(node_class)
    register = node_class.register_hook

    def register_hook(self: Any, hook: Any) -> Any:
        siblings = getattr(self, "siblings", None)
        if siblings is not None and pass_id() == -1:
            siblings.leave(self)
            self.siblings = None
        return register(self, hook)

    node_class.register_hook = register_hook


def entered(siblings: Siblings | None) -> Pass | None:
    """The pass that a layer is in with others, or None. Compiled autograd adds up by itself."""
    if siblings is None or torch.compiler.is_compiling():
        return None
    return siblings.enter()


def total(among: Pass | None) -> Tensor | None:
    """The sum of the layers before."""
    return None if among is None else among.total


def passed_on(among: Pass | None, dx: Tensor | None) -> Tensor | None:
    """What a layer gives to autograd for its input, of which dx is the sum so far."""
    if among is None:
        return dx
    if not among.left:
        among.total = None
        return dx
    among.total = dx
    return None


def settled(siblings: Siblings | None) -> Tensor | None:
    """The same for a layer that gets no gradient itself."""
    among = entered(siblings)
    return passed_on(among, total(among))
