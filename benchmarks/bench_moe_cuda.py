"""The two products of a mixture on a Hopper GPU for few tokens, and whole mixtures for any number,
against torch's grouped_mm in bf16 on the same routing; in CUDA graphs, weights from HBM."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import te_mx
from benchmarks.bench_moe import MUST, ROUTINGS, routings_of
from benchmarks.gpu import GpuContext, captured
from benchmarks.row import Row, Target
from benchmarks.timing import interleaved

EXPERTS, TOP_K, BLOCK = 128, 4, 8
# N, K; the first product has a row of x a token and quantizes it in the call, the second one a row
# a slot, which the activation between them has quantized.
PRODUCTS = {"gemm1": (1536, 6144), "gemm2": (6144, 768)}
TOKENS = [1, 2, 4, 8, 16, 32, 64]
# Experts, top_k, hidden, inner; what a mixture must be for each number of tokens.
MIXTURES = [(64, 6, 2048, 1408), (128, 8, 4096, 1536), (32, 4, 2880, 2880)]
MUST_OF_MIXTURES = {
    "mxfp8_e4m3": {1: 2.5, 8: 2.4, 32: 2.2, 128: 1.8, 512: 1.5, 2048: 1.5, 8192: 1.5},
    "mxfp4": {1: 3.0, 8: 2.8, 32: 2.4, 128: 1.9, 512: 1.5, 2048: 1.5, 8192: 1.5},
    "nvfp4": dict.fromkeys((1, 8, 32, 128), 2.0),  # inputs as they are
}


def decode(context: GpuContext) -> Iterator[Row]:
    """The lists are made before; of bf16 the rows are sorted by expert before."""
    experts = context.pick([EXPERTS], [4])[0]
    for name, shape in PRODUCTS.items():
        n, k = context.pick([shape], [(64, 64)])[0]
        plain = context.randn(experts, n, k, seed=0)
        weights: dict[str, te_mx.MXTensor] = {f: te_mx.quantize(plain, fmt=f) for f in MUST}
        for tokens in context.pick(TOKENS, [2]):
            yield from _rows(context, name, plain, weights, tokens)


def _rows(
    context: GpuContext, name: str, plain: Tensor, weights: dict[str, te_mx.MXTensor], tokens: int
) -> Iterator[Row]:
    experts, n, k = plain.shape
    first = name == "gemm1"
    routings = routings_of(experts, tokens, TOP_K, str(context.device))
    lists = [te_mx.moe.align_block_size(ids, BLOCK, experts) for ids in routings]
    x = context.randn(tokens if first else tokens * TOP_K, k, seed=tokens)
    given = x if first else te_mx.quantize(x)
    rows = [ids.flatten().argsort() for ids in routings]
    tokens_of = [x[row // TOP_K] if first else x[row] for row in rows]
    ends = [
        torch.bincount(ids.flatten(), minlength=experts).cumsum(0).to(torch.int32)
        for ids in routings
    ]
    out = torch.zeros(tokens * TOP_K, n, dtype=torch.bfloat16, device=context.device)

    def bf16(i: int) -> Tensor:
        at = i % ROUTINGS
        if context.device.type != "cuda":
            return tokens_of[at] @ plain[0].t()
        return torch._grouped_mm(tokens_of[at], plain.transpose(1, 2), ends[at])

    calls = {"bf16": captured(bf16, ROUTINGS, context.device, ROUTINGS)}
    for fmt, w in weights.items():

        def ours(i: int, w=w) -> Tensor:
            return te_mx.moe.grouped_gemm(
                given, w, *lists[i % ROUTINGS], top_k=TOP_K, block_m=BLOCK, out=out,
                a_div=TOP_K if first else 1,
            )  # fmt: skip

        calls[fmt] = captured(ours, ROUTINGS, context.device, ROUTINGS)
    times = interleaved(calls, context.effort, warm_up=3, clock=context.clock)
    each = ROUTINGS if context.device.type == "cuda" else 1
    hit = sum(len(ids.unique()) for ids in routings) / ROUTINGS
    for fmt, target in MUST.items():
        seconds = times.seconds(fmt) / each
        nbytes = hit * weights[fmt].nbytes / experts
        yield Row(
            f"{name} {fmt[:5]}", f"{tokens}x{TOP_K} {n} {k}", "moe_gemm", seconds * 1e6,
            *context.bandwidth(nbytes, seconds), "grouped_mm bf16 graph",
            times.ratio("bf16", fmt), target, f"{times.seconds('bf16') / each * 1e6:.1f} us",
        )  # fmt: skip


def mixtures(context: GpuContext) -> Iterator[Row]:
    """te_mx.moe.fused_experts, lists included, on the weights as pack_experts leaves them, those of
    NVFP4 for tokens as they are; of bf16 the rows are sorted before."""
    for experts, top_k, hidden, inner in context.pick(MIXTURES, [(4, 2, 64, 64)]):
        plain = (
            context.randn(experts, 2 * inner, hidden, seed=0),
            context.randn(experts, hidden, inner, seed=1),
        )
        weights = {
            fmt: tuple(te_mx.moe.pack_experts(te_mx.quantize(one, fmt=fmt)) for one in plain)
            for fmt in MUST
        }
        weights["nvfp4"] = tuple(
            te_mx.moe.pack_experts(te_mx.quantize(one, fmt="nvfp4"), activations="bf16")
            for one in plain
        )
        for tokens in context.pick(list(MUST_OF_MIXTURES["mxfp4"]), [1]):
            yield from _mixture_rows(context, plain, weights, tokens, top_k)


def _mixture_rows(
    context: GpuContext, plain: tuple[Tensor, Tensor], weights: dict[str, tuple[Any, ...]],
    tokens: int, top_k: int,
) -> Iterator[Row]:  # fmt: skip
    experts, hidden, inner = plain[1].shape
    ids = routings_of(experts, tokens, top_k, str(context.device))[0]
    x = context.randn(tokens, hidden, seed=tokens)
    scores = torch.rand(tokens, top_k, device=context.device)
    order = ids.flatten().argsort(stable=True)
    rows, places = order // top_k, order.argsort()
    ends = torch.bincount(ids.flatten(), minlength=experts).cumsum(0).to(torch.int32)

    def product(a: Tensor, w: Tensor) -> Tensor:
        if context.device.type != "cuda":
            return a @ w[0].t()
        return torch._grouped_mm(a, w.transpose(1, 2), ends)

    def sorted_rows(i: int) -> Tensor:
        gate, up = product(x[rows], plain[0]).chunk(2, 1)
        y = product(F.silu(gate) * up, plain[1])[places].view(tokens, top_k, hidden)
        return (y * scores.unsqueeze(2).to(y.dtype)).sum(1)

    calls = {"bf16": captured(sorted_rows, 1, context.device, 1)}
    weights = {fmt: held for fmt, held in weights.items() if tokens in MUST_OF_MIXTURES[fmt]}
    for fmt, (w13, w2) in weights.items():

        def ours(i: int, w13=w13, w2=w2) -> Tensor:
            return te_mx.moe.fused_experts(x, w13, w2, scores, ids)

        calls[fmt] = captured(ours, 1, context.device, 1)
    times = interleaved(calls, context.effort, warm_up=3, clock=context.clock)
    hit = len(ids.unique())
    for fmt, held in weights.items():
        seconds, must = times.seconds(fmt), MUST_OF_MIXTURES[fmt][tokens]
        nbytes = hit * sum(one.nbytes for one in held) / experts
        yield Row(
            f"mixture {fmt[:5]}", f"{tokens}x{top_k} of {experts} {hidden} {inner}",
            "fused_experts", seconds * 1e6, *context.bandwidth(nbytes, seconds),
            "grouped_mm bf16 graph", times.ratio("bf16", fmt),
            Target(must, must + (0.5 if fmt == "nvfp4" else 0.3)),
            f"{times.seconds('bf16') * 1e6:.1f} us",
        )  # fmt: skip
