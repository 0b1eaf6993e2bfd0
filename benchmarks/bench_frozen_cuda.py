"""Frozen te_mx.Linear on a Hopper GPU at the rows of prefill and of many sequences, codes alone:
inputs quantized in the call, against cuBLAS in bf16; in CUDA graphs, weights from HBM. Up to 64
rows: decode_cuda."""

from collections.abc import Iterator

import torch
from torch import nn

import te_mx
from benchmarks.bench_decode_cuda import RECIPES, call_of
from benchmarks.gpu import GpuContext, captured
from benchmarks.row import Row, Target
from benchmarks.timing import Effort, interleaved
from te_mx.runtime.kernel_log import LAST_RUN

SHAPES = [  # K, N
    (6144, 2304),
    (4096, 6144),
    (2048, 6144),
    (7168, 2112),
    (4096, 14336),
    (14336, 4096),
    (8192, 8192),
    (8192, 28672),
]
# Beside whole tiles of 128 rows what leaves most of one empty, or little.
ROWS = (65, 96, 128, 129, 192, 256, 384, 512, 1000, 2048)
# Of each shape: up to 128 rows, and more.
TARGETS = {"mxfp8": (Target(1.2, 1.8), Target(1.1, 1.7)), "mxfp4": (Target(1.0, 1.6),) * 2}
COLD = 160 << 20  # bytes of weights, more than a cache holds
CALLS = 6  # of a graph


def frozen(context: GpuContext) -> Iterator[Row]:
    """y = x @ w^T of bf16 x, without a bias."""
    for k, n in context.pick(SHAPES, [(96, 64)]):
        sets = 2 if context.quick else max(2, -(-COLD // (n * k)))
        made = {"bias": False, "dtype": torch.bfloat16, "device": context.device}
        layers = {"bf16": [nn.Linear(k, n, **made) for _ in range(sets)]}
        for name in TARGETS:
            layers[name] = [te_mx.Linear(k, n, **made) for _ in range(sets)]
            for layer in layers[name]:
                te_mx.freeze_weights(layer, drop_master=True, recipe=RECIPES[name])
        for m in context.pick(ROWS, (3,)):
            x = context.randn(m, k, seed=m)
            calls = {
                name: captured(call_of(given, name, x), sets, context.device, CALLS)
                for name, given in layers.items()
            }
            effort = context.effort if context.quick else Effort(0.15, 5, 15, 2.0)
            times = interleaved(calls, effort, warm_up=2, clock=context.clock)
            each = CALLS if context.device.type == "cuda" else 1
            for name, targets in TARGETS.items():
                seconds = times.seconds(name) / each
                yield Row(
                    f"frozen {name}", f"M{m} {n} {k}", LAST_RUN.get(layers[name][0]._tag, ""),
                    seconds * 1e6, *context.compute(2 * m * n * k, seconds), "cuBLAS bf16 graph",
                    times.ratio("bf16", name), targets[m > 128],
                )  # fmt: skip
