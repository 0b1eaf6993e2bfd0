"""Codes of fewer than 8 bits in bytes: element 0 in the low bits of byte 0, and on without gaps."""

import functools
from typing import Any

import torch
from torch import Tensor

from te_mx.runtime.arguments import check_dense, shown


def packed_size(k: int, bits: int) -> int:
    """Bytes of k codes."""
    return (k * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [.., k] below 2^bits -> bytes [.., packed_size(k)]; bits left over are zero."""
    if bits == 8:
        return codes
    return _regroup(codes, bits, 8, packed_size(codes.shape[-1], bits))


def unpack(packed: Tensor, k: int, bits: int) -> Tensor:
    """The inverse of pack: bytes [.., packed_size(k)] -> codes [.., k]."""
    if bits == 8:
        return packed
    return _regroup(packed, 8, bits, k)


def _regroup(fields: Tensor, have: int, want: int, count: int) -> Tensor:
    """The stream of bits in fields [.., n] of `have` bits, as [.., count] fields of `want` bits."""
    period = have  # bits after which both kinds of field begin together
    while period % want:
        period += have
    every = period // have
    fields = torch.nn.functional.pad(fields, (0, -fields.shape[-1] % every))
    made = []
    for begin in range(0, period, want):
        parts = []
        for i in range(every):
            shift = i * have - begin
            if -have < shift < want:
                part = fields[..., i::every]
                parts.append(part << shift if shift >= 0 else part >> -shift)
        made.append(functools.reduce(torch.bitwise_or, parts) & ((1 << want) - 1))
    return torch.stack(made, -1).flatten(-2)[..., :count].contiguous()


# ------------------------------------------------------------------------------------------- parts
# Checks of the parts of quantized tensors as files of others have them.
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
