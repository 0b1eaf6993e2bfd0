"""What precision "invariant" costs on a Hopper GPU, beside the default: forward of a te_mx.Linear
that trains, and few tokens of frozen ones; in CUDA graphs."""

from collections.abc import Iterator
from dataclasses import replace

import torch

import te_mx
from benchmarks.gpu import GpuContext, captured
from benchmarks.row import Row, Target
from benchmarks.timing import Effort, interleaved
from te_mx.recipe import Float8BlockScaling, MXFP8BlockScaling
from te_mx.runtime.kernel_log import LAST_RUN

TRAINING = [(8192, 4096, 4096), (16384, 14336, 4096), (8192, 4096, 14336)]  # M, N, K
FROZEN = [(4096, 4096), (6144, 4096), (1024, 4096), (28672, 4096), (4096, 14336)]  # N, K
TOKENS = (1, 2, 4, 8, 16, 32, 64)
RECIPES = {"mxfp8": MXFP8BlockScaling(), "fp8_block": Float8BlockScaling()}
FORWARD, FEW = Target(0.88, 0.95), Target(0.93, 1.0)
COLD = 160 << 20  # bytes of frozen weights, more than a cache holds


def invariant(context: GpuContext) -> Iterator[Row]:
    """y = x @ w^T of bf16 x, without a bias."""
    for name in RECIPES:
        for m, n, k in context.pick(TRAINING, [(96, 64, 64)]):
            yield _row(context, name, m, n, k, frozen=False)
        for n, k in context.pick(FROZEN, [(64, 96)]):
            for m in context.pick(TOKENS, (2,)):
                yield _row(context, name, m, n, k, frozen=True)


def _row(context: GpuContext, name: str, m: int, n: int, k: int, frozen: bool) -> Row:
    count = 2 if context.quick or not frozen else max(2, -(-COLD // (n * k)))
    x, calls, tag = context.randn(m, k, seed=m), {}, ""
    for precision in ("adaptive", "invariant"):
        recipe = replace(RECIPES[name], precision=precision)
        made = {"bias": False, "params_dtype": torch.bfloat16, "device": context.device}
        layers = [te_mx.Linear(k, n, **made) for _ in range(count)]
        for layer in layers if frozen else []:
            te_mx.freeze_weights(layer, drop_master=True, recipe=recipe)
        tag = layers[0]._tag

        def call(i: int, layers=layers, recipe=recipe) -> torch.Tensor:
            with torch.no_grad(), te_mx.autocast(recipe=recipe):
                return layers[i % len(layers)](x)

        calls[precision] = captured(call, count, context.device, count)
    effort = context.effort if context.quick else Effort(0.3, 5, 15, 2.0)
    times = interleaved(calls, effort, warm_up=2, clock=context.clock)
    each = count if context.device.type == "cuda" else 1
    seconds = times.seconds("invariant") / each
    return Row(
        f"invariant {'decode' if frozen else 'fwd'} {name}", f"M{m} {n} {k}", LAST_RUN.get(tag, ""),
        seconds * 1e6, *context.compute(2 * m * n * k, seconds), "the default, graph",
        times.ratio("adaptive", "invariant"), FEW if frozen else FORWARD,
        f"{times.seconds('adaptive') / each * 1e6:.1f} us",
    )  # fmt: skip
