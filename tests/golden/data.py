"""Numbers for the golden digests: the same bits on every machine and with every torch.

They come from PCG64 as integers, and become floats by arithmetic that rounds the same everywhere.
"""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
import torch
from torch import Tensor

KINDS = ("plain", "outliers", "powers", "tiny", "broken")


def numbers(key: str, *shape: int) -> np.ndarray:
    """fp64 numbers that look normal: sums of twelve uniform ones."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))
    parts = rng.integers(0, 1 << 16, size=(12, *shape), dtype=np.int64)
    return (parts.sum(0) - 6 * (1 << 16)) / float(1 << 16)


@cache
def matrix(key: str, rows: int, cols: int, kind: str = "plain") -> Tensor:
    """fp32 [rows, cols], not to be written to. "outliers": some columns are 2^7 larger; "powers":
    every row has a power of two of its own; "tiny": blocks of zeros and of subnormals; "broken":
    NaN and infinities here and there.
    """
    x = numbers(f"{key} {kind}", rows, cols)
    if kind == "outliers":
        x[:, ::17] *= 128.0
    elif kind == "powers":
        x *= 2.0 ** ((np.arange(rows) * 37) % 61 - 30)[:, None]
    elif kind == "tiny":
        x[::5] = 0.0
        x[1::5] *= 2.0**-139
    elif kind == "broken":
        flat = x.reshape(-1)
        flat[::211], flat[7::389], flat[11::401] = np.nan, np.inf, -np.inf
    return torch.from_numpy(x.astype(np.float32))


@cache
def vector(key: str, size: int) -> Tensor:
    return torch.from_numpy(numbers(key, size).astype(np.float32))
