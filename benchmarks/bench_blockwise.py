"""Blockwise FP8, DeepSeek-V3's recipe: GEMMs of quantized operands and a training step of a layer.

Scales are powers of two, Transformer Engine's default, or any fp32 numbers. The peer multiplies the
same sizes in bf16.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import te_mx
from benchmarks import bench_linear
from benchmarks.bench_gemm import CUBES, FPROP, QUICK, WGRAD, Pass
from benchmarks.context import Context, randn
from benchmarks.row import Row
from benchmarks.timing import interleaved
from te_mx.recipe import Float8BlockScaling

BLOCKS = {"TN": ("fp8_e4m3_128x128", "fp8_e4m3_1x128"), "NT": ("fp8_e4m3_1x128", "fp8_e4m3_1x128")}


def gemm(context: Context) -> Iterator[Row]:
    """Fprop, 1x128 * 128x128, and wgrad, 1x128 * 1x128."""
    for which in (FPROP, WGRAD):
        for rule in ("pow2", "fp32"):
            for shape in context.pick(CUBES, QUICK):
                yield _row(context, which, shape, rule)


def _row(context: Context, which: Pass, shape: tuple[int, int, int], rule: str) -> Row:
    m, n, k = shape
    sets = context.sets(2 * (m * k + n * k))
    plain = [
        (randn(which.a_shape(*shape), 2 * i), randn(which.b_shape(*shape), 2 * i + 1))
        for i in range(sets)
    ]
    quantized = [
        tuple(
            te_mx.quantize(
                x, fmt=fmt, rowwise=not columnwise, columnwise=columnwise, scale_rule=rule
            )
            for x, fmt, columnwise in zip(pair, BLOCKS[which.layout], which.columnwise, strict=True)
        )
        for pair in plain
    ]

    def ours(i: int) -> Tensor:
        return te_mx.gemm(*quantized[i % sets], which.layout).out

    def bf16(i: int) -> Tensor:
        return which.bf16(*plain[i % sets])

    times = interleaved({"ours": ours, "bf16": bf16}, context.effort, warm_up=2 * sets)
    seconds = times.seconds("ours")
    rate, of_peak = context.compute(2 * m * n * k, seconds)
    return Row(
        f"1x128 {which.layout} {rule}", f"{m} {n} {k}",
        te_mx.explain(*quantized[0], which.layout).kernel, seconds * 1e6, rate, of_peak,
        f"{'F.linear' if which is FPROP else 'torch.mm'} bf16", times.ratio("bf16", "ours"),
        context.against_bf16(1.3, 2.0),
    )  # fmt: skip


def linear(context: Context) -> Iterator[Row]:
    """Forward and backward under the recipe, weights quantized at every step."""
    torch.manual_seed(0)
    yield from bench_linear.training(
        context, "1x128 linear", Float8BlockScaling(), must=1.3, aim=1.7
    )
