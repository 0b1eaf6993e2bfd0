"""What a rank has of an input: the layers that read one DTensor read one local tensor.

So they quantize it once (autograd/input_cache.py), and their gradients add up on the rank before
DTensor moves the sum: one reduction for q, k and v instead of three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from te_mx.context.region import is_tracing
from te_mx.distributed.nodes import local_of as to_local
from te_mx.distributed.nodes import local_with_sum, sums_gradient
from te_mx.torch_internals import local_part

_LOCAL = "_te_mx_local"


def placed(x: DTensor, mesh: Any, placements: list[Placement]) -> DTensor:
    """x itself where it is so placed already."""
    if x.device_mesh == mesh and x.placements == tuple(placements):
        return x
    return x.redistribute(mesh, placements)


def local_of(x: DTensor, grad_placements: list[Placement]) -> Tensor:
    """x.to_local(grad_placements=..), the same tensor as long as x is what it was.

    It is kept by x, and is a view of what x holds.
    """
    inner = local_part(x)
    # NOTE: in-place operations change the version of a DTensor, not that of what it holds.
    if is_tracing() or x.is_inference() or inner.is_inference():
        return x.to_local(grad_placements=grad_placements)
    if x.requires_grad and x.is_leaf:  # whose gradient's place holds it: it would keep itself alive
        return x.to_local(grad_placements=grad_placements)
    versions = x._version, inner._version
    differentiable = x.requires_grad, torch.is_grad_enabled()
    key = tuple(grad_placements), versions, differentiable
    held = x.__dict__.get(_LOCAL)
    if held is not None and held[0] == key and held[1] is inner:
        return held[2]
    summed = sums_gradient(x, grad_placements)
    local = local_with_sum(x) if summed else to_local(x, grad_placements)
    if local.data_ptr() == inner.data_ptr():  # not what an asynchronous result becomes
        x.__dict__[_LOCAL] = key, inner, local
    return local
