"""Stochastic rounding: random bits by element, and codes rounded up or down with them.

Random bits depend on a seed and on an element's place alone, so that every backend draws the same.
"""

import torch
from torch import Tensor

from te_mx.formats.element import (
    BIAS,
    IMPLICIT_BIT,
    INF,
    MAGNITUDE,
    MANTISSA,
    MANTISSA_BITS,
    Element,
    normalized,
)

RANDOM_BITS = 16
_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7  # the fewest that pass BigCrush (the paper's table 2)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-7: four random words of a counter of four words and a key of two.

    All are 32-bit words in int64 tensors, which broadcast. Salmon, Moraes, Dror and Shaw, "Parallel
    random numbers: as easy as 1, 2, 3" (SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32-bit product, without leaving int64."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def random_bits(seed: Tensor, rows: int, cols: int, first: int = 0) -> Tensor:
    """int32 [rows, cols]: 16 random bits for every element of a matrix.

    Element (r, c) draws by its row and eight columns: from Philox4x32-7 with the counter
    (c // 8, (first + r) mod 2^32, 0, 0) and the key (low and high word of the seed), of word
    c % 8 // 2 the lower half where c is even, else the upper one.

    Args:
        seed: int64 [1], any value, on the device where the bits are wanted; it is not read back.
        rows, cols: of the matrix.
        first: number of its first row, where the matrix is part of a larger one.
    """
    device = seed.device
    if rows * cols == 0:
        return torch.empty(rows, cols, dtype=torch.int32, device=device)
    row = torch.arange(first, first + rows, device=device)[:, None] & _MASK
    eights = torch.arange((cols + 7) // 8, device=device)[None] & _MASK
    zero = torch.zeros_like(row[:1])
    words = philox((eights, row, zero, zero), (seed & _MASK, seed >> 32 & _MASK))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).flatten(1)[:, :cols].to(torch.int32)


def encode(element: Element, bits: Tensor, power: Tensor, random: Tensor) -> Tensor:
    """Codes (uint8) of x * 2^power, rounded stochastically, at most +-max; x: bits of fp32 (int32).

    With q = |x| * 2^power, at most max, and `gap` the distance of the codes around q (that of the
    subnormal ones below the normal ones):

        t    = floor(q / gap * 2^16), an integer
        code = that of (t + random) >> 16 steps of `gap`

    So a q that is a code stays, and others go to one of their neighbours with a mean of q, but for
    what lies below 2^-16 of a gap. Arguments are as of `Element.encode`; random: 16 bits for every
    element (int32)."""
    drop = MANTISSA_BITS - element.mantissa_bits
    lowest = element.min_bits
    q = normalized(bits & MAGNITUDE) + (power << MANTISSA_BITS)
    q = q.clamp_(max=element.max_bits)
    # q = mantissa * 2^-drop gaps, and 2^-1 more for every binade below the normal numbers.
    mantissa = torch.where((bits & MAGNITUDE) == 0, 0, (q & MANTISSA) | IMPLICIT_BIT)
    below = (element.emin + BIAS - (q >> MANTISSA_BITS)).clamp_(min=0)
    shift = RANDOM_BITS - drop - below
    t = torch.where(shift >= 0, mantissa << shift.clamp(min=0), mantissa >> (-shift).clamp(0, 31))
    steps = (t + random) >> RANDOM_BITS
    binade = q.clamp_(min=lowest) & INF
    code = steps + ((binade - lowest) >> drop)
    sign = (bits >> (32 - element.bits)) & element.sign
    if not element.has_negative_zero:
        sign = torch.where(code > 0, sign, 0)
    return (code | sign).to(torch.uint8)
