"""Into how many parts the adaptive GEMM of Hopper cuts K, where D has too few tiles for the GPU.

A cost model, so that the answer (and with it the order of sums) depends on the sizes and the GPU
alone. docs/numerics.md says what cutting does to bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

MOST = 16  # parts
STEP = 128  # of K
# What cutting must win. Of 28 problems timed with up to 16 parts the model found the best number,
# or one within 1 %, for all but one, which it does not cut (10 % slower).
GAIN = 1.05


class Blocks(NamedTuple):
    """One configuration of csrc/sm90/gemm.cu, and how long it takes."""

    rows: int  # of D that its CTAs compute at once
    columns: int
    ctas: int
    us: float  # of one step of K


# Measured on an NVIDIA H200, 2026-11-22.
SMALL, LARGE = Blocks(64, 128, 1, 0.27), Blocks(128, 128, 1, 0.38)
WHOLE = (SMALL, LARGE, Blocks(192, 256, 2, 0.59), Blocks(256, 256, 2, 0.8))
LAUNCH = 3.0  # us of a kernel beside its steps
FINISH = 3.2  # us that the kernel which adds parts up takes longer than
SUMS = 4.1e6  # bytes a us of sums, written and read
OPERANDS = 4.8e6  # bytes a us of operands, at most
HIDDEN = 0.75  # of the shorter of two: reading operands, and the steps on them


def parts(index: int, n: int, m: int, k: int) -> int:
    """The parts of K of D[n, m] = b[n, k] @ a[m, k]^T on a CUDA device; 1: K in one piece."""
    return best(n, m, k, multiprocessors(index))


@lru_cache(maxsize=64)
def multiprocessors(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@lru_cache(maxsize=4096)
def best(n: int, m: int, k: int, sms: int) -> int:
    """The number of parts that takes the least time on a GPU with so many multiprocessors."""
    least, made = min(_us(blocks, n, m, k, sms) for blocks in WHOLE) / GAIN, 1
    for count in range(2, min(MOST, _ceil(k, STEP)) + 1):
        us = cut_us(n, m, k, sms, count)
        if us < least:
            least, made = us, count
    return made


def cut_us(n: int, m: int, k: int, sms: int, count: int) -> float:
    """Microseconds with K in `count` parts, the sums of which are written and read."""
    blocks = SMALL if n <= SMALL.rows else LARGE  # as csrc/sm90/gemm.cu takes them
    return _us(blocks, n, m, k, sms, count) + FINISH + 8 * count * n * m / SUMS


def _us(blocks: Blocks, n: int, m: int, k: int, sms: int, count: int = 1) -> float:
    """Microseconds of the main kernel: of its steps, and of reading the operands meanwhile."""
    number = _ceil(n, blocks.rows) * _ceil(m, blocks.columns) * count
    waves = _ceil(number * blocks.ctas, sms)
    steps = _ceil(_ceil(k, STEP), count)
    shorter, longer = sorted((waves * steps * blocks.us, (n + m) * k / OPERANDS))
    return LAUNCH + longer + (1 - HIDDEN) * shorter


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
