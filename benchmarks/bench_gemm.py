"""GEMMs on quantized operands: TN (forward), NN (input gradient), NT (weight gradient).

Letters are those of the problem D[M, N] = lhs[M, K] @ rhs[N, K]^T. The peer multiplies the same
sizes in bf16 the way a bf16 nn.Linear does in that pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import te_mx
from benchmarks.context import Context, randn
from benchmarks.row import Row
from benchmarks.timing import interleaved

CUBES = [(n, n, n) for n in (1024, 2048, 4096)]
QUICK = [(64, 96, 64)]


@dataclass(frozen=True)
class Pass:
    """One of the three GEMMs of a linear layer: how operands lie, and the bf16 code it replaces."""

    name: str
    layout: str
    a_shape: Callable[[int, int, int], tuple[int, int]]
    b_shape: Callable[[int, int, int], tuple[int, int]]
    bf16: Callable[[Tensor, Tensor], Tensor]  # of A and B
    columnwise: tuple[bool, bool]  # whether A and B are read columnwise


FPROP = Pass(
    "gemm TN", "TN", lambda m, n, k: (n, k), lambda m, n, k: (m, k),
    lambda a, b: F.linear(b, a), (False, False),
)  # fmt: skip
DGRAD = Pass(
    "dgrad NN", "NN", lambda m, n, k: (k, n), lambda m, n, k: (m, k),
    lambda a, b: b @ a, (True, False),
)  # fmt: skip
WGRAD = Pass(
    "wgrad NT", "NT", lambda m, n, k: (k, n), lambda m, n, k: (k, m),
    lambda a, b: b.t() @ a, (True, True),
)  # fmt: skip


def gemm(context: Context) -> Iterator[Row]:
    for shape in context.pick(CUBES, QUICK):
        yield from _rows(context, FPROP, shape, must=1.3, aim=2.0)


def backward_gemm(context: Context) -> Iterator[Row]:
    for which in (DGRAD, WGRAD):
        for shape in context.pick(CUBES, QUICK):
            yield from _rows(context, which, shape, must=1.2, aim=1.8)


def _quantize(x: Tensor, columnwise: bool) -> te_mx.MXTensor:
    return te_mx.quantize(x, rowwise=not columnwise, columnwise=columnwise)


def _rows(
    context: Context, which: Pass, shape: tuple[int, int, int], must: float, aim: float
) -> Iterator[Row]:
    m, n, k = shape
    sets = context.sets(2 * (m * k + n * k))
    plain = [
        (randn(which.a_shape(*shape), 2 * i), randn(which.b_shape(*shape), 2 * i + 1))
        for i in range(sets)
    ]
    quantized = [
        tuple(_quantize(x, c) for x, c in zip(pair, which.columnwise, strict=True))
        for pair in plain
    ]
    usages = tuple("columnwise" if c else "rowwise" for c in which.columnwise)

    def ours(i: int) -> Tensor:
        a, b = quantized[i % sets]
        return te_mx.gemm(a, b, which.layout).out

    def bf16(i: int) -> Tensor:
        return which.bf16(*plain[i % sets])

    def dequantize(i: int) -> Tensor:
        a, b = (
            x.dequantize(torch.bfloat16, u)
            for x, u in zip(quantized[i % sets], usages, strict=True)
        )
        return which.bf16(a, b)

    # Twice through all sets: an MXTensor keeps its packed form from the second use on.
    times = interleaved(
        {"ours": ours, "bf16": bf16, "dequantize": dequantize}, context.effort, warm_up=2 * sets
    )
    us = times.seconds("ours")
    rate, of_peak = context.compute(2 * m * n * k, us)
    kernel = te_mx.explain(*quantized[0], which.layout).kernel
    sizes = f"{m} {n} {k}"
    for peer, label, target in (
        (
            "bf16",
            "F.linear bf16" if which is FPROP else "torch.mm bf16",
            context.against_bf16(must, aim),
        ),
        ("dequantize", "dequantize + bf16", context.against_dequantize()),
    ):
        yield Row(
            which.name,
            sizes,
            kernel,
            us * 1e6,
            rate,
            of_peak,
            label,
            times.ratio(peer, "ours"),
            target,
        )
