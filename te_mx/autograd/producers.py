"""Inputs that backward has anyway: the operation that made a tensor keeps it, as attention keeps
its result, or the two factors of it, as the product before a gated MLP's last layer does.

A layer that reads such a tensor keeps the same memory instead of codes of its own, so it adds
nothing to what the model keeps. The tensors go through autograd's own bookkeeping
(save_for_backward): writes to them after this call are errors in backward, as for nn.Linear.

What was written to before this call is left to the codes: versions are compared, and memory that
`.data` reached is not looked at (runtime/exposed.py). Compiled code and layers inside of
torch.utils.checkpoint keep codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx._ops.library import is_direct
from te_mx.runtime import exposed, streams

_LEAST = 1 << 16  # elements; codes of less are not worth a look
_RESULTS = ("output", "out", "result")  # how torch names a saved result
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "Transpose", "Permute", "ReshapeAlias", "Alias", "Clone")
)
_MOST_VIEWS = 4


def sources(x: Tensor) -> tuple[Tensor, ...]:
    """(x,) where x's own memory is kept for backward by what made it; (a, b) where x is a * b, both
    of its shape, and these are kept; () otherwise."""
    if torch.compiler.is_compiling() or x.grad_fn is None:
        return ()
    node: Any = x.grad_fn
    if x.numel() < _LEAST or not _is_plain(x):
        return ()
    if node.name() == "MulBackward0":
        return _factors(x, node)
    for _ in range(_MOST_VIEWS):
        if node is None or node.name() not in _VIEWS:
            break
        node = node.next_functions[0][0]  # a copy among these does not share memory, see below
    for name in _RESULTS:
        kept = _saved(node, name)
        if kept is not None and kept.untyped_storage()._cdata == x.untyped_storage()._cdata:
            return (x,)
    return ()


def _is_plain(t: Tensor) -> bool:
    return is_direct(t) and not t.is_inference() and not exposed.is_exposed(t)


def _saved(node: Any, name: str) -> Tensor | None:
    """What a node saved under a name, as it was handed to hooks on saved tensors where there are
    some: unpacking is for backward alone. None where that is no tensor, or is gone; and where
    torch.utils.checkpoint keeps it, which must see the same in forward and when it recomputes."""
    try:
        saved = getattr(node, f"_raw_saved_{name}")
        packed, unpack = saved.data, saved.unpack_hook
    except (AttributeError, RuntimeError):  # no such name; freed
        return None
    if getattr(unpack, "__module__", "") == "torch.utils.checkpoint":
        return None
    return packed if isinstance(packed, Tensor) else None


def _factors(x: Tensor, node: Any) -> tuple[Tensor, ...]:
    """The factors of x [..] = a * b as the product of autograd saved them."""
    pair = []
    for name in ("self", "other"):
        factor = _saved(node, name)
        if factor is None or factor.shape != x.shape or factor.device != x.device:
            return ()
        pair.append(factor)
    if x._version or not all(_is_plain(t) for t in pair):
        return ()
    try:
        if all(
            getattr(node, f"_raw_saved_{name}").unpack_hook is None for name in ("self", "other")
        ):
            node._saved_self, node._saved_other  # noqa: B018 (raises if one was written to)
        elif streams.capturing(x.device) or not torch.equal(pair[0] * pair[1], x):
            return ()  # a hook may have packed another tensor
    except (AttributeError, RuntimeError):
        return ()
    return tuple(t.detach() for t in pair)
