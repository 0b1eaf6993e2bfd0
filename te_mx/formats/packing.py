"""Codes of fewer than 8 bits in bytes: element 0 in the low bits of byte 0, and on without gaps."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


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
