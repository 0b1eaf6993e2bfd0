"""torch.utils.checkpoint runs a function again inside the region that it ran in first, as it does
with torch.autocast. It has no hook for others, but both of its forms hand the function to a class
that every entry to them uses, so that is where it is bound to its region.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from te_mx.context import active_region, entered_again

_INSTALLED = "_te_mx_binds"


def bound(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` in the region that is active now, or in none, whenever and in whatever thread it is
    called."""
    region = active_region()
    first_run: dict[int, Any] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        with entered_again(region, first_run):
            return fn(*args, **kwargs)

    return run


def install() -> None:
    """Bind what torch.utils.checkpoint will run again from now on. A torch that does it in another
    way, or that was changed already, is left alone; modules then go by what they ran with, see
    nn/mx_module.py."""
    from torch.utils import checkpoint

    reentrant = getattr(checkpoint, "CheckpointFunction", None)
    if _takes(reentrant, "forward", "ctx", "run_function"):
        forward = reentrant.forward  # type: ignore[union-attr]

        @functools.wraps(forward)
        def bound_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            return forward(ctx, bound(run_function), *args)

        bound_forward.__dict__[_INSTALLED] = True
        reentrant.forward = staticmethod(bound_forward)  # type: ignore[union-attr]

    frame: Any = getattr(checkpoint, "_CheckpointFrame", None)
    if _takes(frame, "__init__", "self", "recompute_fn"):
        init = frame.__init__

        @functools.wraps(init)
        def bound_init(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kw: Any) -> None:
            init(self, bound(recompute_fn), *args, **kw)

        bound_init.__dict__[_INSTALLED] = True
        frame.__init__ = bound_init


def _takes(owner: Any, method: str, *first: str) -> bool:
    """Whether owner has the method, its first arguments have these names, and it was not bound."""
    function = getattr(owner, method, None)
    return (
        inspect.isfunction(function)
        and not hasattr(function, _INSTALLED)
        and tuple(inspect.signature(function).parameters)[:2] == first
    )
