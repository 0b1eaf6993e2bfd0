"""Few tokens the way a Hopper user gets them with block scales today: a Triton kernel around
tl.dot_scaled on the codes of a weight, MXFP8 or MXFP4, and those of inputs quantized before.

Imported only where Triton is. D[M, N] = x[M, K] @ w[N, K]^T; N and K must divide by the tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

DOES_NOT_FIT = OutOfResources
LEAST_ROWS = 16  # of a tile of tokens; those beyond M repeat others and are not written


class Config(NamedTuple):
    """Tiles of N and K, warps, stages; turned: the weight is the left side, which wgmma takes in 64
    rows, and tokens are the right one."""

    n: int
    k: int
    warps: int
    stages: int
    turned: bool


CONFIGS = (
    Config(32, 128, 4, 4, False),
    Config(32, 256, 4, 3, False),
    Config(64, 128, 4, 4, False),
    Config(64, 256, 4, 3, False),
    Config(128, 128, 8, 4, False),
    Config(64, 128, 4, 4, True),
    Config(64, 256, 4, 3, True),
    Config(128, 128, 8, 4, True),
)


@triton.jit(do_not_specialize=["M"])
def _kernel(
    x, x_scale, w, w_scale, out, M, N, K,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, KIND: tl.constexpr,
    PACK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    cols = (tl.program_id(0) * TN + tl.arange(0, TN)).to(tl.int64)
    tokens = tl.arange(0, TM)
    rows = (tokens % M).to(tl.int64)
    ks, packed, blocks = tl.arange(0, TK), tl.arange(0, TK // PACK), tl.arange(0, TK // 32)
    x_scale_at = x_scale + rows[:, None] * (K // 32) + blocks[None, :]
    w_scale_at = w_scale + cols[:, None] * (K // 32) + blocks[None, :]
    if TURNED:
        x_at = x + rows[None, :] * K + ks[:, None]
        w_at = w + cols[:, None] * (K // PACK) + packed[None, :]
        sums = tl.zeros((TN, TM), tl.float32)
    else:
        x_at = x + rows[:, None] * K + ks[None, :]
        w_at = w + cols[None, :] * (K // PACK) + packed[:, None]
        sums = tl.zeros((TM, TN), tl.float32)
    for _ in range(0, K, TK):
        x_codes, w_codes = tl.load(x_at), tl.load(w_at)
        x_scales, w_scales = tl.load(x_scale_at), tl.load(w_scale_at)
        if TURNED:
            sums = tl.dot_scaled(w_codes, w_scales, KIND, x_codes, x_scales, "e4m3", sums)
        else:
            sums = tl.dot_scaled(x_codes, x_scales, "e4m3", w_codes, w_scales, KIND, sums)
        x_at += TK
        w_at += TK // PACK
        x_scale_at += TK // 32
        w_scale_at += TK // 32
    if TURNED:
        at, there = out + tokens[None, :] * N + cols[:, None], tokens[None, :] < M
        tl.store(at, sums.to(tl.bfloat16), mask=there)
    else:
        at, there = out + tokens[:, None] * N + cols[None, :], tokens[:, None] < M
        tl.store(at, sums.to(tl.bfloat16), mask=there)


def takes(n: int, k: int, config: Config) -> bool:
    """Whether the tiles divide the weight."""
    return n % config.n == 0 and k % config.k == 0


def gemm(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, config: Config) -> Tensor:
    """Codes (E4M3 bytes; of w also E2M1, two a byte) and scale bytes to bf16 [M, N]."""
    (m, k), n = x.shape, w.shape[0]
    fp4 = w.shape[1] != k
    out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    e4m3 = torch.float8_e4m3fn
    _kernel[(n // config.n,)](
        x.view(e4m3), x_scale, w if fp4 else w.view(e4m3), w_scale, out, m, n, k,
        max(LEAST_ROWS, triton.next_power_of_2(m)), config.n, config.k,
        "e2m1" if fp4 else "e4m3", 2 if fp4 else 1, config.turned,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
