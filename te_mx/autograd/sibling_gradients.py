"""The input gradients of layers that read one tensor add up in their GEMMs: each adds to what the
ones before left, and the last one of a backward pass gives the sum to autograd. Without this each
writes a gradient of its own, and autograd adds them in a pass over memory for each.

The sum is rounded to the dtype of the input after every GEMM, as autograd's is after every
addition, but what is added is the fp32 sum of the GEMM. Which layers take part in a backward pass,
the engine says (`torch.autograd.grad` may leave some out).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

_pass_id = torch._C._current_graph_task_id
_will_run = torch._C._will_engine_execute_node


class Pass:
    """One backward pass: how many layers are still to come, and the sum so far."""

    __slots__ = ("left", "total")

    def __init__(self, left: int) -> None:
        self.left = left
        self.total: Tensor | None = None


class Siblings:
    """The nodes of layers that read one tensor and want its gradient."""

    __slots__ = ("_nodes", "_passes")

    def __init__(self) -> None:
        self._nodes: list[weakref.ref[Any]] = []
        self._passes: dict[int, Pass] = {}

    def join(self, node: Any) -> None:
        """Called in the forward of a layer."""
        self._nodes.append(weakref.ref(node))

    def enter(self) -> Pass | None:
        """Called once in the backward of each; None for a layer that is alone in the pass."""
        task = _pass_id()
        if len(self._nodes) < 2 or task == -1:
            return None
        found = self._passes.get(task)
        if found is None:
            count = sum(_runs(ref()) for ref in self._nodes)
            if count < 2:
                return None
            self._passes.clear()  # those that an error ended
            found = self._passes[task] = Pass(count)
        found.left -= 1
        if not found.left:
            del self._passes[task]
        return found


def _runs(node: Any) -> bool:
    return node is not None and _will_run(node)


def entered(siblings: Siblings | None) -> Pass | None:
    """The pass that a layer is in with others, or None."""
    return None if siblings is None else siblings.enter()


def total(among: Pass | None) -> Tensor | None:
    """The sum of the layers before."""
    return None if among is None else among.total


def passed_on(among: Pass | None, dx: Tensor | None) -> Tensor | None:
    """What a layer gives to autograd for its input, of which dx is the sum so far."""
    if among is None or not among.left:
        return dx
    among.total = dx
    return None


def settled(siblings: Siblings | None) -> Tensor | None:
    """The same for a layer that gets no gradient itself."""
    among = entered(siblings)
    return passed_on(among, total(among))
