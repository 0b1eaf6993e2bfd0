"""Checks of the parts of quantized tensors as files of others have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.runtime.arguments import check_dense, shown


def dense(name: str, tensor: Any, *dtypes: torch.dtype) -> Tensor:
    """The tensor, detached. Raises TypeError where it is no dense tensor of these dtypes."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be a tensor of {known}, got {shown(tensor)}")
    check_dense(name, tensor)
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have one dimension or more, got a scalar")
    return tensor.detach()


def as_bytes(name: str, tensor: Any, *dtypes: torch.dtype) -> Tensor:
    """Its bytes, contiguous. Raises as `dense`."""
    return dense(name, tensor, *dtypes).view(torch.uint8).contiguous()


def whole_blocks(name: str, held: Tensor, size: int) -> int:
    """Blocks of so many bytes in a row."""
    if held.shape[-1] % size:
        raise ValueError(
            f"rows of {name} must be whole blocks of {size} bytes, got {tuple(held.shape)}"
        )
    return held.shape[-1] // size


def expect(name: str, part: Tensor, shape: tuple[int, ...], beside: str, other: Tensor) -> None:
    """Raise ValueError for a part without this shape, or on another device than that beside it."""
    if tuple(part.shape) != shape:
        raise ValueError(
            f"{name} must have shape {shape} for {beside} {tuple(other.shape)}, got "
            f"{tuple(part.shape)}"
        )
    if part.device != other.device:
        raise ValueError(f"{name} is on {part.device} and {beside} on {other.device}; move one")
