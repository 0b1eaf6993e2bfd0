"""The quantizers in Triton: a tile is read once and written in both directions."""

import triton
import triton.language as tl

from te_mx.backends.triton.kernels.encode import (
    INF,
    MAGNITUDE,
    as_bits,
    as_float,
    cast,
    e4m3_value,
    encode,
    encode_e2m1,
    power_of_two,
    rounded,
    scale_byte,
    words_e2m1,
)
from te_mx.backends.triton.kernels.grouped import place_of
from te_mx.backends.triton.kernels.random import encode_random, hadamard, random_bits
from te_mx.backends.triton.kernels.steps import tile


@triton.jit
def _codes(
    bits, scales, random, BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX_BITS: tl.constexpr,
    MIN_BITS: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, RANDOM: tl.constexpr,
):
    """Codes of x with E8M0 bytes that broadcast to it."""
    if HARDWARE:
        # x * 2^(127 - byte) is exact wherever a code is not 0 for it; the cast saturates.
        factor = as_float(tl.where(scales == 255, 0x7FC00000, as_bits(power_of_two(127 - scales))))
        return cast(as_float(bits) * factor, MANTISSA_BITS)
    if RANDOM:
        codes = encode_random(
            bits, 127 - scales, random, BITS, MANTISSA_BITS, MAX_BITS, MIN_BITS
        )
    elif BITS == 4:
        codes = encode_e2m1(as_float(bits) * power_of_two(127 - scales))
    else:
        codes = encode(bits, 127 - scales, BITS, MANTISSA_BITS, MAX_BITS, MIN_BITS, True)
    return tl.where(scales == 255, NAN_CODE, codes).to(tl.uint8)


@triton.jit
def _put(to, codes, r, c, rows, width):
    at = r.to(tl.int64)[:, None] * width + c[None, :]
    tl.store(to + at, codes, mask=(r < rows)[:, None] & (c < width)[None, :])


@triton.jit
def quarters(x):
    """The four elements of the last dimensions [2, 2], in order."""
    even, odd = tl.split(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def store_codes(
    to, codes, first_row, first, rows, k, ROWS: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr
):
    """Codes [ROWS, K] of a tile to [rows, k]: of 4 bits two a byte, of 6 bits four in three."""
    r = first_row + tl.arange(0, ROWS)
    if BITS == 8:
        _put(to, codes, r, first + tl.arange(0, K), rows, k)
    elif BITS == 4:
        low, high = tl.split(tl.reshape(codes, (ROWS, K // 2, 2)))
        _put(to, low | (high << 4), r, first // 2 + tl.arange(0, K // 2), rows, k - k // 2)
    else:
        a, b, c, d = quarters(tl.reshape(codes, (ROWS, K // 4, 2, 2)))
        at, width = first // 4 * 3 + 3 * tl.arange(0, K // 4), k - k // 4
        _put(to, a | (b << 6), r, at, rows, width)
        _put(to, (b >> 2) | (c << 4), r, at + 1, rows, width)
        _put(to, (c >> 4) | (d << 2), r, at + 2, rows, width)


@triton.jit
def store_words(
    to, words, first_row, first, rows, k, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """Words of eight codes [ROWS, WORDS] of a tile to [rows, k]."""
    b = tl.arange(0, 4)
    bytes = (words[:, :, None] >> (8 * b)[None, None, :]).to(tl.uint8)
    r, c = first_row + tl.arange(0, ROWS), first // 2 + tl.arange(0, WORDS * 4)
    _put(to, tl.reshape(bytes, (ROWS, WORDS * 4)), r, c, rows, k - k // 2)


@triton.jit
def quantize_mx(
    x, row_codes, row_scales, col_codes, col_scales, rows, cols, stride, BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, MAX_BITS: tl.constexpr, MIN_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr, EMAX: tl.constexpr, UP_FROM: tl.constexpr, LEAST: tl.constexpr,
    HARDWARE: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, TURNED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
    starts=None, ends=None, groups=0, GROUPS: tl.constexpr = 0, seed=None, first_of_all=0,
    RANDOM: tl.constexpr = False, ROW_SIZE: tl.constexpr = 0,
    ROW_SIGNS: tl.constexpr = 0, COL_SIZE: tl.constexpr = 0, COL_SIGNS: tl.constexpr = 0,
    out=None, grad=None, mean=None, rstd=None, weight=None, bias=None, STEP: tl.constexpr = "",
    ACT: tl.constexpr = "", GATED: tl.constexpr = False, LIMIT: tl.constexpr = 0.0,
    ALPHA: tl.constexpr = 0.0, OFFSET: tl.constexpr = 0.0, TO: tl.constexpr = None,
):
    """MX formats: codes and E8M0 bytes of x [rows, cols] along its rows, its columns, or both.

    TURNED: columns are stored [cols, rows], else as x lies, one code a byte. GROUPS: rows belong to
    so many groups or fewer, from whose starts transforms count, and a program has one block of one.
    RANDOM: rounds stochastically; rows are counted from first_of_all on. SIZE, SIGNS: of Hadamard
    transforms.
    """
    first_row, first_col, slot = tl.program_id(1) * R, tl.program_id(0) * C, tl.program_id(1)
    start = 0
    if GROUPS:
        group, first_row, start, rows = place_of(slot, starts, ends, groups, R, GROUPS)
    r = first_row + tl.arange(0, R)
    c = first_col + tl.arange(0, C)
    bits = tile(
        x, r, c, rows, cols, stride, out, grad, mean, rstd, weight, bias, STEP, ACT, GATED, LIMIT,
        ALPHA, OFFSET, TO,
    )
    there = (r < rows)[:, None] & (c < cols)[None, :]
    random = bits
    if RANDOM:
        random = random_bits(seed, first_of_all + r, first_col, R, C)
    if ROW:
        rotated = bits
        if ROW_SIZE:
            rotated = hadamard(bits, first_col, cols, ROW_SIZE, ROW_SIGNS, R, C)
            rotated = tl.where(there, rotated, 0)
        blocks = tl.reshape(rotated, (R, C // 32, 32))
        scales = scale_byte(tl.max(blocks & MAGNITUDE, 2), EMAX, UP_FROM, LEAST)
        if BITS == 4 and not RANDOM:
            scaled = as_float(blocks) * power_of_two(127 - scales)[:, :, None]
            words = tl.reshape(words_e2m1(scaled, R * C // 8, 1, LEAST < 0), (R, C // 32, 4))
            words = tl.reshape(tl.where((scales == 255)[:, :, None], 0, words), (R, C // 8))
            store_words(row_codes, words, first_row, first_col, rows, cols, R, C // 8)
        else:
            codes = _codes(
                blocks, scales[:, :, None], tl.reshape(random, (R, C // 32, 32)), BITS,
                MANTISSA_BITS, MAX_BITS, MIN_BITS, NAN_CODE, HARDWARE, RANDOM,
            )
            codes = tl.reshape(codes, (R, C))
            store_codes(row_codes, codes, first_row, first_col, rows, cols, R, C, BITS)
        b, count = first_col // 32 + tl.arange(0, C // 32), (cols + 31) // 32
        at = r.to(tl.int64)[:, None] * count + b[None, :]
        mask = (r < rows)[:, None] & (b < count)[None, :]
        tl.store(row_scales + at, scales.to(tl.uint8), mask=mask)
    if COL:
        rotated = bits
        if COL_SIZE:
            turned = tl.trans(bits)
            turned = hadamard(
                turned, first_row - start, rows - start, COL_SIZE, COL_SIGNS, C, R
            )
            rotated = tl.where(there, tl.trans(turned), 0)
        blocks = tl.reshape(rotated, (R // 32, 32, C))
        scales = scale_byte(tl.max(blocks & MAGNITUDE, 1), EMAX, UP_FROM, LEAST)
        if BITS == 4 and TURNED and not RANDOM:
            scaled = as_float(blocks) * power_of_two(127 - scales)[:, None, :]
            words = tl.reshape(words_e2m1(scaled, R // 8, C, LEAST < 0), (R // 32, 4, C))
            words = tl.reshape(tl.where((scales == 255)[:, None, :], 0, words), (R // 8, C))
            store_words(col_codes, tl.trans(words), first_col, first_row, cols, rows, C, R // 8)
        else:
            codes = _codes(
                blocks, scales[:, None, :], tl.reshape(random, (R // 32, 32, C)), BITS,
                MANTISSA_BITS, MAX_BITS, MIN_BITS, NAN_CODE, HARDWARE, RANDOM,
            )
            codes = tl.reshape(codes, (R, C))
            if TURNED:
                store_codes(
                    col_codes, tl.trans(codes), first_col, first_row, cols, rows, C, R, BITS
                )
            else:
                store_codes(col_codes, codes, first_row, first_col, rows, cols, R, C, 8)
        b, count = slot * (R // 32) + tl.arange(0, R // 32), (rows + 31) // 32
        mask = (b < count)[:, None] & (c < cols)[None, :]
        if GROUPS:
            mask = (b >= 0)[:, None] & (c < tl.where(group >= 0, cols, 0))[None, :]
        if TURNED:
            at = c.to(tl.int64)[None, :] * count + b[:, None]
        else:
            at = b.to(tl.int64)[:, None] * cols + c[None, :]
        tl.store(col_scales + at, scales.to(tl.uint8), mask=mask)


@triton.jit
def _blockwise(
    bits, amax, BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX_BITS: tl.constexpr,
    MIN_BITS: tl.constexpr, NAN_CODE: tl.constexpr, ZERO_SIGN: tl.constexpr, EPSILON: tl.constexpr,
    TINY: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):
    """Codes of x and fp32 scales of its blocks, by amax (bits), which broadcasts to x."""
    finite = amax < INF
    amax = tl.maximum(tl.where(finite, amax, 0), EPSILON)
    tiny = amax < TINY
    top = as_float(amax * 0 + MAX_BITS)
    factor = tl.div_rn(top, as_float(tl.where(tiny, 0x3F800000, amax)))
    if POW2:
        factor = as_float(as_bits(factor) & INF)
    factor = as_float(tl.where(tiny, 253 << 23, as_bits(factor)))
    factor = as_float(tl.where(amax == 0, 0x3F800000, as_bits(factor)))
    product = as_float(bits) * factor
    if HARDWARE:
        codes = cast(product, MANTISSA_BITS)
    else:
        codes = encode(
            as_bits(product), 0, BITS, MANTISSA_BITS, MAX_BITS, MIN_BITS, ZERO_SIGN
        ).to(tl.uint8)
    codes = tl.where(finite, codes, NAN_CODE).to(tl.uint8)
    scale = tl.div_rn(as_float(amax * 0 + 0x3F800000), factor)
    return codes, as_float(tl.where(finite, as_bits(scale), 0x7FC00000))


@triton.jit
def quantize_blockwise(
    x, row_codes, row_scales, col_codes, col_scales, rows, cols, stride, BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, MAX_BITS: tl.constexpr, MIN_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr, ZERO_SIGN: tl.constexpr, EPSILON: tl.constexpr, TINY: tl.constexpr,
    POW2: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, TURNED: tl.constexpr,
    SQUARE: tl.constexpr, HARDWARE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    starts=None, ends=None, groups=0, GROUPS: tl.constexpr = 0,
    out=None, grad=None, mean=None, rstd=None, weight=None, bias=None, STEP: tl.constexpr = "",
    ACT: tl.constexpr = "", GATED: tl.constexpr = False, LIMIT: tl.constexpr = 0.0,
    ALPHA: tl.constexpr = 0.0, OFFSET: tl.constexpr = 0.0, TO: tl.constexpr = None,
):
    """Blockwise FP8: codes and fp32 scales, blocks of 1 x 128, or of 128 x 128 (R = C = 128)."""
    first_row, first_col, slot = tl.program_id(1) * R, tl.program_id(0) * C, tl.program_id(1)
    if GROUPS:
        group, first_row, _, rows = place_of(slot, starts, ends, groups, R, GROUPS)
    r = first_row + tl.arange(0, R)
    c = first_col + tl.arange(0, C)
    bits = tile(
        x, r, c, rows, cols, stride, out, grad, mean, rstd, weight, bias, STEP, ACT, GATED, LIMIT,
        ALPHA, OFFSET, TO,
    )
    across, down = (cols + 127) // 128, (rows + 127) // 128
    if ROW:
        amax = tl.max(bits & MAGNITUDE, 1)
        if SQUARE:
            amax = tl.max(amax, 0)
            amax = amax + tl.zeros((R,), tl.int32)
        codes, scales = _blockwise(
            bits, amax[:, None], BITS, MANTISSA_BITS, MAX_BITS, MIN_BITS, NAN_CODE, ZERO_SIGN,
            EPSILON, TINY, POW2, HARDWARE,
        )
        store_codes(row_codes, codes, first_row, first_col, rows, cols, R, C, 8)
        height: tl.constexpr = 128 if SQUARE else 1
        at = (r // height).to(tl.int64) * across + first_col // 128
        mask = (r < rows) & (r % height == 0)
        tl.store(row_scales + at[:, None], scales, mask=mask[:, None])
    if COL:
        amax = tl.max(bits & MAGNITUDE, 0)
        if SQUARE:
            amax = tl.max(amax, 0)
            amax = amax + tl.zeros((C,), tl.int32)
        codes, scales = _blockwise(
            bits, amax[None, :], BITS, MANTISSA_BITS, MAX_BITS, MIN_BITS, NAN_CODE, ZERO_SIGN,
            EPSILON, TINY, POW2, HARDWARE,
        )
        if TURNED:
            store_codes(col_codes, tl.trans(codes), first_col, first_row, cols, rows, C, R, 8)
        else:
            store_codes(col_codes, codes, first_row, first_col, rows, cols, R, C, 8)
        width: tl.constexpr = 128 if SQUARE else 1
        wide = (cols + width - 1) // width
        if TURNED:
            at = (c // width).to(tl.int64) * down + first_row // 128
        else:
            at = slot * R // 128 * wide + (c // width).to(tl.int64)
        mask = (c < cols) & (c % width == 0)
        if GROUPS:
            mask = (c < tl.where(group >= 0, cols, 0)) & (c % width == 0)
        tl.store(col_scales + at[None, :], scales, mask=mask[None, :])


@triton.jit
def dequantize(
    codes, scales, out, rows, k, code_stride, width, BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, HAS_INF: tl.constexpr,
    ZERO_SIGN: tl.constexpr, SCALE: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
    K_FIRST: tl.constexpr, R: tl.constexpr, C: tl.constexpr, whole=None,
    BY_ROWS: tl.constexpr = False,
):
    """Values [rows, k] of codes in layout "rows", or "cols" (K_FIRST), rounded once, and with a
    tensor scale to fp32 before."""
    r = tl.program_id(1) * R + tl.arange(0, R)
    c = tl.program_id(0) * C + tl.arange(0, C)
    there = (r < rows)[:, None] & (c < k)[None, :]
    r64 = r.to(tl.int64)[:, None]
    if K_FIRST:
        code = tl.load(codes + c.to(tl.int64)[None, :] * code_stride + r64, mask=there, other=0)
        at = (c // BLOCK).to(tl.int64)[None, :] * width + r64 // HEIGHT
    elif BITS == 4:
        code = tl.load(codes + r64 * code_stride + c[None, :] // 2, mask=there, other=0)
        code = (code >> ((c % 2) * 4)[None, :].to(tl.uint8)) & 15
        at = r64 // HEIGHT * width + c[None, :] // BLOCK
    elif BITS == 6:
        byte, shift = codes + r64 * code_stride + (6 * c // 8)[None, :], (6 * c % 8)[None, :]
        code = tl.load(byte, mask=there, other=0).to(tl.int32)
        code |= tl.load(byte + 1, mask=there & (shift > 2), other=0).to(tl.int32) << 8
        code = (code >> shift) & 63
        at = r64 // HEIGHT * width + c[None, :] // BLOCK
    else:
        code = tl.load(codes + r64 * code_stride + c[None, :], mask=there, other=0)
        at = r64 // HEIGHT * width + c[None, :] // BLOCK
    code = code.to(tl.int32)
    sign_bit: tl.constexpr = 1 << (BITS - 1)
    magnitude = code & (sign_bit - 1)
    normal = as_float((magnitude << (23 - MANTISSA_BITS)) + ((127 - BIAS) << 23))
    step: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA_BITS)
    value = tl.where(magnitude < (1 << MANTISSA_BITS), magnitude.to(tl.float32) * step, normal)
    bits = as_bits(value)
    if HAS_INF:
        bits = tl.where(magnitude > MAX_CODE, 0x7F800000, bits)
    if sign_bit - 1 > MAX_CODE:
        bits = tl.where(magnitude > MAX_CODE + HAS_INF, 0x7FC00000, bits)
    bits = tl.where(code >= sign_bit, bits | -0x80000000, bits)
    if not ZERO_SIGN:
        bits = tl.where(code == sign_bit, 0x7FC00000, bits)
    scale = tl.load(scales + at, mask=there, other=0)
    if SCALE == "e8m0":
        # In two normal factors, and no number is added to a byte: ptxas loses the -127 of a 16-bit
        # sum where one row is compiled.
        byte = scale.to(tl.int32)
        half = byte >> 1
        value = as_float(bits) * as_float((half << 23) + (64 << 23))
        value *= as_float(((byte - half) << 23) + (63 << 23))
        value = as_float(tl.where(scale == 255, 0x7FC00000, as_bits(value)))
    elif SCALE == "fp32":
        value = as_float(bits) * scale
    else:
        value = as_float(bits) * e4m3_value(scale.to(tl.int32))
        value *= tl.load(whole + (r if BY_ROWS else r * 0), mask=r < rows, other=0.0)[:, None]
    tl.store(out + r64 * k + c[None, :], rounded(value, out.dtype.element_ty), mask=there)
