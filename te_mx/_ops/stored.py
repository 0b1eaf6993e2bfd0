"""te_mx::stored: a tensor as memory of its own, computed once.

Compiled code computes what is cheap to write down, as the sines of a rotary embedding are, again
for every element of every kernel that reads it. An op is no part of what it fuses: its result lies
in memory, and is read."""

import torch
from torch import Tensor

from te_mx._ops.library import define


def stored(x: Tensor) -> Tensor:
    """x [..], contiguous, in memory that nothing else has. Not differentiable."""
    return _STORED(x)


def _stored(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


_STORED = define("stored(Tensor x) -> Tensor", _stored, _stored)
