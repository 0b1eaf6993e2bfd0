"""Modules that compute with the weight of a layer below them and do not call it, such as the fast
path of nn.TransformerEncoderLayer: their code says so, where it reads ``self.<layer>.weight`` in
forward or in a method that forward calls.
"""

from __future__ import annotations

import dis
import inspect
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

_known: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def weights_read(owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules below this one whose weight its forward reads, each with its name."""
    kind = type(owner)
    if kind.__module__.startswith("te_mx."):
        return
    if kind not in _known:
        _known[kind] = frozenset(_paths(kind))
    for path in sorted(_known[kind]):
        try:
            yield path, owner.get_submodule(path)
        except AttributeError:  # of other instances
            continue


def reads_now(owner: nn.Module) -> bool:
    """Whether such a forward gets to where it reads: the fast path can be turned off."""
    return not isinstance(owner, nn.TransformerEncoderLayer) or (
        torch.backends.mha.get_fastpath_enabled()
    )


def _paths(kind: type) -> Iterator[str]:
    """P of every ``self.P.weight`` in forward and in what it calls on self."""
    seen, names = {"forward"}, ["forward"]
    while names:
        method = inspect.unwrap(getattr(kind, names.pop(), None))  # type: ignore[arg-type]
        code = getattr(method, "__code__", None)
        if code is None or not code.co_varnames:
            continue
        for chain in _chains(code, code.co_varnames[0]):
            if len(chain) > 1 and chain[-1] == "weight":
                yield ".".join(chain[:-1])
            elif len(chain) == 1 and chain[0] not in seen:
                seen.add(chain[0])
                names.append(chain[0])


def _chains(code: CodeType, me: str) -> Iterator[tuple[str, ...]]:
    """(a, b, ..) of every ``me.a.b..`` in a function and those inside of it, shorter ones first."""
    chain: tuple[str, ...] | None = None
    for step in dis.get_instructions(code):
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            last: Any = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
            chain = () if last == me else None
        elif chain is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, step.argval)
            yield chain
        else:
            chain = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _chains(inner, me)
