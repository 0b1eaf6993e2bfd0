"""Every format in numpy, ml_dtypes and fp64, from the contract and nothing of te_mx.

Shapes: x fp32 [rows, k]; codes one a byte [rows, k]; scales [rows, ceil(k/32)].
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

BLOCK = 32
DTYPES = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
}
MAX = {name: float(ml_dtypes.finfo(dtype).max) for name, dtype in DTYPES.items()}
EMAX = {name: int(np.log2(MAX[name])) for name in DTYPES}
BITS = {name: int(ml_dtypes.finfo(dtype).bits) for name, dtype in DTYPES.items()}
# Formats by the names of their elements.
OF_ELEMENT = {"e4m3": "mxfp8_e4m3", "e5m2": "mxfp8_e5m2", "e2m1": "mxfp4"}
NAN_CODE = {"mxfp8_e4m3": 0x7F, "mxfp8_e5m2": 0x7F}  # the others have none


def encode(x: np.ndarray, dtype: type) -> np.ndarray:
    """Codes of fp64 x, saturating."""
    top = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -top, top).astype(np.float32).astype(dtype).view(np.uint8)


def scale_bytes(amax: np.ndarray, name: str, rule: str) -> np.ndarray:
    """E8M0 bytes of the largest magnitudes (fp32) of blocks."""
    bad = ~np.isfinite(amax)
    wide = np.where(bad, 0, amax).astype(np.float64)
    if rule == "rceil":
        # The fp32 product by way of fp64, where it is exact and no mode flushes it.
        wide = (wide * np.float64(np.float32(1.0 / MAX[name]))).astype(np.float32)
        mantissa, exponent = np.frexp(wide.astype(np.float64))
        byte = exponent - (mantissa == 0.5) + 127
    else:
        mantissa, exponent = np.frexp(wide)  # mantissa in [0.5, 1)
        # One bit of mantissa: 1.75 and more become 2.
        exponent = exponent + (mantissa >= 0.875) if rule == "even" else exponent
        byte = exponent - 1 + 127 - EMAX[name]
    byte = np.where(wide == 0, 0, np.maximum(byte, 0))
    return np.where(bad, 255, byte).astype(np.uint8)


def quantize(x: np.ndarray, name: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes, not packed, and scales."""
    rows, k = x.shape
    codes = np.zeros((rows, k), np.uint8)
    scales = np.zeros((rows, -(-k // BLOCK)), np.uint8)
    for j in range(scales.shape[1]):
        columns = slice(j * BLOCK, (j + 1) * BLOCK)
        with np.errstate(all="ignore"):
            amax = np.abs(x[:, columns]).max(axis=1, initial=np.float32(0))
            scales[:, j] = scale_bytes(amax, name, rule)
            exact = x[:, columns].astype(np.float64) * np.exp2(127.0 - scales[:, j : j + 1])
            block = encode(np.nan_to_num(exact), DTYPES[name])
        bad = scales[:, j : j + 1] == 255
        codes[:, columns] = np.where(bad, NAN_CODE.get(name, 0), block)
    return codes, scales


def values(codes: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
    """Exact fp64 values of codes, not packed."""
    element = codes.view(DTYPES[name]).astype(np.float64)
    byte = np.repeat(scales, BLOCK, axis=1)[:, : codes.shape[1]].astype(np.float64)
    with np.errstate(all="ignore"):
        return np.where(byte == 255, np.nan, element * np.exp2(byte - 127))


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, k] as one stream of bits a row, low bits first."""
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    rows, k = codes.shape
    return np.packbits(stream.reshape(rows, k * bits), axis=-1, bitorder="little")
