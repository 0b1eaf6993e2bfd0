"""torch.cat and torch.stack of parameters, whatever torch.autocast thinks of their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """torch.cat, differentiable."""
    return _joined(torch.cat, tensors)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """torch.stack, differentiable."""
    return _joined(torch.stack, tensors)


def _joined(join: Callable[[list[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    tensors = list(tensors)
    device = tensors[0].device
    kind = device.type
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(
                f"te_mx: parameters of one layer are on {device} and {tensor.device}; move them to "
                "one device"
            )
    if kind != "meta" and torch.is_autocast_enabled(kind):
        # torch.autocast promotes what these two are given, and refuses fp16 where it makes bf16.
        known = torch.float32, torch.get_autocast_dtype(kind)
        if any(tensor.dtype not in known for tensor in tensors):
            with torch.autocast(kind, enabled=False):
                return join(tensors)
    return join(tensors)
