"""Into how many parts the adaptive GEMM of Hopper cuts K, where D has too few tiles for the GPU.

A cost model, so that the answer (and with it the order of sums) depends on the sizes and the GPU
alone. Its numbers were measured on an H200; docs/numerics.md says what cutting does to bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch

TILE = 128  # rows and columns of a block of D, and K of one step
MOST = 16  # parts

# Microseconds of one step of K of a block with so many rows.
STEP = {128: 0.45, 64: 0.45}
FINISH = 2.5  # microseconds of the kernel that adds the parts up, and
SUMS = 3e6  # bytes a microsecond of sums written and read
GAIN = 1.1  # what cutting must win, because the model is only that good


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
    steps, columns = -(-k // TILE), -(-m // TILE)
    whole = min(_main(-(-n // rows) * columns, steps, sms, step) for rows, step in STEP.items())
    least, made = whole / GAIN, 1
    for count in range(2, min(MOST, steps) + 1):
        blocks = -(-n // TILE) * columns * count
        time = _main(blocks, -(-steps // count), sms, STEP[TILE]) + FINISH
        time += 8 * count * n * m / SUMS
        if time < least:
            least, made = time, count
    return made


def _main(blocks: int, steps: int, sms: int, step: float) -> float:
    """Microseconds of the main kernel on so many blocks of so many steps."""
    return -(-blocks // sms) * steps * step
