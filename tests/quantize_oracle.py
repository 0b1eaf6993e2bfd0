"""MX quantization in numpy and ml_dtypes, from the format's definition and nothing of te_mx."""

import ml_dtypes
import numpy as np

BLOCK = 32
MAX = {"e4m3": 448.0, "e5m2": 57344.0}
MAX_EXPONENT = {"e4m3": 8, "e5m2": 15}
CODE_DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def scale_bytes(amax: np.ndarray, fmt: str, rule: str) -> np.ndarray:
    """E8M0 bytes of finite block maxima (fp32)."""
    if rule == "floor":
        exponent = np.frexp(amax.astype(np.float64))[1] - 1
        return np.where(amax == 0, 0, np.maximum(exponent + 127 - MAX_EXPONENT[fmt], 0))
    # The fp32 product, through float64 where it is exact: numpy may flush fp32 subnormals.
    inverse = np.float64(np.float32(1) / np.float32(MAX[fmt]))
    bits = (amax.astype(np.float64) * inverse).astype(np.float32).view(np.uint32)
    exponent, mantissa = (bits >> 23).astype(int), bits & 0x7FFFFF
    return np.where(exponent == 0, mantissa > 0x400000, exponent + (mantissa != 0))


def quantize(x: np.ndarray, fmt: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [rows, cols] -> codes [rows, cols], scales [rows, ceil(cols/32)], blocks along cols."""
    rows, cols = x.shape
    blocks = -(-cols // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK), np.float32)
    padded[:, :cols] = x
    b = padded.reshape(rows, blocks, BLOCK)
    finite = np.isfinite(b)
    bad = ~finite.all(-1)
    byte = scale_bytes(np.abs(np.where(finite, b, 0)).max(-1), fmt, rule)
    with np.errstate(all="ignore"):
        y = np.where(finite, b, 0).astype(np.float64) * np.exp2(127.0 - byte)[..., None]
        y = np.clip(y, -MAX[fmt], MAX[fmt])
        codes = y.astype(np.float32).astype(CODE_DTYPE[fmt]).view(np.uint8)
    codes = np.where(bad[..., None], 0x7F, codes).astype(np.uint8)
    return codes.reshape(rows, -1)[:, :cols], np.where(bad, 255, byte).astype(np.uint8)


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
    values = codes.view(CODE_DTYPE[fmt]).astype(np.float64)
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
    "normal",
    "row_scales",
    "column_scales",
    "outlier_columns",
    "nonfinite",
    "bits",
    "zeros",
    "ties",
    "denormals",
)
