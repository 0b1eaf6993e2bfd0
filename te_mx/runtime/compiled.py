"""What compiled code calls and Dynamo does not trace, by name: ``compiled.NAME(..)``.

torch.compiler marks such functions, but its decorators import Dynamo, which takes seconds. So a
name is marked where it is first read, which is in code that Dynamo traces."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_constants: dict[str, Callable[..., Any]] = {}


def constant(fn: _F) -> _F:
    """Have Dynamo call `fn` where it traces ``compiled.<its name>(..)``, and keep the answer in the
    graph: of constants, a constant. `fn` itself is called by other code alone."""
    _constants[fn.__name__] = fn
    return fn


def _call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def __getattr__(name: str) -> Any:
    if name == "untraced":  # (fn, *args): fn(*args), outside of the graph that is being compiled
        reason = "te_mx: a weight gradient that goes to main_grad or is delayed"
        globals()[name] = torch.compiler.disable(_call, reason=reason)
    elif name in _constants:
        globals()[name] = torch.compiler.assume_constant_result(_constants[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
