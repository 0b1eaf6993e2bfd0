"""MXFP4: GEMMs with codes of four bits on both sides or one, and a training step of a layer with
gradients in MXFP8. The peer multiplies the same sizes in bf16."""

from collections.abc import Iterator

import torch
from torch import Tensor

import te_mx
from benchmarks import bench_linear
from benchmarks.bench_gemm import CUBES, FPROP, QUICK
from benchmarks.context import Context, randn
from benchmarks.row import Row
from benchmarks.timing import interleaved
from te_mx.recipe import BlockScaling

PAIRS = (("mxfp4", "mxfp4"), ("mxfp4", "mxfp8_e4m3"))  # weights, inputs


def gemm(context: Context) -> Iterator[Row]:
    """Quantized operands to bf16; packed forms are those of the first use."""
    for formats in PAIRS:
        for shape in context.pick(CUBES, QUICK):
            yield _row(context, formats, shape)


def _row(context: Context, formats: tuple[str, str], shape: tuple[int, int, int]) -> Row:
    m, n, k = shape
    sets = context.sets(2 * (m * k + n * k))
    plain = [
        (randn(FPROP.a_shape(*shape), 2 * i), randn(FPROP.b_shape(*shape), 2 * i + 1))
        for i in range(sets)
    ]
    quantized = [
        tuple(te_mx.quantize(x, fmt=fmt) for x, fmt in zip(pair, formats, strict=True))
        for pair in plain
    ]

    def ours(i: int) -> Tensor:
        return te_mx.gemm(*quantized[i % sets], FPROP.layout).out

    def bf16(i: int) -> Tensor:
        return FPROP.bf16(*plain[i % sets])

    times = interleaved({"ours": ours, "bf16": bf16}, context.effort, warm_up=2 * sets)
    seconds = times.seconds("ours")
    rate, of_peak = context.compute(2 * m * n * k, seconds)
    names = "mxfp4 both" if formats[1] == "mxfp4" else "mxfp4 mxfp8"
    return Row(
        names, f"{m} {n} {k}", te_mx.explain(*quantized[0], FPROP.layout).kernel, seconds * 1e6,
        rate, of_peak, "F.linear bf16", times.ratio("bf16", "ours"),
        context.against_bf16(1.3, 2.0),
    )  # fmt: skip


def linear(context: Context) -> Iterator[Row]:
    """Forward and backward, weights quantized at every step."""
    torch.manual_seed(0)
    recipe = BlockScaling(x="mxfp4", w="mxfp4", g="mxfp8_e4m3")
    yield from bench_linear.training(context, "mxfp4 linear", recipe, must=1.3, aim=1.7)
