"""The part of a module that holds weight gradients back (delay_wgrad_compute), and how a module
leaves compiled code where its weight gradients need it; shared by every module family.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from te_mx.arguments import shown
from te_mx.autograd.wgrad import Queue


def __getattr__(name: str) -> Any:
    # Not a decorator, because torch.compiler.disable takes seconds to import: Dynamo reads the
    # attribute when it traces, and has been imported then.
    if name == "untraced":
        reason = "te_mx: a weight gradient that goes to main_grad or is delayed"
        globals()[name] = torch.compiler.disable(_call, reason=reason)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _call(fn: Callable[..., Any], *args: Any) -> Any:
    """`untraced` calls a function outside of the graph that is being compiled."""
    return fn(*args)


class DelayedWgrad:
    """Mixin of modules whose backward may leave the weight gradients for ``backward_dw()``."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    delay_wgrad_compute: bool = False
    _delayed: Queue | None = None  # one GEMM for each weight and backward pass, oldest first
    _wgrad_hooks: tuple[Callable[[], Any], ...] = ()

    def _start_delaying(self) -> None:
        """Called by a constructor, when the parameters are there."""
        self.delay_wgrad_compute = True
        self._mark_delayed()

    def _mark_delayed(self) -> None:
        """Data-parallel wrappers written for Transformer Engine wait for backward_dw of parameters
        that say so."""
        assert isinstance(self, nn.Module)
        for parameter in self.parameters(recurse=False) if self.delay_wgrad_compute else ():
            parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def _wgrad_queue(self) -> Queue | None:
        """Where a forward tells its backward to leave the GEMM."""
        if not self.delay_wgrad_compute:
            return None
        if self._delayed is None:
            self.__dict__["_delayed"] = deque()
        return self._delayed

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for `backward_dw`: the value of delay_wgrad_compute."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradient that the oldest backward pass left, and put it where that
        pass would have: added to ``weight.grad``, or into ``weight.main_grad``. Then call the
        registered hooks. Without delay_wgrad_compute it does nothing.

        Raises:
            RuntimeError: no backward pass is waiting; or the GEMM reads the input or the output
                gradient itself (save_original_input, recipes with a backward in high precision,
                outside te_mx.autocast), and it was modified in place after that pass. That pass
                no longer waits then.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._delayed:
            raise RuntimeError(
                f"{type(self).__name__}.backward_dw(): no weight gradient is waiting; call it once "
                "after each backward pass in which the weight needs a gradient"
            )
        self._delayed.popleft()()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Have ``hook()`` called at the end of every `backward_dw`; Transformer Engine's name.

        Raises TypeError for what cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"{type(self).__name__}: hook must be a function, got {shown(hook)}")
        self._wgrad_hooks = (*self._wgrad_hooks, hook)
