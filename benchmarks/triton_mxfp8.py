"""MXFP8 the way a Hopper user gets it today: a Triton kernel around tl.dot_scaled.

Imported only where Triton is. D[M, N] = lhs[M, K] @ rhs[N, K]^T; sizes must divide by the tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

DOES_NOT_FIT = OutOfResources


class Config(NamedTuple):
    m: int
    n: int
    k: int
    warps: int
    stages: int


CONFIGS = (
    Config(128, 128, 128, 8, 3),
    Config(128, 128, 64, 4, 3),
    Config(128, 128, 64, 8, 4),
    Config(128, 256, 64, 8, 3),
    Config(128, 128, 128, 4, 3),
    Config(128, 256, 128, 8, 2),
)


@triton.jit
def _kernel(
    lhs, lhs_scale, rhs, rhs_scale, out, M, N, K,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Tiles run through groups of GROUP rows of tiles, so that what they read stays in L2.
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, TM), tl.cdiv(N, TN)
    first = pid // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    inside = pid % (GROUP * tiles_n)
    rows = ((first + inside % height) * TM + tl.arange(0, TM)).to(tl.int64)
    cols = ((inside // height) * TN + tl.arange(0, TN)).to(tl.int64)
    ks = tl.arange(0, TK)
    blocks = tl.arange(0, TK // 32)

    lhs_at = lhs + rows[:, None] * K + ks[None, :]
    rhs_at = rhs + cols[None, :] * K + ks[:, None]
    lhs_scale_at = lhs_scale + rows[:, None] * (K // 32) + blocks[None, :]
    rhs_scale_at = rhs_scale + cols[:, None] * (K // 32) + blocks[None, :]
    sums = tl.zeros((TM, TN), tl.float32)
    for _ in range(0, K, TK):
        sums = tl.dot_scaled(
            tl.load(lhs_at), tl.load(lhs_scale_at), "e4m3",
            tl.load(rhs_at), tl.load(rhs_scale_at), "e4m3", sums,
        )  # fmt: skip
        lhs_at += TK
        rhs_at += TK
        lhs_scale_at += TK // 32
        rhs_scale_at += TK // 32
    tl.store(out + rows[:, None] * N + cols[None, :], sums.to(tl.bfloat16))


def gemm(lhs: Tensor, lhs_scale: Tensor, rhs: Tensor, rhs_scale: Tensor, config: Config) -> Tensor:
    """Codes and scale bytes (uint8) of both sides to bf16 [M, N]."""
    m, k = lhs.shape
    n = rhs.shape[0]
    if m % config.m or n % config.n or k % config.k:
        raise ValueError(f"{m} x {n} x {k} does not divide by the tile {config[:3]}")
    out = torch.empty((m, n), dtype=torch.bfloat16, device=lhs.device)
    grid = (m // config.m * (n // config.n),)
    codes = torch.float8_e4m3fn
    _kernel[grid](
        lhs.view(codes), lhs_scale, rhs.view(codes), rhs_scale, out, m, n, k,
        config.m, config.n, config.k, 8, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
