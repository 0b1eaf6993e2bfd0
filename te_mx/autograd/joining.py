"""torch.cat and torch.stack of parameters, whatever torch.autocast thinks of their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat, differentiable."""
    return _joined(torch.cat if dim == 0 else partial(torch.cat, dim=dim), tensors)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """torch.stack, differentiable."""
    return _joined(torch.stack, tensors)


def _joined(join: Callable[[list[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    tensors = list(tensors)
    device = getattr(tensors[0], "device", None)
    for tensor in tensors:
        if tensor is None or tensor.device != device:
            places = ["None" if t is None else str(t.device) for t in tensors]
            raise ValueError(
                f"te_mx: parameters that make one must be on one device, got {', '.join(places)}"
            )
    dtypes = {tensor.dtype for tensor in tensors}
    if not all(dtype.is_floating_point for dtype in dtypes):  # torch would promote integers
        raise TypeError(f"te_mx: parameters that make one must be floats, got {dtypes}")
    assert device is not None
    kind = device.type
    if (
        kind != "meta"
        and torch.is_autocast_enabled(kind)
        # torch.autocast promotes what these two are given, and refuses fp16 where it makes bf16.
        and not dtypes <= {torch.float32, torch.get_autocast_dtype(kind)}
    ):
        with torch.autocast(kind, enabled=False):
            return join(tensors)
    return join(tensors)
