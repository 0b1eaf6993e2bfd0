"""Random bits, stochastic rounding and Hadamard transforms in Triton, as te_mx.formats has them."""

import triton
import triton.language as tl

from te_mx.backends.triton.kernels.encode import INF, MAGNITUDE, MANTISSA, as_bits, as_float


@triton.jit
def random_bits(seed, row, first, R: tl.constexpr, C: tl.constexpr):
    """int32 [R, C]: 16 random bits for each element of rows `row` and columns from `first` on:
    Philox4x32-7 by its row and eight columns (formats.stochastic.random_bits)."""
    key = tl.load(seed)
    k0, k1 = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    eights = (first // 8 + tl.arange(0, C // 8)).to(tl.uint32)
    zero = tl.zeros((R, C // 8), tl.uint32)
    c0, c1, c2, c3 = zero + eights[None, :], zero + row.to(tl.uint32)[:, None], zero, zero
    m0 = tl.full((R, C // 8), 0xD2511F53, tl.uint32)
    m1 = tl.full((R, C // 8), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(7):
        h0, l0, h1, l1 = tl.umulhi(c0, m0), c0 * m0, tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    even = tl.join(tl.join(c0 & 0xFFFF, c2 & 0xFFFF), tl.join(c1 & 0xFFFF, c3 & 0xFFFF))
    odd = tl.join(tl.join(c0 >> 16, c2 >> 16), tl.join(c1 >> 16, c3 >> 16))
    return tl.reshape(tl.join(even, odd), (R, C)).to(tl.int32)


@triton.jit
def encode_random(
    bits, power, random, BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX_BITS: tl.constexpr,
    MIN_BITS: tl.constexpr,
):
    """formats.stochastic.encode, of elements with a negative zero."""
    DROP: tl.constexpr = 23 - MANTISSA_BITS
    magnitude = bits & MAGNITUDE
    subnormal = tl.maximum(as_bits(magnitude.to(tl.float32)) - (149 << 23), -(100 << 23))
    q = tl.where(magnitude < (1 << 23), subnormal, magnitude) + (power << 23)
    q = tl.minimum(q, MAX_BITS)
    mantissa = tl.where(magnitude == 0, 0, (q & MANTISSA) | (1 << 23))
    below = tl.maximum((MIN_BITS >> 23) - (q >> 23), 0)
    steps = ((mantissa >> tl.minimum(DROP - 16 + below, 31)) + random) >> 16
    code = steps + (((tl.maximum(q, MIN_BITS) & INF) - MIN_BITS) >> DROP)
    return code | ((bits >> (32 - BITS)) & (1 << (BITS - 1)))


@triton.jit
def _butterfly(x, STEP: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    pairs = tl.permute(tl.reshape(x, (R, K // (2 * STEP), 2, STEP)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, K))


@triton.jit
def hadamard(
    bits, first, k, SIZE: tl.constexpr, SIGNS: tl.constexpr, R: tl.constexpr, K: tl.constexpr
):
    """formats.hadamard.Hadamard.apply of a tile [R, K] (bits of fp32) at `first` along k."""
    FACTOR: tl.constexpr = 0.25 if SIZE == 16 else 0.1767766922712326
    at = first + tl.arange(0, K)
    negative = (SIGNS >> (at % 32).to(tl.int64)) & 1
    x = as_float(tl.where((negative == 1)[None, :], bits ^ -0x80000000, bits))
    x = _butterfly(_butterfly(_butterfly(_butterfly(x, 1, R, K), 2, R, K), 4, R, K), 8, R, K)
    if SIZE == 32:
        x = _butterfly(x, 16, R, K)
    return tl.where((at // SIZE < k // SIZE)[None, :], as_bits(x * FACTOR), bits)
