"""Weights that stand still in the stand-in for te_mx._sm90 (fake_sm90.py)."""

from __future__ import annotations

import ctypes

import torch

from te_mx.backends.sm90.layouts import frozen, tiles

OK = 0


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    count = torch.Size(shape).numel()
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def _parts(places: list[int], rows: int, k: int):
    shapes = tiles.packed_shapes(rows, k)
    plain = _at(places[0], (rows, k)), _at(places[1], (rows, -(-k // 32)))
    return *plain, _at(places[2], shapes[0]), _at(places[3], shapes[1], torch.int32)


def pack_frozen(places, rows, k, aside, room, counts, device, stream) -> int:
    """Entries that fit in the room, in any order; the padding of rows is left as it is."""
    codes, scales, to, words = _parts(places, rows, k)
    made, made_words, found = frozen.packed_and_listed(codes, scales)
    to[:, :k] = made[:, :k]
    words.copy_(made_words)
    if not counts:
        return OK
    listed, number = _at(aside, (2, room), torch.int64), _at(counts, (2,), torch.int64)
    for i, one in enumerate(found):
        assert number[i] == 0
        number[i] = len(one)
        listed[i, : min(room, len(one))] = one.flip(0)[:room]
    return OK


def unpack_frozen(places, rows, k, aside, room, counts, device, stream) -> int:
    codes, scales, held, words = _parts(places, rows, k)
    made = frozen.unpack(tiles.PackedOperand(held, words), None, k)
    codes.copy_(made[0])
    scales.copy_(made[1])
    return OK
