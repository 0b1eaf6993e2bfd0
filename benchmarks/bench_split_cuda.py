"""GEMMs with few tiles and a long K on a Hopper GPU: K in parts against K in one piece and cuBLAS.

What Python costs would hide what is measured, so a call replays a CUDA graph of products, one for
each set of operands, packed before.
"""

from collections.abc import Iterator

import torch

import te_mx
from benchmarks.gpu import GpuContext, captured
from benchmarks.row import Row
from benchmarks.timing import interleaved
from te_mx import _ops as ops

# M, N, K: square, and few tokens on a layer of a model.
SPLIT = [
    (512, 512, 16384),
    (1024, 1024, 16384),
    (256, 4096, 16384),
    (128, 4096, 14336),
    (16, 4096, 14336),
    (256, 256, 8192),
]
QUICK = (32, 48, 256)


def split(context: GpuContext) -> Iterator[Row]:
    for shape in context.pick(SPLIT, [QUICK]):
        m, n, k = shape
        sets = context.sets(m * k + n * k)
        plain = [
            (context.randn(m, k, seed=2 * i), context.randn(n, k, seed=2 * i + 1))
            for i in range(sets)
        ]
        packed = [tuple(map(_packed, pair)) for pair in plain]

        def ours(mode: ops.Mode, packed: list = packed) -> None:
            for lhs, rhs in packed:
                ops.gemm_2d(lhs, rhs, out_dtype=torch.bfloat16, mode=mode)

        def bf16(plain: list = plain) -> None:
            for lhs, rhs in plain:
                torch.mm(lhs, rhs.t())

        calls = {
            "ours": captured(lambda i: ours(ops.Mode(split_k=True)), 1, context.device),
            "K in one piece": captured(lambda i: ours(ops.Mode()), 1, context.device),
            "cuBLAS bf16": captured(lambda i, work=bf16: work(), 1, context.device),
        }
        times = interleaved(calls, context.effort, clock=context.clock)
        seconds = times.seconds("ours") / sets
        said = te_mx.explain(m=n, n=m, k=k, device=context.device)
        for peer in list(calls)[1:]:
            yield Row(
                "gemm few tiles", f"{m} {n} {k}", f"{said.kernel} / {said.parts}", seconds * 1e6,
                *context.compute(2 * m * n * k, seconds), peer, times.ratio(peer, "ours"),
                peer_rate=f"{times.seconds(peer) / sets * 1e6:.1f} us",
            )  # fmt: skip


def _packed(x: torch.Tensor) -> ops.Operand:
    made = ops.quantize_2d(x, "mxfp8_e4m3@sm90:8").row
    assert made is not None
    return made
