"""Groups of rows in Triton, whose ends lie on the device: int64 starts and ends [groups]."""

import triton
import triton.language as tl

from te_mx.backends.triton.kernels.encode import rounded
from te_mx.backends.triton.kernels.gemm import finish, multiply, rows_of, tile_of, whole_of


@triton.jit
def place_of(slot, starts, ends, groups, B: tl.constexpr, MOST: tl.constexpr):
    """(group, first row, start and end of the group) of a block of B rows. Blocks start anew with
    every group, at slot start // B + group; group -1, start and end 0 for slots of none."""
    g = tl.arange(0, MOST)
    start = tl.load(starts + g, mask=g < groups, other=0).to(tl.int32)
    end = tl.load(ends + g, mask=g < groups, other=0).to(tl.int32)
    first = start // B + g
    mine = (slot >= first) & (slot < first + tl.cdiv(end - start, B)) & (g < groups)
    row = tl.max(tl.where(mine, start + (slot - first) * B, 0), 0)
    start, end = tl.max(tl.where(mine, start, 0), 0), tl.max(tl.where(mine, end, 0), 0)
    return tl.max(tl.where(mine, g, -1), 0), row, start, end


@triton.jit
def gemm_rows(
    a, a_scales, b, b_scales, out, bias, starts, ends, groups, m, n, k,
    a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k, b_group, bs_group,
    MX: tl.constexpr, A: tl.constexpr, B: tl.constexpr, A_LOOSE: tl.constexpr,
    B_LOOSE: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, A_HEIGHT: tl.constexpr,
    B_HEIGHT: tl.constexpr, DECODED: tl.constexpr, EVEN: tl.constexpr, A_FIRST: tl.constexpr,
    B_FIRST: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr,
    a_whole=None, b_whole=None, by_rows=0, WHOLE: tl.constexpr = False,
):
    """Rows of each group times its weight, + its bias. m: slots of BM rows, times BM. WHOLE: sums
    times the tensor scales of the group, or of rows of a, and of its weight."""
    slot, across = tile_of(tl.program_id(0), m, n, BM, BN, GROUP)
    group, row, _, end = place_of(slot, starts, ends, groups, BM, MOST)
    if group >= 0:
        r, c = row + tl.arange(0, BM), across * BN + tl.arange(0, BN)
        which = group.to(tl.int64)
        total = multiply(
            a, a_scales, b + which * b_group, b_scales + which * bs_group,
            rows_of(r, end, A_FIRST), rows_of(c, n, B_FIRST), end, n, k, a_row, a_k, b_row, b_k,
            as_row, as_k, bs_row, bs_k, MX, A, B, A_LOOSE, B_LOOSE, A_BLOCK, B_BLOCK, A_HEIGHT,
            B_HEIGHT, DECODED, EVEN, BM, BN, BK,
        )
        if WHOLE:
            of_group = a_whole + which * (1 - by_rows)
            total *= whole_of(of_group, b_whole + which, r, end, by_rows)[:, None]
        finish(
            total, out, bias + which * n, out, out, r, c, end, n, BIAS, False, False, False, False,
            False,
        )


@triton.jit
def gemm_k(
    a, a_scales, b, b_scales, out, starts, ends, m, n,
    a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k,
    MX: tl.constexpr, A: tl.constexpr, B: tl.constexpr, A_LOOSE: tl.constexpr,
    B_LOOSE: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, A_HEIGHT: tl.constexpr,
    B_HEIGHT: tl.constexpr, DECODED: tl.constexpr, EVEN: tl.constexpr, A_FIRST: tl.constexpr,
    B_FIRST: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    a_whole=None, b_whole=None, by_rows=0, WHOLE: tl.constexpr = False,
):
    """The product of each group over its rows, which are k of both sides."""
    down, across = tile_of(tl.program_id(0), m, n, BM, BN, GROUP)
    group = tl.program_id(1)
    start, end = tl.load(starts + group), tl.load(ends + group)
    first = start // BLOCK + group
    r, c = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN)
    total = multiply(
        a + start * a_k, a_scales + first * as_k, b + start * b_k, b_scales + first * bs_k, r, c,
        m, n, (end - start).to(tl.int32), a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k, MX, A,
        B, A_LOOSE, B_LOOSE, A_BLOCK, B_BLOCK, A_HEIGHT, B_HEIGHT, DECODED, False, BM, BN, BK,
    )
    if WHOLE:
        of_group = a_whole + group * (1 - by_rows)
        total *= whole_of(of_group, b_whole + group, r, m, by_rows)[:, None]
    out += group.to(tl.int64) * m * n
    finish(total, out, out, out, out, r, c, m, n, False, False, False, False, False, ACCUMULATE)


@triton.jit
def gemm_routed(
    a, a_scales, b, b_scales, out, bias, weights, ids, experts, count, tokens, routed, blocks,
    positions, n, k, block_m, size, a_div, groups,
    a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k, b_group, bs_group,
    MX: tl.constexpr, A: tl.constexpr, B: tl.constexpr, A_LOOSE: tl.constexpr,
    B_LOOSE: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, A_HEIGHT: tl.constexpr,
    B_HEIGHT: tl.constexpr, DECODED: tl.constexpr, EVEN: tl.constexpr, A_FIRST: tl.constexpr,
    B_FIRST: tl.constexpr, LISTED: tl.constexpr, BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, a_whole=None, b_whole=None, by_rows=0, WHOLE: tl.constexpr = False,
):
    """Rows r of out, of the lists of dispatch/moe.py: (row r // a_div of a times the weight of
    their expert, + its bias) times weights[r]. A program for BM of the `size` rows of a block."""
    chunks = tl.cdiv(size, BM)
    down, across = tile_of(tl.program_id(0), blocks * chunks * BM, n, BM, BN, GROUP)
    block = down // chunks
    expert = tl.load(experts + block).to(tl.int64)
    there_is = (expert >= 0) & (expert < groups)
    if count is not None:  # else all rows are listed
        there_is &= block * block_m < tl.load(count)
    if there_is:
        inside = down % chunks * BM + tl.arange(0, BM)
        row, mine = block * size + inside, inside < size
        if LISTED:
            mine &= row < positions
            row = tl.load(ids + row, mask=mine, other=-1)
        mine &= (row >= 0) & (row < routed)
        r, c = tl.where(mine, row // a_div, tokens), across * BN + tl.arange(0, BN)
        total = multiply(
            a, a_scales, b + expert * b_group, b_scales + expert * bs_group,
            rows_of(r, tokens, A_FIRST), rows_of(c, n, B_FIRST), tokens, n, k, a_row, a_k, b_row,
            b_k, as_row, as_k, bs_row, bs_k, MX, A, B, A_LOOSE, B_LOOSE, A_BLOCK, B_BLOCK,
            A_HEIGHT, B_HEIGHT, DECODED, EVEN, BM, BN, BK,
        )
        if WHOLE:
            total *= whole_of(a_whole, b_whole + expert, r, tokens, by_rows)[:, None]
        if BIAS:
            total += tl.load(bias + expert * n + c, mask=c < n, other=0.0).to(tl.float32)[None, :]
        if WEIGHTED:
            total *= tl.load(weights + row, mask=mine, other=0.0)[:, None]
        at = out + row.to(tl.int64)[:, None] * n + c[None, :]
        there = mine[:, None] & (c < n)[None, :]
        tl.store(at, rounded(total, out.dtype.element_ty), mask=there)


@triton.jit
def count_slots(ids, counts, routed, C: tl.constexpr):
    """How many slots each expert has, a program each."""
    found = tl.zeros((C,), tl.int32)
    for first in range(0, routed, C):
        slot = first + tl.arange(0, C)
        expert = tl.load(ids + slot, mask=slot < routed, other=-1)
        found += (expert == tl.program_id(0)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(found, 0))


@triton.jit
def _fill(to, first, end, value, C: tl.constexpr):
    for start in range(first, end, C):
        at = start + tl.arange(0, C)
        tl.store(to + at, value, mask=at < end)


@triton.jit
def align_slots(
    ids, counts, expert_map, sorted_ids, expert_ids, count, routed, experts, block, positions,
    blocks, MAPPED: tl.constexpr, MOST: tl.constexpr, C: tl.constexpr,
):
    """The lists of dispatch/moe.py, a program for the blocks of an expert; the last fills what is
    behind them."""
    expert, g = tl.program_id(0), tl.arange(0, MOST)
    padded = tl.cdiv(tl.load(counts + g, mask=g < experts, other=0), block) * block
    first, total = tl.sum(tl.where(g < expert, padded, 0), 0), tl.sum(padded, 0)
    at = first
    for start in range(0, routed, C):
        slot = start + tl.arange(0, C)
        mine = tl.load(ids + slot, mask=slot < routed, other=-1) == expert
        one = mine.to(tl.int32)
        tl.store(sorted_ids + at + tl.cumsum(one, 0) - one, slot, mask=mine)
        at += tl.sum(one, 0)
    end = first + tl.sum(tl.where(g == expert, padded, 0), 0)
    _fill(sorted_ids, at, end, routed, C)
    owner = expert
    if MAPPED:
        owner = tl.load(expert_map + expert)
    _fill(expert_ids, first // block, end // block, owner, C)
    if expert == experts - 1:
        _fill(sorted_ids, total, positions, routed, C)
        _fill(expert_ids, total // block, blocks, -1, C)
        tl.store(count, total)
