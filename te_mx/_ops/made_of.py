"""What a normalized tensor was made of, known while a graph is traced.

Compiled code quantizes what a normalization makes with te_mx::quantize: its rows in the forward
pass, its columns in the backward pass. Where the trace sees that the matrix is the result of
te_mx::norm_quantize, and all of it, it takes that op in the place of this one, with the same bytes
(_ops/fused.py): the normalized matrix is neither written nor kept, if nothing else reads it, and
backward makes the columns of what the normalization keeps anyway.

It is seen below functionalization, where no tensor changes any more: what was written over in
between is another tensor."""

import weakref
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import fused
from te_mx._ops.library import LIBRARY
from te_mx.runtime import compiled

# By the mode that traces: by the memory of a result, which both hold, the result and its op's
# arguments up to `keep`.
_made: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, Tensor, tuple[Any, ...]]]]
_made = weakref.WeakKeyDictionary()
_registered: list[bool] = []


# Dynamo asks where it traces: proxy tensors come with sympy, which takes a while to import.
@compiled.constant
def follow() -> bool:
    """From now on traces follow what normalizations make. Always True."""
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    if not _registered:
        _registered.append(True)
        for op, rule in (("norm_quantize", _norm), ("quantize", _quantize)):
            torch.library.register_torch_dispatch(
                f"te_mx::{op}", ProxyTorchDispatchMode, rule, lib=LIBRARY
            )
    return True


def _norm(mode: Any, op: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
    made = mode.__torch_dispatch__(op, types, args, kwargs or {})
    *step, keep, row, col = args[:9]
    if keep and not (row or col or kwargs):
        memory = made[2].untyped_storage()
        _made.setdefault(mode, {})[id(memory)] = memory, made[2], tuple(step)
    return made


def _quantize(mode: Any, op: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
    x, row, col, rule, col_sum, _, *seed = args  # no default is given
    found = _made.get(mode, {}).get(id(x.untyped_storage()))
    if found is None or kwargs or col_sum or seed or not _is_all(x, found[1]):
        return mode.__torch_dispatch__(op, types, args, kwargs or {})
    parts: list[Tensor] = []
    for one in ((row, ""), ("", col)):
        if any(one):  # each an op of its own: what backward alone reads is made there
            how = *found[2], False, *one, rule, False
            parts += mode.__torch_dispatch__(fused.NORM, types, how, {})[3:]
    return parts


def _is_all(x: Tensor, whole: Tensor) -> bool:
    """Whether a matrix is another one, or a view of all of it."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if x.dtype is not whole.dtype or x.dim() != 2:
        return False
    mine = *x.shape, *x.stride(), x.storage_offset()
    theirs = *whole.shape, *whole.stride(), whole.storage_offset()
    return all(statically_known_true(a == b) for a, b in zip(mine, theirs, strict=True))
