"""Independent oracles in numpy, ml_dtypes and fp64: nothing here calls te_mx.

Shapes: x [rows, k]; codes [rows, k] and scales [rows, ceil(k/32)] as uint8, blocks along the last
dimension.
"""

from __future__ import annotations

import format_oracle
import numpy as np
import torch

# One kernel-independent constant for every backend: |d - exact| <= (C * k + 2) * 2^-24 * sum |a *
# b| + half an ulp.
C = 1


def numpy_of(x: torch.Tensor) -> np.ndarray:
    """fp32 numpy array with the values of a tensor."""
    return x.detach().to(torch.float32).cpu().numpy()


def quantize(x: np.ndarray, fmt: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of fp32 x [rows, k], blocks along the last dimension."""
    return format_oracle.quantize(x, format_oracle.OF_ELEMENT[fmt], rule)


def columnwise(x: np.ndarray, fmt: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes [rows, cols] and scales [ceil(rows/32), cols] of the plain columnwise form."""
    codes, scales = quantize(np.ascontiguousarray(x.T), fmt, rule)
    return np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)


def values(codes: np.ndarray, scales: np.ndarray, fmt: str) -> np.ndarray:
    """Exact fp64 values: code * 2^(byte-127), 255 is NaN."""
    return format_oracle.values(codes, scales, format_oracle.OF_ELEMENT[fmt])


def gelu(v: np.ndarray, form: str) -> np.ndarray:
    """GELU in fp64: v * Phi(v), or its tanh form."""
    if form == "erf":
        return 0.5 * v * (1 + _erf(v / np.sqrt(2)))
    return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))


def dgelu(v: np.ndarray, form: str) -> np.ndarray:
    """Derivative of GELU in fp64."""
    if form == "erf":
        return 0.5 * (1 + _erf(v / np.sqrt(2))) + v * np.exp(-0.5 * v * v) / np.sqrt(2 * np.pi)
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (v + 0.044715 * v**3))
    return 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * c * (1 + 3 * 0.044715 * v * v)


def _erf(v: np.ndarray) -> np.ndarray:
    return torch.special.erf(torch.from_numpy(np.ascontiguousarray(v))).numpy()


def half_ulp(v: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Half the distance between neighbours of dtype around |v|, subnormals included."""
    info = torch.finfo(dtype)
    bits = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}[dtype]
    exponent = np.floor(np.log2(np.maximum(np.abs(v), info.tiny)))
    # The rounded value may lie one binade above |v|; its neighbours below are the nearer ones.
    return np.exp2(exponent - bits - 1)


def gemm_bound(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What the fp32 accumulators of b @ a.T may be off, for exact fp64 values a [m, k] and b [n,
    k]. 2^-150 is half of fp32's smallest number: results below its normal range have fewer bits.
    """
    return (C * a.shape[1] + 2) * 2.0**-24 * (np.abs(b) @ np.abs(a).T) + 2.0**-150


def assert_gemm(
    out: torch.Tensor, a: np.ndarray, b: np.ndarray, exact: np.ndarray | None = None,
    slack: np.ndarray | float = 0.0,
) -> None:  # fmt: skip
    """Assert that out is b @ a.T within the bound; `exact` replaces the product, `slack` adds to
    the bound.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        exact = b @ a.T if exact is None else exact
        bound = gemm_bound(a, b) + slack
        got = out.detach().to(torch.float64).numpy()
        limit = torch.finfo(out.dtype).max
        # Above the largest number of the dtype only Inf or something within the bound is right.
        overflow = np.abs(exact) + bound > limit
        error = np.abs(got - exact)
        right = error <= bound + half_ulp(exact, out.dtype) * (1 + 2**-20)
        right |= overflow & (np.isinf(got) | (np.abs(got) >= limit * (1 - 2**-7)))
        right |= np.isnan(exact) & np.isnan(got)
    if not right.all():
        i, j = np.argwhere(~right)[0]
        raise AssertionError(
            f"{(~right).sum()} of {right.size} values are off; first at [{i}, {j}]: "
            f"got {got[i, j]!r}, "
            f"exact {exact[i, j]!r}, bound {bound[i, j]!r}, k {a.shape[1]}"
        )
