"""Hypothesis strategies: shapes around every block and tile edge, and data that tells wrong scales
from right ones.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

FORMATS = st.sampled_from(["e4m3", "e5m2"])
RULES = st.sampled_from(["rceil", "floor"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
FORMS = st.sampled_from([None, "plain", "transposed"])
GELUS = st.sampled_from(["tanh", "erf"])
LAYOUTS = st.sampled_from(["TN", "NN", "NT"])
SEEDS = st.integers(0, 2**32 - 1)

# 0, 1 and 2; one off around the block of 32, the panel edges 16, 48, 64 and 128; primes.
SIZES = st.sampled_from(
    [0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 97, 127, 128, 129]
)
POSITIVE = SIZES.filter(lambda size: size > 0)

KINDS = (
    "normal",
    "outliers",  # channels 2^14 above the others: randn cannot tell rowwise from columnwise scales
    "row_scales",  # every row has its own power of two
    "block_scales",  # every block has
    "zeros",  # mostly zeros of both signs
    "tiny",  # fp32 subnormals and the smallest normal numbers
    "special",  # a few NaN and Inf cells
    "bits",  # random bit patterns, finite ones only
    "ties",  # half-way between codes
)
FINITE_KINDS = tuple(kind for kind in KINDS if kind != "special")


def array(kind: str, rows: int, cols: int, seed: int) -> np.ndarray:
    """fp32 [rows, cols] of one kind."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    if kind == "outliers":
        x[:, rng.random(cols) < 0.1] *= np.float32(2**14)
        x[rng.random(rows) < 0.1, :] *= np.float32(2**14)
    elif kind == "row_scales":
        x = np.ldexp(x, rng.integers(-60, 60, (rows, 1)).astype(np.int32))
    elif kind == "block_scales":
        scale = rng.integers(-30, 30, (rows, -(-cols // 32))).astype(np.int32)
        x = np.ldexp(x, np.repeat(scale, 32, axis=1)[:, :cols])
    elif kind == "zeros":
        x = np.where(rng.random((rows, cols)) < 0.9, np.copysign(np.float32(0), x), x)
    elif kind == "tiny":
        x = np.ldexp(x, rng.integers(-149, -118, (rows, cols)).astype(np.int32))
    elif kind == "special":
        special = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), (rows, cols))
        x = np.where(rng.random((rows, cols)) < 0.01, special, x)
    elif kind == "bits":
        x = rng.integers(0, 2**32, (rows, cols), dtype=np.uint32).view(np.float32)
        x = np.where(np.isfinite(x), x, np.float32(1))
    elif kind == "ties":
        x = np.ldexp(rng.integers(-31, 32, (rows, cols)).astype(np.float32), -4)
    return np.ascontiguousarray(x, dtype=np.float32)


def tensor(kind: str, rows: int, cols: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, cols] of one kind, rounded to dtype."""
    x = torch.from_numpy(array(kind, rows, cols, seed))
    if kind != "special":  # rounding to dtype must not make Inf
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


STRIDES = st.sampled_from(["compact", "transposed", "part", "every second"])


def as_strided(x: torch.Tensor, form: str) -> torch.Tensor:
    """A matrix of the same values that lies in memory as a form of STRIDES says."""
    if form == "transposed":
        return x.t().contiguous().t()
    if form == "part":
        return torch.nn.functional.pad(x, (3, 2))[:, 3:-2]
    return x.repeat_interleave(2, 1)[:, ::2] if form == "every second" else x


@st.composite
def matrices(
    draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, sizes: st.SearchStrategy[int] = SIZES
) -> torch.Tensor:
    """A matrix of any shape, dtype, kind and strides."""
    rows, cols = draw(sizes), draw(sizes)
    dtype, kind, seed = draw(DTYPES), draw(st.sampled_from(kinds)), draw(SEEDS)
    strides = draw(
        st.sampled_from(["contiguous", "transposed", "padded", "every_second", "expanded"])
    )
    if strides == "transposed":
        return tensor(kind, cols, rows, seed, dtype).t()
    if strides == "padded":
        return tensor(kind, rows + 1, cols + 3, seed, dtype)[1:, 2 : cols + 2]
    if strides == "every_second":
        return tensor(kind, 2 * rows, 2 * cols, seed, dtype)[::2, ::2]
    if strides == "expanded":
        return tensor(kind, 1, cols, seed, dtype).expand(rows, cols)
    return tensor(kind, rows, cols, seed, dtype)
