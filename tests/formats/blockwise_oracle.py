"""Blockwise FP8 in numpy and ml_dtypes, from its definition and nothing of te_mx."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e4m3fnuz": 0x80, "e5m2fnuz": 0x80}
F32 = np.float32


def words(name: str) -> tuple[str, int, int]:
    """("e4m3", 1, 128) of "fp8_e4m3_1x128"."""
    found = re.fullmatch(r"fp8_(\w+)_(\d+)x(\d+)", name)
    assert found is not None
    return found[1], int(found[2]), int(found[3])


def spread(scales: np.ndarray, name: str, rows: int, k: int) -> np.ndarray:
    """The scale of every element [rows, k]."""
    _, height, width = words(name)
    return np.repeat(np.repeat(scales, height, 0), width, 1)[:rows, :k]


def factor(amax: np.ndarray, top: float, rule: str, epsilon: float) -> np.ndarray:
    """What x is multiplied by, fp32, of finite largest magnitudes."""
    amax = np.maximum(amax, F32(epsilon)).astype(np.float64)
    safe = np.where(amax == 0, 1.0, amax)
    # fp64 holds so many bits of a quotient of fp32 numbers that rounding it again is rounding once.
    made = np.minimum(F32(top).astype(np.float64) / safe, 2.0**126).astype(F32)
    if rule == "pow2":
        made = np.exp2(np.floor(np.log2(made.astype(np.float64)))).astype(F32)
    return np.where(amax == 0, F32(1), made)


def quantize(
    x: np.ndarray, name: str, rule: str, epsilon: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and fp32 scales of fp32 x [rows, k]."""
    element, height, width = words(name)
    (rows, k), dtype = x.shape, DTYPES[element]
    top = float(ml_dtypes.finfo(dtype).max)
    tall, wide = -(-rows // height), -(-k // width)
    blocks = np.zeros((tall * height, wide * width), F32)
    blocks[:rows, :k] = x
    blocks = blocks.reshape(tall, height, wide, width)
    finite = np.isfinite(blocks).all((1, 3), keepdims=True)
    blocks = np.where(finite, blocks, 0)
    by = factor(np.abs(blocks).max((1, 3), keepdims=True), top, rule, epsilon)
    exact = blocks.astype(np.float64) * by.astype(np.float64)  # 48 bits
    product = np.where(np.abs(exact) < 2.0**-126, 0 * exact, exact).astype(F32)
    codes = np.clip(product, -top, top).astype(dtype).view(np.uint8)
    codes = np.where(finite, codes, np.uint8(NAN_CODE[element]))
    scales = np.where(finite, F32(1) / by, F32(np.nan))
    return codes.reshape(tall * height, wide * width)[:rows, :k], scales.reshape(tall, wide)


def values(codes: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
    """Exact fp64 values."""
    element = codes.view(DTYPES[words(name)[0]]).astype(np.float64)
    with np.errstate(all="ignore"):
        return element * spread(scales, name, *codes.shape).astype(np.float64)
