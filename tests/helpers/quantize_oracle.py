"""Matrices that some plausible wrong quantizer gets wrong, and what numpy makes of them, from the
format's definition and nothing of te_mx."""

import numpy as np
from format_oracle import DTYPES, MAX, OF_ELEMENT
from oracles import quantize

__all__ = [
    "DTYPES", "KINDS", "MAX", "OF_ELEMENT", "adversarial", "column_sums", "dequantize", "quantize",
]  # fmt: skip


def column_sums(x: np.ndarray, group: int) -> np.ndarray:
    """fp32 sums over rows: rows one after the other within a group, then the groups."""
    total = np.zeros(x.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, x.shape[0], group):
            partial = np.zeros(x.shape[1], np.float32)
            for row in x[start : start + group]:
                partial = partial + row
            total = total + partial
    return total


def dequantize(codes: np.ndarray, byte: np.ndarray, fmt: str) -> np.ndarray:
    """float64 values of codes with one scale byte each."""
    values = codes.view(DTYPES[OF_ELEMENT[fmt]]).astype(np.float64)
    with np.errstate(all="ignore"):
        return np.where(byte == 255, np.nan, values * np.exp2(byte.astype(np.float64) - 127))


def adversarial(rng: np.random.Generator, rows: int, cols: int, kind: str) -> np.ndarray:
    """fp32 [rows, cols] that some plausible wrong kernel gets wrong."""
    x = rng.standard_normal((rows, cols))
    with np.errstate(all="ignore"):
        if kind == "row_scales":
            x *= np.exp2(rng.integers(-155, 128, (rows, 1)))
        elif kind == "column_scales":
            x *= np.exp2(rng.integers(-155, 128, (1, cols)))
        elif kind == "outlier_columns":
            x *= np.where(rng.random((1, cols)) < 0.1, 1e30, 1e-3)
        elif kind == "nonfinite":
            x[rng.random((rows, cols)) < 0.01] = rng.choice([np.nan, np.inf, -np.inf])
        elif kind == "bits":
            bits = rng.integers(0, 2**32, (rows, cols), dtype=np.uint64).astype(np.uint32)
            return bits.view(np.float32)
        elif kind == "zeros":
            x = np.where(rng.random((rows, cols)) < 0.95, -0.0, x)
            x[: rows // 2] = 0
        elif kind == "ties":
            x = rng.integers(-63, 64, (rows, cols)) * np.exp2(rng.integers(-24, 3, (rows, cols)))
        elif kind == "denormals":
            x *= np.exp2(rng.choice([-24, -128, -133, -140, -149]))
        return x.astype(np.float32)


KINDS = (
    "normal", "row_scales", "column_scales", "outlier_columns", "nonfinite", "bits", "zeros",
    "ties", "denormals",
)  # fmt: skip
