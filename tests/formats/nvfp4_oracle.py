"""NVFP4 of four writers in numpy and ml_dtypes, from their definitions and nothing of te_mx."""

from __future__ import annotations

import ml_dtypes
import numpy as np

F32 = np.float32
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
VALUES = np.array([*E2M1, *(-np.array(E2M1))], F32)


def round_code(value: float) -> int:
    """The nearest of 0, .5, .. 6, of two the one with the even code; the sign bit is that of
    value."""
    distances = [abs(min(abs(float(value)), 6) - one) for one in E2M1]
    near = [code for code, one in enumerate(distances) if one == min(distances)]
    code = near[0] if len(near) == 1 or near[0] % 2 == 0 else near[1]
    return code + 8 * bool(np.signbit(value))


def to_e4m3(x: np.ndarray) -> np.ndarray:
    return np.minimum(x, F32(448)).astype(ml_dtypes.float8_e4m3fn)


def quantize(
    x: np.ndarray, rule: str, height: int = 1
) -> tuple[np.ndarray, np.ndarray, np.floating]:
    """Codes one a byte [rows, k], scale bytes and tensor scale of finite x [rows, k], fp32 or
    bf16."""
    narrow = x.dtype.type if rule == "compressed_tensors" else F32
    rows, k = x.shape
    shape = -(-rows // height), -(-k // 16)
    codes, scales = np.zeros((rows, k), np.uint8), np.zeros(shape, np.uint8)
    amax = np.abs(x).max(initial=narrow(0)).astype(narrow)
    top = F32(2688 if rule.startswith("te_4over6") is rule.endswith("_448") else 1536)
    with np.errstate(all="ignore"):
        if amax == 0:
            encode = whole = F32(1)
        elif rule.startswith("te"):
            encode = min(top / amax.astype(F32), np.finfo(F32).max)
            whole = F32(1) / encode
        elif rule == "compressed_tensors":
            inverse = (F32(1) / amax.astype(F32)).astype(narrow)
            encode = (inverse.astype(F32) * F32(2688)).astype(narrow).astype(F32)
            whole = F32(1) / encode
        else:
            whole = amax.astype(F32) / F32(2688)
        for i, j in np.ndindex(*shape):
            place = slice(i * height, (i + 1) * height), slice(j * 16, (j + 1) * 16)
            block = x[place]
            largest = np.abs(block).max().astype(F32)
            if rule.startswith("te_4over6"):
                found = []
                for factor in (F32(1.5), F32(1)):
                    scale = to_e4m3(largest / F32(6) * encode * factor)
                    by = min(F32(1) / (scale.astype(F32) * whole), np.finfo(F32).max)
                    scaled = block.astype(F32) * by
                    nearest = VALUES[np.vectorize(round_code, otypes=[np.uint8])(scaled)]
                    off = nearest * scale.astype(F32) * amax.astype(F32) / top - block.astype(F32)
                    error = off * off if "_mse" in rule else abs(off)
                    found.append((scale, scaled, in_order(error, height)))
                scale, scaled, _ = found[not found[0][2] < found[1][2]]
            elif rule == "te":
                scale = to_e4m3(largest * (encode * (F32(1) / F32(6))))
                by = min(F32(1) / (scale.astype(F32) * whole), np.finfo(F32).max)
                scaled = block.astype(F32) * by
            elif rule == "torchao":
                scale = to_e4m3(np.maximum(largest / F32(6) / whole, F32(2.0**-6)))
                scaled = block.astype(F32) * (F32(1) / whole / scale.astype(F32))
            elif rule == "modelopt":
                scale = to_e4m3(np.maximum(largest / (F32(6) * whole) or F32(1), F32(2.0**-9)))
                scaled = block.astype(F32) / (scale.astype(F32) * whole)
            else:
                sixth = (largest / F32(6)).astype(narrow).astype(F32)
                scale = to_e4m3(encode * sixth)
                scale = scale if scale.astype(F32) else to_e4m3(F32(0.125))
                scaled = block.astype(F32) / (scale.astype(F32) / encode)
            if rule in ("modelopt", "compressed_tensors"):
                scaled = np.where(scaled == 0, F32(0), scaled)
            scales[i, j] = scale.view(np.uint8)
            codes[place] = np.vectorize(round_code, otypes=[np.uint8])(scaled)
    return codes, scales, whole


def in_order(error: np.ndarray, height: int) -> np.floating:
    """The sum of a block, along k and then of halves of the rows, missing ones 0."""
    rows = [F32(0)] * height
    for i, row in enumerate(error):
        for one in row:
            rows[i] = F32(rows[i] + one)
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [F32(a + b) for a, b in zip(rows[:half], rows[half:], strict=True)]
    return rows[0]


def hadamard(x: np.ndarray) -> np.ndarray:
    """Transformer Engine's transform of 16 along k, of whole blocks, in fp64."""
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    matrix = np.array([[1.0]])
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    turned = x.astype(np.float64)
    for start in range(0, x.shape[1] // 16 * 16, 16):
        part = turned[:, start : start + 16]
        turned[:, start : start + 16] = part @ (np.diag(signs) @ matrix) / 4
    return turned


def values(codes: np.ndarray, scales: np.ndarray, height: int = 1) -> np.ndarray:
    """fp64 code * block scale."""
    wide = np.repeat(np.repeat(scales, height, 0)[: len(codes)], 16, 1)[:, : codes.shape[1]]
    return VALUES[codes].astype(np.float64) * wide.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
