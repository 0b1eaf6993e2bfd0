"""Weights of MXFP8 that stand still on Hopper, in plain torch: the tiles that the GEMM reads
(tiles.py, spread 8), from which the codes and scale bytes that they were made of come back. So one
copy is enough, of 1.032 bytes a number.

- codes, scales: those of layout "sm90:8", but for what follows. Whoever multiplies with words of
  classes 0 and 1 leaves out their lowest 16 bits.
- Words of classes 0 and 1 hold four numbers of 4 bits there, the first block lowest: how far the
  scale byte e of a block lies below the exponent E that it shares, E - e, so that a code is what
  lies here times 2^(E - e). Of blocks of zeros as far as that is 0 .. 11; else 14 for e = 0, 13
  for e = 127 and 12 for others, which lie aside. 15 is e = 255 (NaN).
- Words of classes 2 and 3 hold the scale bytes, those of blocks of zeros too; in class 2 they are 0
  above 190, and lie aside.
- aside: int64 [2, L], bytes that the tiles do not tell, place << 8 | byte, in order. The first row
  has codes, place row * k + column: those that aligning rounded, about one in 10,000, and those of
  blocks of NaN that are not 0x7F. The second has scale bytes, place row * ceil(k/32) + block. The
  shorter one is filled up with its last entry, or with what place 0 holds.
- A tile of which MOST_ASIDE codes and more would be rounded is of the next class: row-shared, then
  spread, where nothing is."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends.sm90.layouts import tiles
from te_mx.backends.sm90.layouts.tiles import BLOCK, EMPTY_EXPONENT, FAR_EXPONENT, MAX_SPREAD, TILE
from te_mx.formats import Format
from te_mx.layouts.base import HasParts, Layout, Parts, Shape

FORMAT = "mxfp8_e4m3"
ROUNDED = f"sm90:{MAX_SPREAD}"  # the layout whose products these tiles give
MOST_ASIDE = 16
ZEROS_UP_TO, ASIDE, AT_127, AT_0, NAN = 11, 12, 13, 14, 15


class FrozenParts(NamedTuple):
    """codes uint8 [R, ld], scales int32 [S, T', 132], aside int64 [2, L]."""

    codes: Tensor
    scales: Tensor
    aside: Tensor


@cache
def _back() -> Tensor:
    """uint8 [9, 256]: entry [d, c] is code c times 2^d."""
    made = torch.arange(256, dtype=torch.uint8, device="cpu").repeat(MAX_SPREAD + 1, 1)
    shifted, values = tiles.shift_table(FORMAT).long(), tiles.code_values(FORMAT)
    for d in range(1, MAX_SPREAD + 1):
        exact = values[shifted[d]] * 2.0**d == values
        made[d, shifted[d][exact]] = torch.arange(256, dtype=torch.uint8, device="cpu")[exact]
    return made


def pack(codes: Tensor, scales: Tensor) -> FrozenParts:
    """Codes uint8 [R, K] and scale bytes uint8 [R, ceil(K/32)] of MXFP8 (E4M3), whatever they are.
    Waits for a device."""
    made, words, listed = packed_and_listed(codes, scales)
    return FrozenParts(made, words, filled(listed, codes, scales))


def packed_and_listed(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Codes, words, and what lies aside of codes and of scales."""
    rows, k = codes.shape
    c, e, counts = tiles._blocks(codes, scales, FORMAT)
    how = tiles.alignment(FORMAT, MAX_SPREAD)
    cls, tile_e, row_e = tiles._align(e, counts, how)
    table, back = (one.to(codes.device) for one in (tiles.shift_table(FORMAT), _back()))

    def shifted(target: Tensor) -> "tuple[Tensor, Tensor]":
        """Codes times 2^(e - target), and which of them do not come back."""
        d = torch.where(counts, (target[..., None] - e).clamp(0, MAX_SPREAD), 0)[..., None]
        made = table.view(-1)[d * 256 + c.long()]
        return made, back.view(-1)[d * 256 + made.long()] != c

    of_tile, of_row = shifted(tile_e[:, None].expand_as(row_e)), shifted(row_e)
    lost = [one[1].sum((1, 3, 4)) >= MOST_ASIDE for one in (of_tile, of_row)]
    least = torch.where(counts, e, 256).amin((1, 3))
    cls = torch.where((cls == 0) & lost[0], 1, cls)
    cls = torch.where((cls == 1) & lost[1], torch.where(least == 0, 3, 2), cls)

    first, aligned = (cls == 0)[:, None, :, None, None], (cls < 2)[:, None, :, None]
    made = torch.where(first, of_tile[0], of_row[0])
    rounded = torch.where(first, of_tile[1], of_row[1])
    made, rounded = (torch.where(aligned[..., None], one, other) for one, other in (
        (made, c), (rounded, torch.zeros_like(rounded))
    ))  # fmt: skip
    nan = (e == 255)[..., None].expand_as(c)
    made, rounded = torch.where(nan, 0x7F, made), torch.where(nan, c != 0x7F, rounded)

    target = torch.where((cls == 0)[:, None], tile_e[:, None], row_e)  # [T, 128, S]
    d = target[..., None] - e
    near = counts | ((d >= 0) & (d <= ZEROS_UP_TO))
    far = torch.where(e == 0, AT_0, torch.where(e == EMPTY_EXPONENT, AT_127, ASIDE))
    nibbles = torch.where(e == 255, NAN, torch.where(near, d, far))
    beyond = (cls == 2)[:, None, :, None] & ~counts & (e != 255) & (e > FAR_EXPONENT)
    own = torch.where(beyond, 0, e)
    apart = torch.where(aligned, nibbles == ASIDE, beyond)
    shared = torch.where(target == 0, 0x00400000, target << 23) | _four(nibbles, 4)
    of_rows = torch.where((cls < 2)[:, None], shared, _four(own, 8))
    (_, ld), shape = tiles.packed_shapes(rows, k)
    words = tiles.words_of(of_rows, cls, tile_e, shape)

    out = codes.new_zeros(rows, ld)
    out[:, :k] = _matrix(made)[:rows, :k]
    listed = [_listed(_matrix(rounded)[:rows, :k], codes)]
    listed.append(_listed(_matrix(apart[..., None])[:rows, : scales.shape[1]], scales))
    return out, words, listed


def unpack(packed: HasParts, aside: Tensor | None, k: int) -> Parts:
    """The other way: codes [R, K] and scale bytes [R, ceil(K/32)]. Waits for no device."""
    rows, steps = packed.codes.shape[0], packed.scales.shape[0]
    count = -(-rows // TILE)
    words = packed.scales[:, :count].permute(1, 2, 0).long() & 0xFFFFFFFF  # [T, 132, S]
    cls, word = words[:, TILE, None, :, None], words[:, :TILE, :, None]
    at = torch.arange(4, device=words.device)
    nibble, byte = word >> (4 * at) & 0xF, word >> (8 * at) & 0xFF  # [T, 128, S, 4]
    far = torch.tensor([0] * 13 + [EMPTY_EXPONENT, 0, 255], device=words.device)[nibble]
    e = torch.where(nibble <= ZEROS_UP_TO, (word >> 23) - nibble, far)
    e = torch.where(cls < 2, e, byte)
    d = torch.where((cls < 2) & (nibble <= MAX_SPREAD), nibble, 0)
    full = packed.codes.new_zeros(count * TILE, steps * TILE)
    full[:rows, :k] = packed.codes[:, :k]
    c = full.view(count, TILE, steps, 4, BLOCK)
    back = _back().to(c.device).view(-1)[d[..., None] * 256 + c.long()]
    codes = _matrix(back)[:rows, :k].contiguous()
    scales = _matrix(e[..., None])[:rows, : -(-k // BLOCK)].to(torch.uint8).contiguous()
    if aside is not None:
        put_back(aside, codes, scales)
    return codes, scales


def put_back(aside: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write the bytes that lie aside where they belong: contiguous codes and scales, of one weight
    or of those of groups behind each other."""
    if aside.shape[1]:
        for entries, into in zip(aside, (codes, scales), strict=True):
            # NOTE: within bounds also where to_empty() left anything.
            places = (entries >> 8).clamp(0, into.numel() - 1)
            into.view(-1)[places] = (entries & 0xFF).to(torch.uint8)


def filled(listed: list[Tensor], codes: Tensor, scales: Tensor) -> Tensor:
    """Entries of codes and of scales, each in order, as `aside`."""
    longest = max(len(one) for one in listed)
    made = codes.new_empty((2, longest), dtype=torch.int64)
    for to, one, held in zip(made, listed, (codes, scales), strict=True):
        to[: len(one)] = one
        if len(one) < longest:
            to[len(one) :] = one[-1] if len(one) else held.view(-1)[0]
    return made


def _listed(there: Tensor, held: Tensor) -> Tensor:
    places = there.reshape(-1).nonzero()[:, 0]
    return places << 8 | held.reshape(-1)[places]


def _four(numbers: Tensor, bits: int) -> Tensor:
    """Four numbers [.., 4] in one, the first lowest."""
    return (numbers << torch.arange(0, 4 * bits, bits, device=numbers.device)).sum(-1)


def _matrix(parts: Tensor) -> Tensor:
    """Tiles [T, 128, S, 4, n] as one matrix."""
    return parts.reshape(parts.shape[0] * TILE, -1)


class SM90Frozen(Layout):
    """What the tiles tell without the bytes that lie aside."""

    name = "sm90_frozen"
    scale_dtype, pitch = torch.int32, 16
    exact = False
    reads_as = ROUNDED

    def takes(self, fmt: Format) -> bool:
        return fmt.name == FORMAT

    def shapes(self, fmt: Format, rows: int, k: int) -> tuple[Shape, Shape]:
        return (rows, k), tiles.packed_shapes(rows, k)[1]

    def pack(self, fmt: Format, codes: Tensor, scales: Tensor, k: int) -> Parts:
        made = pack(codes, scales)
        return made.codes[:, :k], made.scales

    def plain(self, fmt: Format, held: Any, k: int) -> Parts:
        if held.codes.dim() == 2:
            return unpack(held, held.packed, k)
        pairs = zip(held.codes, held.scales, strict=True)
        each = [unpack(tiles.PackedOperand(*one), None, k) for one in pairs]
        codes, scales = (torch.stack(parts) for parts in zip(*each, strict=True))
        if held.packed is not None:
            put_back(held.packed, codes, scales)
        return codes, scales

    def values(
        self, fmt: Format, codes: Tensor, scales: Tensor, k: int, dtype: torch.dtype
    ) -> Tensor:
        return tiles.packed_values(tiles.PackedOperand(codes, scales), k, fmt.name).to(dtype)

    def joined(self, parts: Sequence[Any]) -> Any:
        """Of parts with an even number of whole tiles."""
        first, before, asides = parts[0], 0, []
        for one in parts:
            if one.layout is not self or one.rows % (2 * TILE) or one.packed is None:
                return None
            # NOTE: numbers, not a tensor of them, which a capture could not bring to the device.
            places = before * one.k, before * -(-one.k // BLOCK)
            pairs = zip(one.packed, places, strict=True)
            asides.append(torch.stack([entries + (place << 8) for entries, place in pairs]))
            before += one.rows
        codes, scales = torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts], 1)
        return first._replace(codes=codes, scales=scales, rows=before, packed=torch.cat(asides, 1))


SM90_FROZEN = SM90Frozen()
