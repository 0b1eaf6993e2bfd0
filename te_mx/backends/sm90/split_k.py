"""Into how many parts the adaptive GEMM of Hopper cuts K, where D has too few tiles for the GPU.

A cost model, so that the answer (and with it the order of sums) depends on the sizes and the GPU
alone: csrc/sm90/gemm/gemm_choice.cpp, beside the table of tiles that the kernels are chosen from.
docs/numerics.md says what cutting does to bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from te_mx.backends.cpu import binding as cpu


def parts(index: int, n: int, m: int, k: int) -> int:
    """The parts of K of D[n, m] = b[n, k] @ a[m, k]^T on a CUDA device; 1: K in one piece."""
    return best(n, m, k, multiprocessors(index))


@lru_cache(maxsize=4096)
def product_us(n: int, m: int, k: int, sms: int, parts: int) -> float:
    """Microseconds of the adaptive GEMM of packed operands with k in `parts`, by the model; 0
    without native code."""
    native = cpu.native()
    return 0.0 if native is None else float(native.sm90_product_us(n, m, k, sms, parts))


@lru_cache(maxsize=64)
def multiprocessors(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@lru_cache(maxsize=4096)
def best(n: int, m: int, k: int, sms: int) -> int:
    """The number of parts that takes the least time on a GPU with so many multiprocessors."""
    native = cpu.native()
    return 1 if native is None else native.sm90_gemm_parts(n, m, k, sms)
