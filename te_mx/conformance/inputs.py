"""The inputs of the conformance set, by rule: integers on bits of fp32, the same everywhere."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_BLOCK = 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ONE, _INF = 127 << 23, 0x7F800000


def words(seed: int, rows: int, cols: int) -> Tensor:
    """int64 [rows, cols] of 32 random bits: MurmurHash3's finalizer of seed * 0x9E3779B9 + the
    number of the element, modulo 2^32."""
    h = (torch.arange(rows * cols) + seed * 0x9E3779B9) & _WORD
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = ((h ^ (h >> shift)) * multiplier) & _WORD
    return (h ^ (h >> 16)).view(rows, cols)


def _exponents(step: int) -> Tensor:
    """Every exponent: in row r the first of every 32 has the biased exponent r, the others one that
    is up to 15 lower."""
    w = words(1, 255, 160)
    first = torch.arange(160) % _BLOCK == 0
    exponent = torch.arange(255)[:, None] - torch.where(first, 0, w >> 24 & 15)
    return exponent.clamp(min=0) << 23 | w & 0x7FFFFF | (w & 1 << 23) << 8


def _ties(step: int) -> Tensor:
    """Every tie, and both neighbours: in row r blocks of 32 start with a number of five bits of
    mantissa or a neighbour of one, and go on through all such numbers of 21 binades."""
    row, col = torch.arange(96)[:, None], torch.arange(2112)
    top = _ONE + (row // 3 << 18) + (row % 3 - 1) * step
    j = col // _BLOCK * 31 + col % _BLOCK - 1
    number = _ONE - (j // 96 << 23) + (j % 32 << 18) + (j // 32 % 3 - 1) * step
    number = torch.where(number > top, number - (1 << 23), number)
    number = torch.where(j < 2016, number, 0).where(col % _BLOCK > 0, top)
    return number | (words(2, 96, 2112) & 1 << 23) << 8


def _spread(step: int) -> Tensor:
    """Sums of four bytes, so nearly normal, rows of every size, and outliers."""
    w, of_row = words(3, 97, 300), words(4, 97, 1)
    sums = sum((w >> 8 * i & 255 for i in range(4)), torch.zeros_like(w)) - 510
    outlier = torch.where(words(5, 97, 300) % 61 == 0, 10, 0)
    values = torch.ldexp(sums.float(), (of_row % 33 - 24 + outlier).int())
    return values.view(torch.int32).long() & _WORD


def _special(step: int) -> Tensor:
    """Blocks of zeros of both signs, of subnormal numbers, of the smallest; NaN, Inf and the
    largest number among others."""
    w, row, col = words(6, 64, 160), torch.arange(64)[:, None], torch.arange(160)
    kind, at = (row * 5 + col // _BLOCK) % 8, (col % _BLOCK).expand(64, -1)
    sign = (w & 1 << 23) << 8
    made = (120 + (w >> 28 & 7)) << 23 | w & 0x7FFFFF | sign
    for which, value in ((0, 0), (1, 1 << 31), (2, w & 0x7FFFFF | sign), (3, step | sign)):
        made = torch.where(kind == which, value, made)
    odd = ((4, 0x7FC00000), (5, _INF), (6, _INF | 1 << 31), (7, _INF - step))
    for which, value in odd:
        made = torch.where((kind == which) & (at == 7), value, made)
    return made


_MAKERS: dict[str, Callable[[int], Tensor]] = {
    "exponents": _exponents, "ties": _ties, "spread": _spread, "special": _special,
}  # fmt: skip
INPUTS = tuple(_MAKERS)


@functools.cache
def make(name: str, dtype: str) -> Tensor:
    """The input of a name, in "fp32" or "bf16": the upper halves of fp32, neighbours stay such."""
    narrow = dtype == "bf16"
    bits = _MAKERS[name](1 << 16 if narrow else 1)
    if narrow:
        bits = bits >> 16
        return torch.where(bits < 1 << 15, bits, bits - (1 << 16)).short().view(torch.bfloat16)
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).int().view(torch.float32)
