"""The quantizer of NVFP4 in Triton, after one kernel for the amax that scales the tensor."""

import triton
import triton.language as tl

from te_mx.backends.triton.kernels.encode import (
    INF,
    MAGNITUDE,
    as_bits,
    as_float,
    bits_of,
    e4m3_value,
    encode,
    encode_e2m1,
    rounded,
    words_e2m1,
)
from te_mx.backends.triton.kernels.grouped import place_of
from te_mx.backends.triton.kernels.quantize import quarters, store_codes, store_words
from te_mx.backends.triton.kernels.random import encode_random, hadamard, random_bits
from te_mx.backends.triton.kernels.steps import tile

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _as(value, TO: tl.constexpr):
    """fp32 rounded to a dtype, as fp32."""
    return as_float(bits_of(rounded(value, TO)))


@triton.jit
def _over(a, b):
    """a / b, rounded to nearest, of numbers and tensors."""
    return tl.div_rn(a + tl.zeros_like(b), b)


@triton.jit
def _transformed(
    bits, first, k, SIZE: tl.constexpr, SIGNS: tl.constexpr, TO: tl.constexpr, ROWS: tl.constexpr,
    K: tl.constexpr,
):
    """A tile after its transform, which rounds to the dtype of x."""
    if SIZE:
        bits = hadamard(bits, first, k, SIZE, SIGNS, ROWS, K)
        bits = bits_of(rounded(as_float(bits), TO))
        bits = tl.where((first + tl.arange(0, K) < k)[None, :], bits, 0)
    return bits


@triton.jit
def _note(to, bits, r, rows, BY_ROWS: tl.constexpr):
    magnitude = bits & MAGNITUDE
    most = tl.max(tl.where(magnitude < INF, magnitude, 0), 1)
    if BY_ROWS:
        tl.atomic_max(to + r, most, mask=r < rows)
    else:
        tl.atomic_max(to, tl.max(most, 0))


@triton.jit
def amax(
    x, row_amax, col_amax, rows, cols, stride, ROW: tl.constexpr, COL: tl.constexpr,
    BY_ROWS: tl.constexpr, TO: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    ROW_SIZE: tl.constexpr = 0, ROW_SIGNS: tl.constexpr = 0, COL_SIZE: tl.constexpr = 0,
    COL_SIGNS: tl.constexpr = 0, grad=None, mean=None, rstd=None, weight=None, bias=None,
    STEP: tl.constexpr = "", ACT: tl.constexpr = "", GATED: tl.constexpr = False,
    LIMIT: tl.constexpr = 0.0, ALPHA: tl.constexpr = 0.0, OFFSET: tl.constexpr = 0.0,
    starts=None, ends=None, groups=0, GROUPS: tl.constexpr = 0,
):
    """The largest finite magnitude, as bits, of a matrix (BY_ROWS: of each row; GROUPS: of those of
    each group) as either direction transforms it, into int32 zeros."""
    first_row, first_col = tl.program_id(1) * R, tl.program_id(0) * C
    start = 0
    if GROUPS:
        group, first_row, start, rows = place_of(
            tl.program_id(1), starts, ends, groups, R, GROUPS
        )
        row_amax += tl.maximum(group, 0)
        col_amax += tl.maximum(group, 0)
    r, c = first_row + tl.arange(0, R), first_col + tl.arange(0, C)
    bits = tile(
        x, r, c, rows, cols, stride, None, grad, mean, rstd, weight, bias, STEP, ACT, GATED, LIMIT,
        ALPHA, OFFSET, TO,
    )
    if ROW:
        made = _transformed(bits, first_col, cols, ROW_SIZE, ROW_SIGNS, TO, R, C)
        _note(row_amax, made, r, rows, BY_ROWS)
    if COL:
        made = _transformed(
            tl.trans(bits), first_row - start, rows - start, COL_SIZE, COL_SIGNS, TO, C, R
        )
        _note(col_amax, made, c, cols, BY_ROWS)


@triton.jit
def _of_tensor(amax, RULE: tl.constexpr, BOUND: tl.constexpr, TO: tl.constexpr):
    """(e, t): what scales are multiplied by, or 0 where a rule has none, and the tensor scale."""
    if RULE == "torchao" or RULE == "modelopt":
        scale = tl.minimum(tl.div_rn(amax, tl.zeros_like(amax) + BOUND), LARGEST)
        scale = tl.where(amax == 0, 1.0, scale)
        return scale, scale
    if RULE == "compressed_tensors":
        scale = _as(_as(_over(1.0, amax), TO) * BOUND, TO)
    else:
        scale = _over(BOUND, amax)
    scale = tl.where(amax == 0, 1.0, tl.minimum(scale, LARGEST))
    return scale, _over(1.0, scale)


@triton.jit
def _e4m3(value):
    """Code of magnitudes to nearest, at most 448; NaN counts as more."""
    return encode(as_bits(value) & MAGNITUDE, 0, 8, 3, 0x43E00000, 0x3C800000, True)


@triton.jit
def _scale(bamax, e, RULE: tl.constexpr, TO: tl.constexpr):
    """Codes of block scales."""
    six = tl.zeros_like(bamax) + 6.0
    if RULE == "te":
        return _e4m3(bamax * (e * 0.16666667163372040))
    if RULE == "torchao":
        bits = as_bits(tl.div_rn(tl.div_rn(bamax, six), e + tl.zeros_like(bamax))) & MAGNITUDE
        return _e4m3(as_float(tl.maximum(bits, 0x3C800000)))
    if RULE == "modelopt":
        wanted = tl.div_rn(bamax, e * 6.0 + tl.zeros_like(bamax))
        bits = tl.where(wanted == 0, 0x3F800000, as_bits(wanted) & MAGNITUDE)
        return _e4m3(as_float(tl.maximum(bits, 0x3B000000)))
    code = _e4m3(e * _as(tl.div_rn(bamax, six), TO))
    return tl.where(code == 0, 32, code)  # 0.125


@triton.jit
def _scaled(x, scale, e, t, RULE: tl.constexpr):
    """x as it is rounded to codes, for block scales that broadcast to it."""
    if RULE == "torchao":
        made = x * tl.div_rn(_over(1.0, t) + tl.zeros_like(scale), scale)
    elif RULE == "modelopt":
        made = tl.div_rn(x, scale * t + tl.zeros_like(x))
    elif RULE == "compressed_tensors":
        made = tl.div_rn(x, tl.div_rn(scale, e + tl.zeros_like(scale)) + tl.zeros_like(x))
    else:
        made = x * tl.minimum(_over(1.0, scale * t), LARGEST)
    made = tl.where(x == 0, x, made)
    if RULE == "modelopt" or RULE == "compressed_tensors":
        made = tl.where(made == 0, 0.0, made)
    return made


@triton.jit
def _error(
    x, scaled, scale, amax, BOUND: tl.constexpr, SQUARE: tl.constexpr, H: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):
    """What rounding loses of blocks [DOWN, H, ACROSS, 16]: summed in the order of k, then of rows
    as of a tree."""
    code = encode_e2m1(scaled)
    magnitude = code & 7
    bits = (magnitude << 22) + (126 << 23)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, as_float(bits))
    value = as_float(as_bits(value) | ((code & 8) << 28)) * scale * amax
    off = tl.div_rn(value, tl.zeros_like(value) + BOUND) - x
    off = off * off if SQUARE else tl.abs(off)
    first, second, third, fourth = quarters(tl.reshape(off, (DOWN * H * ACROSS, 2, 2, 2, 2)))
    a, b, c, d = quarters(first), quarters(second), quarters(third), quarters(fourth)
    total = tl.zeros((DOWN * H * ACROSS,), tl.float32)
    for i in tl.static_range(4):
        total = total + a[i] + b[i] + c[i] + d[i]
    total = tl.reshape(total, (DOWN, H, ACROSS))
    if H == 16:
        total = _halves(_halves(total, DOWN, 16, ACROSS), DOWN, 8, ACROSS)
        total = _halves(_halves(total, DOWN, 4, ACROSS), DOWN, 2, ACROSS)
    return tl.reshape(total, (DOWN, ACROSS))


@triton.jit
def _halves(total, DOWN: tl.constexpr, H: tl.constexpr, ACROSS: tl.constexpr):
    upper, lower = tl.split(
        tl.permute(tl.reshape(total, (DOWN, 2, H // 2, ACROSS)), (0, 2, 3, 1))
    )
    return upper + lower


@triton.jit
def _side(
    bits, random, amax_at, whole_to, codes_to, scales_to, first_row, first, rows, k, block, leads,
    RULE: tl.constexpr, FOUR: tl.constexpr, SQUARE: tl.constexpr, BOUND: tl.constexpr,
    BY_ROWS: tl.constexpr, TO: tl.constexpr, RANDOM: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, K: tl.constexpr, K_FIRST: tl.constexpr,
):
    """One direction of a tile [ROWS, K] of an operand [rows, k]: codes, scales from a block on and,
    by those that lead, tensor scales. K_FIRST: they lie turned, codes one a byte."""
    DOWN: tl.constexpr = ROWS // H
    ACROSS: tl.constexpr = K // 16
    blocks = tl.reshape(bits, (DOWN, H, ACROSS, 16))
    largest = tl.max(tl.max(blocks & MAGNITUDE, 3), 1)
    finite = largest < INF
    bamax = as_float(tl.where(finite, largest, 0))
    of_row = first_row // H + tl.arange(0, DOWN)
    at = (of_row if BY_ROWS else tl.arange(0, 1))[:, None]
    most = as_float(tl.load(amax_at + at, mask=at < (rows if BY_ROWS else 1), other=0))
    e, t = _of_tensor(most, RULE, BOUND, TO)
    x = as_float(blocks)
    if FOUR:
        base = tl.div_rn(bamax, tl.zeros_like(bamax) + 6.0) * e
        of_4, code = _e4m3(base * 1.5), _e4m3(base)
        t4, whole = t[:, None, :, None], most[:, None, :, None]
        scale_4, scale_6 = e4m3_value(of_4)[:, None, :, None], e4m3_value(code)[:, None, :, None]
        x_4, scaled = _scaled(x, scale_4, e, t4, RULE), _scaled(x, scale_6, e, t4, RULE)
        error_4 = _error(x, x_4, scale_4, whole, BOUND, SQUARE, H, DOWN, ACROSS)
        error_6 = _error(x, scaled, scale_6, whole, BOUND, SQUARE, H, DOWN, ACROSS)
        four = error_4 < error_6
        code = tl.where(four, of_4, code)
        scaled = tl.where(four[:, None, :, None], x_4, scaled)
    else:
        code = _scale(bamax, e, RULE, TO)
        scaled = _scaled(
            x, e4m3_value(code)[:, None, :, None], e[:, None, :, None], t[:, None, :, None], RULE
        )
    if RANDOM or K_FIRST:
        if RANDOM:
            drawn = tl.reshape(random, (DOWN, H, ACROSS, 16))
            codes = encode_random(as_bits(scaled), 0, drawn, 4, 1, 0x40C00000, 0x3F800000)
        else:
            codes = encode_e2m1(scaled)
        codes = tl.where(finite[:, None, :, None], codes, 0)
        codes = tl.reshape(codes, (ROWS, K)).to(tl.uint8)
    else:
        words = tl.reshape(words_e2m1(scaled, ROWS * K // 8, 1, True), (DOWN, H, ACROSS, 2))
        words = tl.where(finite[:, None, :, None], words, 0)
        words = tl.reshape(words, (ROWS, K // 8))
        store_words(codes_to, words, first_row, first, rows, k, ROWS, K // 8)
    stored = tl.where(finite, code, 0x7F).to(tl.uint8)
    b, down, across = block + tl.arange(0, ACROSS), tl.cdiv(rows, H), tl.cdiv(k, 16)
    there = (of_row < down)[:, None] & (first + 16 * tl.arange(0, ACROSS) < k)[None, :]
    if K_FIRST:
        store_codes(codes_to, tl.trans(codes), first, first_row, k, rows, K, ROWS, 8)
        to = scales_to + b.to(tl.int64)[None, :] * down + of_row[:, None]
    else:
        if RANDOM:
            store_codes(codes_to, codes, first_row, first, rows, k, ROWS, K, 4)
        to = scales_to + of_row.to(tl.int64)[:, None] * across + b[None, :]
    tl.store(to, stored, mask=there)
    tl.store(whole_to + at, t, mask=at < tl.where(leads, rows if BY_ROWS else 1, 0))


@triton.jit
def quantize_nvfp4(
    x, row_codes, row_scales, col_codes, col_scales, rows, cols, stride, row_amax, col_amax,
    row_whole, col_whole, RULE: tl.constexpr, FOUR: tl.constexpr, SQUARE: tl.constexpr,
    BOUND: tl.constexpr, BY_ROWS: tl.constexpr, TO: tl.constexpr, HEIGHT: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, TURNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    seed=None, first_of_all=0, RANDOM: tl.constexpr = False, ROW_SIZE: tl.constexpr = 0,
    ROW_SIGNS: tl.constexpr = 0, COL_SIZE: tl.constexpr = 0, COL_SIGNS: tl.constexpr = 0, out=None,
    grad=None, mean=None, rstd=None, weight=None, bias=None, STEP: tl.constexpr = "",
    ACT: tl.constexpr = "", GATED: tl.constexpr = False, LIMIT: tl.constexpr = 0.0,
    ALPHA: tl.constexpr = 0.0, OFFSET: tl.constexpr = 0.0,
    starts=None, ends=None, groups=0, GROUPS: tl.constexpr = 0,
):
    """Codes, E4M3 scales and tensor scales of x [rows, cols] along its rows, its columns, or both,
    with the largest magnitudes that `amax` found; words as of `quantize_mx`."""
    first_row, first_col = tl.program_id(1) * R, tl.program_id(0) * C
    start, block = 0, first_row // 16
    if GROUPS:
        group, first_row, start, rows = place_of(
            tl.program_id(1), starts, ends, groups, R, GROUPS
        )
        block = start // 16 + group + (first_row - start) // 16
        which = tl.maximum(group, 0)
        row_amax += which
        col_amax += which
        row_whole += which
        col_whole += which
    r = first_row + tl.arange(0, R)
    c = first_col + tl.arange(0, C)
    bits = tile(
        x, r, c, rows, cols, stride, out, grad, mean, rstd, weight, bias, STEP, ACT, GATED, LIMIT,
        ALPHA, OFFSET, TO,
    )
    random = bits
    if RANDOM:
        random = random_bits(seed, first_of_all + r, first_col, R, C)
    if ROW:
        made = _transformed(bits, first_col, cols, ROW_SIZE, ROW_SIGNS, TO, R, C)
        _side(
            made, random, row_amax, row_whole, row_codes, row_scales, first_row, first_col, rows,
            cols, first_col // 16, (first_col == 0) & (rows > 0), RULE, FOUR, SQUARE, BOUND,
            BY_ROWS, TO, RANDOM, HEIGHT, R, C, False,
        )
    if COL:
        made = _transformed(
            tl.trans(bits), first_row - start, rows - start, COL_SIZE, COL_SIGNS, TO, C, R
        )
        _side(
            made, tl.trans(random), col_amax, col_whole, col_codes, col_scales, first_col,
            first_row, cols, rows, block, (first_row == start) & (rows > 0), RULE, FOUR, SQUARE,
            BOUND, BY_ROWS, TO, RANDOM, HEIGHT, C, R,
            not TURNED,
        )
