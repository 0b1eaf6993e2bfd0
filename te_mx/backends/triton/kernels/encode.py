"""Elements and scale bytes in Triton: the integer arithmetic of te_mx.formats, bit for bit, in the
interpreter too, whose own casts to FP8 are wrong."""

import triton
import triton.language as tl

from te_mx.backends.triton.kernels.e2m1 import VALUES

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
MANTISSA = tl.constexpr(0x7FFFFF)
NAN = tl.constexpr(0x7FC00000)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def bits_of(values):
    """The bits of values as fp32; of bf16 without a cast, which the interpreter gets wrong below
    2^-126."""
    if values.dtype == tl.bfloat16:
        return values.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return as_bits(values.to(tl.float32))


@triton.jit
def rounded(value, TO: tl.constexpr):
    """fp32 to nearest even in a dtype; bf16 by integers, as the interpreter cuts it off."""
    if tl.bfloat16 == TO:
        bits = as_bits(value)
        bits = tl.where((bits & MAGNITUDE) > INF, NAN, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(TO)


@triton.jit
def encode(
    bits, power, BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX_BITS: tl.constexpr,
    MIN_BITS: tl.constexpr, ZERO_SIGN: tl.constexpr,
):
    """Element.encode: codes (int32) of x * 2^power, x by its bits."""
    DROP: tl.constexpr = 23 - MANTISSA_BITS
    magnitude = bits & MAGNITUDE
    subnormal = tl.maximum(as_bits(magnitude.to(tl.float32)) - (149 << 23), -(100 << 23))
    q = tl.where(magnitude < (1 << 23), subnormal, magnitude) + (power << 23)
    q = tl.minimum(tl.maximum(q, 0), MAX_BITS)
    binade = tl.maximum(q & INF, MIN_BITS)
    one = binade + (DROP << 23)
    code = as_bits(as_float(q) + as_float(one)) - one + ((binade - MIN_BITS) >> DROP)
    sign = (bits >> (32 - BITS)) & (1 << (BITS - 1))
    if not ZERO_SIGN:
        sign = tl.where(code > 0, sign, 0)
    return code | sign


@triton.jit
def scale_byte(amax, EMAX: tl.constexpr, UP_FROM: tl.constexpr, LEAST: tl.constexpr):
    """formats.scaling.scale_bytes: of the bits of the largest magnitude. LEAST: up to which q is
    2^-127 under rceil; -1 for other rules."""
    byte = tl.maximum(((amax + (0x800000 - UP_FROM)) >> 23) - EMAX, 0)
    byte = tl.where(amax <= LEAST, 0, byte)
    return tl.where(amax >= INF, 255, byte)


@triton.jit
def power_of_two(exponent):
    """fp32 2^exponent, for -127 to 127."""
    bits = tl.where(exponent < -126, 1 << 22, (exponent + 127) << 23)
    return as_float(bits)


@triton.jit
def _e2m1(magnitude):
    """Codes of magnitudes up to 6, to nearest even, plus 0x4A800000; of NaN any: the least of what
    rounding to steps of 1/2 (up to 2), 1 (up to 4) and 2 gives."""
    code = as_bits(magnitude + 4194304.0)  # a step is the last bit of 2^22
    code = tl.minimum(code, as_bits(magnitude + 8388608.0) - ((1 << 23) - 2))
    return tl.minimum(code, as_bits(magnitude + 16777216.0) - ((2 << 23) - 4))


@triton.jit
def encode_e2m1(value):
    """Codes (int32) of fp32 numbers in E2M1, at most +-6; of NaN any."""
    return (_e2m1(tl.minimum(tl.abs(value), 6.0)) & 7) | ((as_bits(value) >> 28) & 8)


@triton.jit
def words_e2m1(value, A: tl.constexpr, B: tl.constexpr, CLAMPED: tl.constexpr):
    """int32 [A, B] of the codes of [A, 8, B], the first one in the low bits. CLAMPED: numbers may
    be larger than 6."""
    value = tl.reshape(value, (A, 8, B))
    at = (4 * tl.arange(0, 8))[None, :, None]
    magnitude = tl.minimum(tl.abs(value), 6.0) if CLAMPED else tl.abs(value)
    signs = (as_bits(value) >> (28 - at)) & (8 << at)
    # Signs have bits of their own, so their sum is what XOR gives; the interpreter is slow at that.
    return (tl.sum(_e2m1(magnitude) * (1 << at), 1) - 0x72800000) ^ tl.sum(signs, 1)


@triton.jit
def word_e2m1(values, factor, ASM: tl.constexpr):
    """int32 of the codes of eight tensors times positive factors, the first in the low bits; ASM:
    by NVIDIA's instructions."""
    if ASM:
        v = values
        given = (v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], factor)
        return tl.inline_asm_elementwise(
            VALUES, "=r,r,r,r,r,r,r,r,r,r", given, tl.int32, True, 1
        )
    else:
        word = encode_e2m1(values[0] * factor)
        for i in tl.static_range(1, 8):
            word |= encode_e2m1(values[i] * factor) << (4 * i)
        return word


@triton.jit
def cast(value, MANTISSA_BITS: tl.constexpr):
    """Codes of fp32 numbers as the GPU rounds them to FP8, saturating."""
    kind: tl.constexpr = tl.float8e4nv if MANTISSA_BITS == 3 else tl.float8e5
    return value.to(kind).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_value(code):
    """fp32 of E4M3, exact."""
    magnitude = code & 127
    bits = as_bits(magnitude.to(tl.float32) * 0.001953125)
    bits = tl.where(magnitude < 8, bits, (magnitude << 20) + (120 << 23))
    bits = tl.where(magnitude == 127, NAN, bits)
    return as_float(bits | ((code & 128) << 24))
