"""What stands between the products of a step of one token on a GPU, a kernel each, for every
precision alike: in place of a dozen small ones of torch that a token waits for one after the other.

Where a GPU can (EARLY), a kernel starts while the one before it ends, and lets the next one start,
which asks for its weights then: programmatic dependent launch. Letters as in decoder.py."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HALVES = 16, 128  # of half a head: what tensor cores multiply, and what has room
LOG2_E = 1.4426950408889634
# Programs that an attention of few sequences is cut into, and places that each has at least.
MOST_PROGRAMS, LEAST_PLACES = 128, 256


@triton.jit
def _add_norm(x, more, weight, total, z, width, eps, HAS_MORE: tl.constexpr, BLOCK: tl.constexpr,
              EARLY: tl.constexpr):  # fmt: skip
    each = tl.arange(0, BLOCK)
    there = each < width
    at = tl.program_id(0).to(tl.int64) * width + each
    gains = tl.load(weight + each, there, 0.0)
    if EARLY:
        gdc_wait()
    value = tl.load(x + at, there, 0.0)
    if HAS_MORE:
        added = tl.load(more + at, there, 0.0).to(tl.float32)
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(total + at, value, there)
    if EARLY:
        gdc_launch_dependents()
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(z + at, (wide * gains.to(tl.float32)).to(value.dtype), there)


@triton.jit
def _gated(h, out, inner, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, each = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = each < inner
    gate = tl.load(h + row * 2 * inner + each, there, 0.0)
    up = tl.load(h + row * 2 * inner + inner + each, there, 0.0)
    wide = gate.to(tl.float32)
    act = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * inner + each, (act * up.to(tl.float32)).to(gate.dtype), there)


@triton.jit
def _turned(x, at, cos, sin, HALF: tl.constexpr, there):
    one = tl.load(x + at, there, 0.0).to(tl.float32)
    two = tl.load(x + at + HALF, there, 0.0).to(tl.float32)
    first, second = one * cos - two * sin, two * cos + one * sin
    return first.to(x.dtype.element_ty), second.to(x.dtype.element_ty)


@triton.jit
def _attend(qkv, tables, position, cache, out, sums, done, scale, table_width, sin_at, places,
            to_values, PAIRS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
            HALF: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    """A program has the queries of a pair of key and value heads in one sequence: it turns them and
    the new key, keeps that and the new value, and looks at those of a part of the places so far.
    Whoever is the last of the parts adds up what all found, by way of `sums`."""
    b, pair = (tl.program_id(0) // PAIRS).to(tl.int64), tl.program_id(0) % PAIRS
    WIDTH: tl.constexpr = 2 * HALF
    half, whole, g = tl.arange(0, HALF), tl.arange(0, WIDTH), tl.arange(0, ROWS)
    if EARLY:
        gdc_wait()
    at = tl.load(position).to(tl.int32)
    cos = tl.load(tables + at.to(tl.int64) * table_width + half).to(tl.float32)
    sin = tl.load(tables + at.to(tl.int64) * table_width + sin_at + HALF + half).to(tl.float32)
    row = qkv + b * PAIRS * (GROUP + 2) * WIDTH
    own = (g < GROUP)[:, None]
    q_at = (pair * GROUP + g)[:, None] * WIDTH + half[None, :]
    q1, q2 = _turned(row, q_at, cos[None, :], sin[None, :], HALF, own)
    k1, k2 = _turned(row, (PAIRS * GROUP + pair) * WIDTH + half, cos, sin, HALF, half >= 0)
    value = tl.load(row + (PAIRS * (GROUP + 1) + pair) * WIDTH + whole)
    keys = cache + (b * PAIRS + pair) * places * WIDTH
    values = keys + to_values
    tl.store(keys + at * WIDTH + half, k1)
    tl.store(keys + at * WIDTH + HALF + half, k2)
    tl.store(values + at * WIDTH + whole, value)
    if EARLY:
        gdc_launch_dependents()
    most = scale * (tl.sum(q1.to(tl.float32) * k1.to(tl.float32)[None, :], 1)
                    + tl.sum(q2.to(tl.float32) * k2.to(tl.float32)[None, :], 1))  # fmt: skip
    total = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32) + value.to(tl.float32)[None, :]
    start, end = 0, at
    if PARTS > 1:
        part, size = tl.program_id(1), tl.cdiv(at, PARTS * BLOCK) * BLOCK
        start, end = part * size, tl.minimum(at, part * size + size)
        alone = part == 0  # has the new place
        most = tl.where(alone, most, float("-inf"))
        total, mixed = tl.where(alone, total, 0.0), tl.where(alone, mixed, 0.0)
    for first in range(start, end, BLOCK):
        n = first + tl.arange(0, BLOCK)
        there = (n < at)[:, None]
        k_at = keys + n[:, None] * WIDTH + half[None, :]
        one, two = tl.load(k_at, there, 0.0), tl.load(k_at + HALF, there, 0.0)
        scores = tl.dot(q1, tl.trans(one), tl.dot(q2, tl.trans(two))) * scale
        scores = tl.where((n < at)[None, :], scores, float("-inf"))
        more = tl.maximum(most, tl.max(scores, 1))
        weights, keep = tl.exp2(scores - more[:, None]), tl.exp2(most - more)
        looked = tl.load(values + n[:, None] * WIDTH + whole[None, :], there, 0.0)
        total = total * keep + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(looked.dtype), looked, mixed * keep[:, None])
        most = more
    if PARTS > 1:
        own_sums = sums + tl.program_id(0).to(tl.int64) * PARTS * ROWS * (WIDTH + 2)
        at_sum = g[:, None] * WIDTH + whole[None, :]
        mine = own_sums + tl.program_id(1) * ROWS * (WIDTH + 2)
        tl.store(mine + at_sum, mixed)
        tl.store(mine + ROWS * WIDTH + g, most)
        tl.store(mine + ROWS * (WIDTH + 1) + g, total)
        tl.debug_barrier()
        if tl.atomic_add(done + tl.program_id(0), 1) < PARTS - 1:
            return
        tl.store(done + tl.program_id(0), 0)
        most = tl.full([ROWS], float("-inf"), tl.float32)
        total, mixed = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        for i in range(PARTS):
            that = own_sums + i * ROWS * (WIDTH + 2)
            its_most = tl.load(that + ROWS * WIDTH + g, cache_modifier=".cg")
            more = tl.maximum(most, its_most)
            keep, take = tl.exp2(most - more), tl.exp2(its_most - more)
            its = tl.load(that + ROWS * (WIDTH + 1) + g, cache_modifier=".cg")
            total = total * keep + its * take
            its_mixed = tl.load(that + at_sum, cache_modifier=".cg")
            mixed = mixed * keep[:, None] + its_mixed * take[:, None]
            most = more
    made = (mixed / total[:, None]).to(qkv.dtype.element_ty)
    to = out + b * PAIRS * GROUP * WIDTH + (pair * GROUP + g)[:, None] * WIDTH + whole[None, :]
    tl.store(to, made, own)


@triton.jit
def _choose(logits, token, tokens, position, vocabulary, places, BLOCK: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    which = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocabulary, BLOCK):
        n = first + tl.arange(0, BLOCK)
        some = tl.load(logits + b * vocabulary + n, n < vocabulary, float("-inf")).to(tl.float32)
        which = tl.where(some > most, n, which)
        most = tl.maximum(most, some)
    # The first of the largest.
    largest = tl.max(most, 0)
    chosen = tl.min(tl.where(most == largest, which, vocabulary), 0).to(tl.int64)
    tl.store(token + b, chosen)
    tl.store(tokens + b * places + tl.load(position), chosen)


def fit(width: int) -> bool:
    """Whether these kernels are for heads of a width."""
    half = width // 2
    return (
        torch.version.cuda is not None and HALVES[0] <= half <= HALVES[1] and half & (half - 1) == 0
    )


@functools.cache
def early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def add_norm(x: Tensor, more: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """x [.., D] + more, and its normalization."""
    width, soon = x.shape[-1], early(x.device)
    total, z = x if more is None else torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _add_norm[(x.numel() // width,)](
        x, more, norm.weight, total, z, width, norm.eps, more is not None, block, soon,
        num_warps=min(max(block // 512, 1), 16), launch_pdl=soon,
    )  # fmt: skip
    return total, z


def gated(h: Tensor) -> Tensor:
    """[.., 2F] -> [.., F]."""
    inner, soon, block = h.shape[-1] // 2, early(h.device), 1024
    out = h.new_empty((*h.shape[:-1], inner))
    grid = h.numel() // h.shape[-1], triton.cdiv(inner, block)
    _gated[grid](h, out, inner, block, soon, num_warps=4, launch_pdl=soon)
    return out


@functools.cache
def zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def steps_of(programs: int) -> tuple[int, int, int]:
    """Places of a step of an attention, its warps, and steps on their way, as measured on an H200:
    few programs are over sooner in large steps, of small ones more have room at once."""
    return (64, 4, 3) if programs < 512 else (32, 2, 2)


def attend(qkv: Tensor, at: Any, cache: Tensor, group: int) -> Tensor:
    """[B, 1, (H+2P)*E] -> [B, 1, H*E]; keys and values go into the cache [2, B, P, S, E]."""
    (_, b, pairs, places, width), soon = cache.shape, early(qkv.device)
    heads, count = group * pairs, b * pairs
    rows = max(triton.next_power_of_2(group), 16)
    parts = max(min(MOST_PROGRAMS // count, places // LEAST_PLACES), 1)
    parts = 1 << (parts.bit_length() - 1)
    out = qkv.new_empty((b, 1, heads * width))
    sums = qkv.new_empty(
        (count, parts, rows * (width + 2)) if parts > 1 else 0, dtype=torch.float32
    )
    block, warps, stages = steps_of(count * parts)
    _attend[(count, parts)](
        qkv, at.tables, at.positions, cache, out, sums, zeros(count, qkv.device),
        width**-0.5 * LOG2_E, at.tables.shape[1], (heads + 2 * pairs) * width, places,
        cache.stride(0), pairs, group, rows, width // 2, block, parts, soon, num_warps=warps,
        num_stages=stages, launch_pdl=soon,
    )  # fmt: skip
    return out


def choose(logits: Tensor, token: Tensor, tokens: Tensor, position: Tensor) -> None:
    """The likeliest of logits [B, 1, vocabulary] becomes token [B, 1], and that of all tokens
    [B, S] at a position [1]."""
    count, soon = logits.shape[-1], early(logits.device)
    block = min(max(triton.next_power_of_2(count), 32), 16384)
    _choose[(len(logits),)](
        logits, token, tokens, position, count, tokens.shape[1], block, soon,
        num_warps=min(max(block // 512, 1), 32), launch_pdl=soon,
    )  # fmt: skip
