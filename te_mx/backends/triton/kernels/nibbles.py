"""Quantizers to 4 bits of whole tiles of bf16 on GPUs of NVIDIA, both directions from one read: two
numbers a word up to the instructions that code eight."""

import triton
import triton.language as tl

from te_mx.backends.triton.kernels.e2m1 import COLUMNS, ROW
from te_mx.backends.triton.kernels.encode import INF, as_float, scale_byte
from te_mx.backends.triton.kernels.quantize import quarters
from te_mx.backends.triton.kernels.units import (
    halves,
    inverse,
    joined,
    larger,
    of_tensor,
    parted,
    spread,
    unit_tile,
    with_one,
)

# A code and its value. Where several share a register, as casts of tensors do, ptxas of Triton 3.6
# reads one before it is there.
_E4M3 = tl.constexpr(
    "{ .reg .b16 h, u; .reg .b32 d; .reg .f32 z; mov.b32 z, 0f00000000;"
    " cvt.rn.satfinite.e4m3x2.f32 h, z, $2; cvt.u32.u16 $0, h; cvt.rn.f16x2.e4m3x2 d, h;"
    " mov.b32 {h, u}, d; cvt.f32.f16 $1, h; }"
)


@triton.jit
def amax_words(x, parts, cols, stride, W: tl.constexpr, TURNS: tl.constexpr):
    """Of bf16 [a multiple of TURNS, cols], by programs: the bits of the largest finite magnitude,
    and behind all of those whether one is not finite."""
    count = tl.num_programs(0) * tl.num_programs(1)
    parts += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    to = x.to(tl.pointer_type(tl.int32), bitcast=True)
    to += tl.program_id(1).to(tl.int64) * TURNS * (stride // 2)
    c = tl.program_id(0) * W + tl.arange(0, W)
    there = c < cols // 2
    most = tl.zeros((W,), tl.int32)
    for i in tl.static_range(TURNS):
        words = tl.load(to + i * (stride // 2) + c, mask=there, other=0)
        most = larger(most, words & 0x7FFF7FFF)
    top = tl.max(tl.maximum(most << 16, most & -65536))
    tl.store(parts + count, (top >= INF).to(tl.int32))
    if top >= INF:
        rest = tl.zeros((W,), tl.int32)
        for i in tl.static_range(TURNS):
            words = tl.load(to + i * (stride // 2) + c, mask=there, other=0) & 0x7FFF7FFF
            low, high = words << 16, words & -65536
            low, high = tl.where(low < INF, low, 0), tl.where(high < INF, high, 0)
            rest = tl.maximum(rest, tl.maximum(low, high))
        top = tl.max(rest)
    tl.store(parts, top)


@triton.jit
def scale_tensor(parts, count, found, row_whole, col_whole, N: tl.constexpr):
    """Of what `amax_words` left, to found: the largest magnitude, what those of blocks are
    multiplied by, eight times the tensor scale, and whether all is finite and that scale usual."""
    most, none = tl.zeros((N,), tl.int32), tl.zeros((N,), tl.int32)
    for first in tl.range(0, count, N):
        at = parts + first + tl.arange(0, N)
        there = first + tl.arange(0, N) < count
        most = tl.maximum(most, tl.load(at, mask=there, other=0))
        none |= tl.load(at + count, mask=there, other=0)
    amax = tl.max(most)
    tl.store(found, as_float(amax))
    e, t, usual = of_tensor(as_float(amax))
    tl.store(row_whole, t)
    tl.store(col_whole, t)
    tl.store(found + 1, e * 0.16666667163372040)
    tl.store(found + 2, t * 8.0)
    tl.store(found + 3, (usual & (tl.max(none) == 0)).to(tl.float32))


@triton.jit
def _of_mx(amax, EMAX: tl.constexpr, UP_FROM: tl.constexpr, LEAST: tl.constexpr):
    """(scales to store, an eighth of factors, masks of words) of blocks."""
    byte = scale_byte(amax, EMAX, UP_FROM, LEAST)
    factor = as_float(tl.maximum((254 - byte) << 23, 1 << 22)) * 0.125
    return byte.to(tl.uint8), factor, (amax - INF) >> 31


@triton.jit
def _of_nvfp4(amax, sixth, eight):
    """The same of finite numbers and a usual tensor scale, whose words need no masks."""
    code, value = tl.inline_asm_elementwise(
        _E4M3, "=r,=r,r", [as_float(amax) * sixth], (tl.int32, tl.float32), True, 1
    )
    return code.to(tl.uint8), tl.minimum(inverse(value * eight), 4.253529332981611e37), amax


@triton.jit
def _tile(
    w, row_codes, row_scales, col_codes, col_scales, rows8, cols8, row_blocks, col_blocks, sixth,
    eight, FAMILY: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EMAX: tl.constexpr,
    UP_FROM: tl.constexpr, LEAST: tl.constexpr,
):
    """Codes and scales of words [R / 8, C / 2] of every eighth row, to where a tile's begin."""
    BLOCK: tl.constexpr = 32 if FAMILY == "mx" else 16
    R8: tl.constexpr = R // 8
    C8: tl.constexpr = C // 8
    DOWN: tl.constexpr = R // BLOCK
    ACROSS: tl.constexpr = C // BLOCK
    both, found = tl.zeros((R8, C // 2), tl.int32), ()
    for j in tl.static_range(8):
        two = w[j] & 0x7FFF7FFF
        both = larger(both, two)
        most = tl.reduce(tl.reshape(two, (R8, ACROSS, BLOCK // 2)), 2, larger)
        found = with_one(found, tl.maximum(most << 16, most & -65536))
    down = halves(tl.reduce(tl.reshape(both, (DOWN, BLOCK // 8, C // 2)), 1, larger))
    if FAMILY == "mx":
        col_scale, factor, mask = _of_mx(down, EMAX, UP_FROM, LEAST)
    else:
        col_scale, factor, mask = _of_nvfp4(down, sixth, eight)
    even, odd = tl.split(tl.reshape(spread(factor, BLOCK // 8), (R8, C // 2, 2)))
    given = (w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], even, odd)
    low, high = tl.inline_asm_elementwise(
        COLUMNS, "=r,=r,r,r,r,r,r,r,r,r,r,r", given, (tl.int32, tl.int32), True, 1
    )
    words = tl.reshape(tl.join(low, high), (R8, C))
    if FAMILY == "mx":
        words &= spread(mask, BLOCK // 8)
    c = tl.arange(0, C)[:, None]
    to = col_codes.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(to + (c * rows8 + tl.arange(0, R8)[None, :]), tl.trans(words))
    at = c * row_blocks + tl.arange(0, DOWN)[None, :]
    tl.store(col_scales + at, tl.trans(col_scale))
    if FAMILY == "mx":
        row_scale, factor, mask = _of_mx(joined(found), EMAX, UP_FROM, LEAST)
    else:
        row_scale, factor, mask = _of_nvfp4(joined(found), sixth, eight)
    factors, masks = parted(factor), parted(mask)
    to = row_codes.to(tl.pointer_type(tl.int32), bitcast=True)
    to += (8 * tl.arange(0, R8))[:, None] * cols8 + tl.arange(0, C8)[None, :]
    for j in tl.static_range(8):
        w0, w1, w2, w3 = quarters(tl.reshape(w[j], (R8, C8, 2, 2)))
        factor = tl.broadcast_to(factors[j][:, :, None], (R8, ACROSS, BLOCK // 8))
        four = (w0, w1, w2, w3, tl.reshape(factor, (R8, C8)))
        words = tl.inline_asm_elementwise(ROW, "=r,r,r,r,r,r", four, tl.int32, True, 1)
        if FAMILY == "mx":
            mask = tl.broadcast_to(masks[j][:, :, None], (R8, ACROSS, BLOCK // 8))
            words &= tl.reshape(mask, (R8, C8))
        tl.store(to + j * cols8, words)
    at = tl.arange(0, R)[:, None] * col_blocks + tl.arange(0, ACROSS)[None, :]
    tl.store(row_scales + at, tl.reshape(tl.permute(row_scale, (0, 2, 1)), (R, ACROSS)))


@triton.jit
def quantize_words(
    x, row_codes, row_scales, col_codes, col_scales, rows, cols, stride, FAMILY: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EMAX: tl.constexpr = 0, UP_FROM: tl.constexpr = 0,
    LEAST: tl.constexpr = -1, found=None, row_whole=None, col_whole=None,
):
    """Codes that lie by rows, and scales, of x [rows, cols], whole tiles [R, C], along its rows and
    its columns. FAMILY: "mx" or "nvfp4" (after `scale_tensor`)."""
    BLOCK: tl.constexpr = 32 if FAMILY == "mx" else 16
    # Backwards: the cache has what `amax_words` read last.
    across = tl.num_programs(0) - 1 - tl.program_id(0)
    down = tl.num_programs(1) - 1 - tl.program_id(1)
    row, col, words = (down * R).to(tl.int64), (across * C).to(tl.int64), ()
    two = tl.multiple_of(stride // 2, 4)
    to = x.to(tl.pointer_type(tl.int32), bitcast=True) + row * two + col // 2
    local = (8 * tl.arange(0, R // 8))[:, None] * two + tl.arange(0, C // 2)[None, :]
    for j in tl.static_range(8):
        words = with_one(words, tl.load(to + j * two + local))
    sixth, eight, usual = 1.0, 1.0, True
    if FAMILY == "nvfp4":
        sixth, eight, usual = tl.load(found + 1), tl.load(found + 2), tl.load(found + 3) > 0
    if usual:
        rows8, cols8 = tl.multiple_of(rows // 8, R // 8), tl.multiple_of(cols // 8, C // 8)
        row_blocks, col_blocks = rows8 // (BLOCK // 8), cols8 // (BLOCK // 8)
        _tile(
            words, row_codes + row * (cols8 * 4) + col // 2,
            row_scales + row * col_blocks + col // BLOCK,
            col_codes + col * (rows8 * 4) + row // 2,
            col_scales + col * row_blocks + row // BLOCK, rows8, cols8, row_blocks, col_blocks,
            sixth, eight, FAMILY, R, C, EMAX, UP_FROM, LEAST,
        )
    else:
        unit_tile(
            across, down, x, row_codes, row_scales, col_codes, col_scales, rows, cols, stride,
            FAMILY, 4, False, True, True, True, True, R, C, 1, 0, 0, 0, True, 0, 0, -1, 0, 0, False,
            found, row_whole, col_whole,
        )
