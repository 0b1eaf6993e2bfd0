"""Mixtures of experts at inference: one product of few tokens with the experts that they chose,
weights in four and in eight bits, against a loop of F.linear over the chosen experts."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import te_mx
from benchmarks.context import Context, randn
from benchmarks.row import Row, Target
from benchmarks.timing import interleaved

SHAPE = (32, 2880, 2880, 4)  # experts, N, K, top_k: gpt-oss
TOKENS = [1, 2, 4, 8]
FORMATS = ("mxfp4", "mxfp8_e4m3")
ROUTINGS = 8
BLOCK = 16


def decode(context: Context) -> Iterator[Row]:
    """bf16 tokens, quantized in the call, to bf16 rows of every slot; lists made before."""
    experts, n, k, top_k = context.pick([SHAPE], [(4, 64, 64, 2)])[0]
    plain = torch.stack([randn((n, k), i) for i in range(experts)])
    quantized = {fmt: te_mx.quantize(plain, fmt=fmt) for fmt in FORMATS}
    for tokens in context.pick(TOKENS, [1]):
        x, routings = randn((tokens, k), 99), routings_of(experts, tokens, top_k)
        lists = [te_mx.moe.align_block_size(ids, BLOCK, experts) for ids in routings]

        def loop(i: int, x=x, routings=routings) -> Tensor:
            ids = routings[i % ROUTINGS]
            out = torch.empty(ids.numel(), n, dtype=x.dtype, device="cpu")
            for expert in ids.unique().tolist():
                token, slot = torch.where(ids == expert)
                out[token * top_k + slot] = F.linear(x[token], plain[expert])
            return out

        calls = {"bf16": loop}
        for fmt, w in quantized.items():

            def ours(i: int, w=w, x=x, lists=lists) -> Tensor:
                return te_mx.moe.grouped_gemm(
                    x, w, *lists[i % ROUTINGS], top_k=top_k, block_m=BLOCK
                )

            calls[fmt] = ours
        times = interleaved(calls, context.effort, warm_up=ROUTINGS)
        hit = sum(len(ids.unique()) for ids in routings) / ROUTINGS
        for fmt, w in quantized.items():
            seconds = times.seconds(fmt)
            target = context.against_bf16(2.5, 3.4) if fmt == "mxfp4" else None
            yield Row(
                f"moe {fmt[:5]}", f"{tokens}x{top_k} {n} {k}", "moe_gemm", seconds * 1e6,
                *context.bandwidth(hit * w.nbytes / experts, seconds, context.machine.read_gbs),
                "loop of F.linear bf16", times.ratio("bf16", fmt), target,
            )  # fmt: skip


def routings_of(experts: int, tokens: int, top_k: int, device: str = "cpu") -> list[Tensor]:
    """topk_ids int32 [tokens, top_k], drawn evenly, a few of them."""
    generator = torch.Generator().manual_seed(tokens)
    draw = [torch.randperm(experts, generator=generator) for _ in range(ROUTINGS * tokens)]
    ids = torch.stack([one[:top_k] for one in draw]).view(ROUTINGS, tokens, top_k)
    return list(ids.to(torch.int32).to(device))


MUST = {"mxfp8_e4m3": Target(1.5, 2.0), "mxfp4": Target(2.0, 3.0)}  # on a GPU
