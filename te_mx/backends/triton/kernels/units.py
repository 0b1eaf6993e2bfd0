"""Quantizers of both directions from one read, a unit of 8 x 8 numbers a thread: codes along either
direction that share a word are there already, and columns that lie turned pass shared memory once,
as words. What is random, transformed, made by a step or in blocks of two directions goes by tiles
(quantize.py, nvfp4.py)."""

import triton
import triton.language as tl

from te_mx.backends.triton.kernels.encode import (
    INF,
    MAGNITUDE,
    NAN,
    as_bits,
    as_float,
    bits_of,
    cast,
    e4m3_value,
    encode,
    scale_byte,
    word_e2m1,
)

LARGEST = tl.constexpr(3.4028234663852886e38)
_INVERSE = tl.constexpr(
    "{ .reg .f32 y, e; rcp.approx.ftz.f32 y, $1; fma.rn.f32 e, $1, y, -1.0; neg.f32 e, e;"
    " fma.rn.f32 $0, y, e, y; }"
)


@triton.jit
def _mx(amax, EMAX: tl.constexpr, UP_FROM: tl.constexpr, LEAST: tl.constexpr):
    """(scales to store, factors) of blocks by the bits of their largest magnitudes."""
    byte = scale_byte(amax, EMAX, UP_FROM, LEAST)
    factor = tl.maximum((254 - byte) << 23, 1 << 22)
    return byte.to(tl.uint8), as_float(tl.where(byte == 255, NAN, factor))


@triton.jit
def _blockwise(
    amax, MAX_BITS: tl.constexpr, EPSILON: tl.constexpr, TINY: tl.constexpr, POW2: tl.constexpr
):
    """The same of blockwise FP8."""
    finite = amax < INF
    amax = tl.maximum(tl.where(finite, amax, 0), EPSILON)
    if POW2:  # by exponents: no quotient is rounded up to a power of two
        least: tl.constexpr = 0x7FFFFF - (MAX_BITS & 0x7FFFFF)
        factor = ((MAX_BITS >> 23) + 127 - ((amax + least) >> 23)) << 23
    else:
        usable = as_float(tl.where(amax < TINY, 127 << 23, amax))
        factor = as_bits(tl.div_rn(as_float(amax * 0 + MAX_BITS), usable))
    factor = tl.where(amax < TINY, 253 << 23, factor)
    factor = tl.where(amax == 0, 127 << 23, factor)
    if POW2:
        scale = (254 << 23) - factor
    else:
        scale = as_bits(tl.div_rn(as_float(factor * 0 + (127 << 23)), as_float(factor)))
    return as_float(tl.where(finite, scale, NAN)), as_float(tl.where(finite, factor, NAN))


@triton.jit
def inverse(value):
    """1 / value, rounded, within 2^-120 and 2^120; of 0 NaN."""
    return tl.inline_asm_elementwise(_INVERSE, "=r,r", [value], tl.float32, True, 1)


@triton.jit
def _inverse(value, usual, ASM: tl.constexpr):
    """1 / value, rounded; usual: whether magnitudes lie within 2^-120 and 2^120 or are 0, of which
    NVIDIA's GPUs make NaN: without branches a block."""
    one = tl.zeros_like(value) + 1.0
    if ASM:
        return inverse(value) if usual else tl.div_rn(one, value)
    return tl.div_rn(one, value)


@triton.jit
def of_tensor(most):
    """(e, t) of NVFP4, by a tensor's largest magnitude, and whether t is far from the ends of
    fp32."""
    e = tl.where(most == 0, 1.0, tl.minimum(tl.div_rn(2688.0, most), LARGEST))
    t = tl.div_rn(1.0, e)
    return e, t, (t > 1e-30) & (t < 1e30)


@triton.jit
def _nvfp4(amax, e, t, usual, CASTS: tl.constexpr, ASM: tl.constexpr):
    """The same of NVFP4 by Transformer Engine's rule. usual: t is far from the ends of fp32."""
    finite = amax < INF
    scaled = as_float(tl.where(finite, amax, 0)) * (e * 0.16666667163372040)
    if CASTS:
        code = scaled.to(tl.float8e4nv)
        value, code = code.to(tl.float32), code.to(tl.uint8, bitcast=True)
    else:
        code = encode(as_bits(scaled), 0, 8, 3, 0x43E00000, 0x3C800000, True).to(tl.uint8)
        value = e4m3_value(code.to(tl.int32))
    value *= t
    factor = tl.minimum(_inverse(value, usual, ASM), LARGEST)
    return tl.where(finite, code, 0x7F).to(tl.uint8), factor


@triton.jit
def with_one(several, one):
    several += (one,)
    return several


@triton.jit
def joined(a):
    """The tensors [A, B] of eight as [A, B, 8]."""
    even = tl.join(tl.join(a[0], a[4]), tl.join(a[2], a[6]))
    odd = tl.join(tl.join(a[1], a[5]), tl.join(a[3], a[7]))
    return tl.reshape(tl.join(even, odd), (a[0].shape[0], a[0].shape[1], 8))


@triton.jit
def parted(x):
    """The eight of the last dimension."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2, 2)))
    a, b = tl.split(even)
    c, d = tl.split(odd)
    v0, v4 = tl.split(a)
    v2, v6 = tl.split(b)
    v1, v5 = tl.split(c)
    v3, v7 = tl.split(d)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _put(to, values, r, c, rows, width, EVEN: tl.constexpr):
    at = to + r.to(tl.int64)[:, None] * width + c[None, :]
    if EVEN:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=(r < rows)[:, None] & (c < width)[None, :])


@triton.jit
def larger(a, b):
    """Both halves of each word."""
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1
    )


@triton.jit
def halves(words):
    """bf16 in words [A, B] as the bits of fp32 [A, 2 B]."""
    both = tl.join(words << 16, words & -65536)
    return tl.reshape(both, (words.shape[0], 2 * words.shape[1]))


@triton.jit
def spread(v, H: tl.constexpr):
    """[A, C] to [A * H, C], each row H times."""
    spread = tl.broadcast_to(v[:, None, :], (v.shape[0], H, v.shape[1]))
    return tl.reshape(spread, (v.shape[0] * H, v.shape[1]))


@triton.jit
def _code(
    value, MANTISSA_BITS: tl.constexpr, MAX_BITS: tl.constexpr, MIN_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_SIGN: tl.constexpr, CASTS: tl.constexpr,
):
    """Codes of FP8; NaN of NaN."""
    if CASTS:
        return cast(value, MANTISSA_BITS)
    bits = as_bits(value)
    code = encode(bits, 0, 8, MANTISSA_BITS, MAX_BITS, MIN_BITS, ZERO_SIGN)
    return tl.where((bits & MAGNITUDE) > INF, NAN_CODE, code).to(tl.uint8)


@triton.jit
def unit_tile(
    across, down, x, row_codes, row_scales, col_codes, col_scales, rows, cols, stride,
    FAMILY: tl.constexpr, BITS: tl.constexpr, CASTS: tl.constexpr, ASM: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX_BITS: tl.constexpr, MIN_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_SIGN: tl.constexpr, EMAX: tl.constexpr, UP_FROM: tl.constexpr,
    LEAST: tl.constexpr, EPSILON: tl.constexpr, TINY: tl.constexpr, POW2: tl.constexpr, row_amax,
    row_whole, col_whole,
):
    """One tile of `quantize_units`."""
    BLOCK: tl.constexpr = 32 if FAMILY == "mx" else 128 if FAMILY == "blockwise" else 16
    R8: tl.constexpr = R // 8
    DOWN: tl.constexpr = R // BLOCK
    ACROSS: tl.constexpr = C // BLOCK
    first_row, first_col = down * R, across * C
    r, c = first_row + 8 * tl.arange(0, R8), first_col + tl.arange(0, C)
    e, t, usual = 1.0, 1.0, True
    if FAMILY == "nvfp4":
        e, t, usual = of_tensor(tl.load(row_amax).to(tl.float32, bitcast=True))
        if first_row + first_col == 0:
            tl.store(row_whole, t)
            tl.store(col_whole, t)
    bits, found = (), ()
    if PACKED:
        at = x.to(tl.pointer_type(tl.int32), bitcast=True) + r.to(tl.int64)[:, None] * (stride // 2)
        at += (first_col // 2 + tl.arange(0, C // 2))[None, :]
        words = ()
        for j in tl.static_range(8):
            words = with_one(words, tl.load(at + j * (stride // 2)))
        both = tl.zeros((R8, C // 2), tl.int32)
        for j in tl.static_range(8):
            two = words[j] & 0x7FFF7FFF
            both = larger(both, two)
            most = tl.reduce(tl.reshape(two, (R8, ACROSS, BLOCK // 2)), 2, larger)
            found = with_one(found, tl.maximum(most << 16, most & -65536))
            bits = with_one(bits, halves(words[j]))
        both = tl.reduce(tl.reshape(both, (DOWN, BLOCK // 8, C // 2)), 1, larger)
        down = halves(both)
    else:
        for j in tl.static_range(8):
            at = x + (r + j).to(tl.int64)[:, None] * stride + c[None, :]
            there = ((r + j) < rows)[:, None] & (c < cols)[None, :]
            bits = with_one(bits, bits_of(tl.load(at, mask=there, other=0.0)))
        most = tl.zeros((R8, C), tl.int32)
        for j in tl.static_range(8):
            magnitude = bits[j] & MAGNITUDE
            found = with_one(found, tl.max(tl.reshape(magnitude, (R8, ACROSS, BLOCK)), 2))
            most = tl.maximum(most, magnitude)
        down = tl.max(tl.reshape(most, (DOWN, BLOCK // 8, C)), 1)
    across = joined(found)  # [R8, ACROSS, 8]
    if FAMILY == "mx":
        row_scale, row_factor = _mx(across, EMAX, UP_FROM, LEAST)
        col_scale, col_factor = _mx(down, EMAX, UP_FROM, LEAST)
    elif FAMILY == "blockwise":
        row_scale, row_factor = _blockwise(across, MAX_BITS, EPSILON, TINY, POW2)
        col_scale, col_factor = _blockwise(down, MAX_BITS, EPSILON, TINY, POW2)
    else:
        row_scale, row_factor = _nvfp4(across, e, t, usual, CASTS, ASM)
        col_scale, col_factor = _nvfp4(down, e, t, usual, CASTS, ASM)
    b, blocks = first_col // BLOCK + tl.arange(0, ACROSS), tl.cdiv(cols, BLOCK)
    scales = tl.reshape(tl.permute(row_scale, (0, 2, 1)), (R, ACROSS))
    _put(row_scales, scales, first_row + tl.arange(0, R), b, rows, blocks, EVEN)
    b, blocks = first_row // BLOCK + tl.arange(0, DOWN), tl.cdiv(rows, BLOCK)
    if TURNED:
        _put(col_scales, tl.trans(col_scale), c, b, cols, blocks, EVEN)
    else:
        _put(col_scales, col_scale, b, c, blocks, cols, EVEN)
    factors, values = parted(row_factor), ()
    for j in tl.static_range(8):
        values = with_one(values, as_float(bits[j]))
    col_factor = spread(col_factor, BLOCK // 8)
    if BITS == 4:
        row_to = row_codes.to(tl.pointer_type(tl.int32), bitcast=True)
        col_to = col_codes.to(tl.pointer_type(tl.int32), bitcast=True)
        word = word_e2m1(values, col_factor, ASM) & spread((down - INF) >> 31, BLOCK // 8)
        i = first_row // 8 + tl.arange(0, R8)
        _put(col_to, tl.trans(word), c, i, cols, rows // 8, EVEN)
        finite, i = parted((across - INF) >> 31), first_col // 8 + tl.arange(0, C // 8)
        for j in tl.static_range(8):
            parts = parted(tl.reshape(values[j], (R8, C // 8, 8)))
            factor = tl.broadcast_to(factors[j][:, :, None], (R8, ACROSS, BLOCK // 8))
            there = tl.broadcast_to(finite[j][:, :, None], (R8, ACROSS, BLOCK // 8))
            word = word_e2m1(parts, tl.reshape(factor, (R8, C // 8)), ASM)
            word &= tl.reshape(there, (R8, C // 8))
            _put(row_to, word, r + j, i, rows, cols // 8, EVEN)
    else:
        made = ()
        for j in tl.static_range(8):
            factor = tl.broadcast_to(factors[j][:, :, None], (R8, ACROSS, BLOCK))
            code = _code(
                values[j] * tl.reshape(factor, (R8, C)), MANTISSA_BITS, MAX_BITS, MIN_BITS,
                NAN_CODE, ZERO_SIGN, CASTS,
            )
            _put(row_codes, code, r + j, c, rows, cols, EVEN)
            made = with_one(made, values[j] * col_factor)
        if TURNED:
            code = _code(
                joined(made), MANTISSA_BITS, MAX_BITS, MIN_BITS, NAN_CODE, ZERO_SIGN, CASTS
            )
            turned = tl.reshape(tl.permute(code, (1, 0, 2)), (C, R))
            _put(col_codes, turned, c, first_row + tl.arange(0, R), cols, rows, EVEN)
        else:
            for j in tl.static_range(8):
                code = _code(
                    made[j], MANTISSA_BITS, MAX_BITS, MIN_BITS, NAN_CODE, ZERO_SIGN, CASTS
                )
                _put(col_codes, code, r + j, c, rows, cols, EVEN)


@triton.jit
def quantize_units(
    x, row_codes, row_scales, col_codes, col_scales, rows, cols, stride,
    FAMILY: tl.constexpr, BITS: tl.constexpr, CASTS: tl.constexpr, ASM: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, MANTISSA_BITS: tl.constexpr = 1, MAX_BITS: tl.constexpr = 0,
    MIN_BITS: tl.constexpr = 0, NAN_CODE: tl.constexpr = 0, ZERO_SIGN: tl.constexpr = True,
    EMAX: tl.constexpr = 0, UP_FROM: tl.constexpr = 0, LEAST: tl.constexpr = -1,
    EPSILON: tl.constexpr = 0, TINY: tl.constexpr = 0, POW2: tl.constexpr = False,
    row_amax=None, row_whole=None, col_whole=None,
):
    """Codes and scales of x [rows, cols], multiples of 8, along its rows and its columns. FAMILY:
    "mx", "blockwise" (of 1 x 128) or "nvfp4" (by rows, after `amax`); CASTS: whether the GPU casts
    to FP8, ASM: whether it is NVIDIA's; PACKED: x is bf16 in whole tiles, whose magnitudes are
    compared two at a time; EVEN: tiles are whole; the other words as of quantize.py."""
    unit_tile(
        tl.program_id(0), tl.program_id(1), x, row_codes, row_scales, col_codes, col_scales, rows,
        cols, stride, FAMILY, BITS, CASTS, ASM, PACKED, EVEN, TURNED, R, C, MANTISSA_BITS,
        MAX_BITS, MIN_BITS, NAN_CODE, ZERO_SIGN, EMAX, UP_FROM, LEAST, EPSILON, TINY, POW2,
        row_amax, row_whole, col_whole,
    )
