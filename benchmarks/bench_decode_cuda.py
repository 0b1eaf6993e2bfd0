"""Few tokens on a Hopper GPU: frozen te_mx.Linear, inputs quantized in the call, against cuBLAS in
bf16; in CUDA graphs, weights from HBM."""

from collections.abc import Iterator

import torch
from torch import nn

import te_mx
from benchmarks.gpu import GpuContext, warm_up
from benchmarks.row import Row, Target
from benchmarks.timing import Call, interleaved
from te_mx.recipe import BlockScaling
from te_mx.runtime.ran import LAST_RUN

SHAPES = [  # K, N
    (6144, 2304),
    (2048, 6144),
    (6144, 1536),
    (1536, 6144),
    (4096, 14336),
    (14336, 4096),
    (7168, 4096),
]
TOKENS = (1, 2, 4, 8, 16, 32, 64)
FORMATS = {"mxfp8_e4m3": (Target(1.4, 2.0), Target(1.2, 1.6)), "mxfp4": (Target(1.8, 3.0), None)}
CALLS = 8  # of a graph, one after the other
COLD = 512 << 20  # weights, so that no cache holds those of 4 bits


def _graph(call: Call, sets: int, context: GpuContext) -> Call:
    """CALLS calls a graph, with weights that no cache holds; themselves without a GPU."""
    if context.device.type != "cuda":
        return call
    warm_up(call, sets)
    graphs, held = [], []
    for first in range(0, max(sets, CALLS), CALLS):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            held.append([call((first + i) % sets) for i in range(CALLS)])
    # The results live as long as the call does.
    return lambda i, held=held: graphs[i % len(graphs)].replay()


def decode(context: GpuContext) -> Iterator[Row]:
    """y = x @ w^T of bf16 x, without a bias."""
    for k, n in context.pick(SHAPES, [(96, 64)]):
        sets = 2 if context.quick else -(-COLD // (n * k) // CALLS) * CALLS + CALLS
        layers = {}
        for name in ("bf16", *FORMATS):
            kind = nn.Linear if name == "bf16" else te_mx.Linear
            layers[name] = [
                kind(k, n, bias=False, dtype=torch.bfloat16, device=context.device)
                for _ in range(sets)
            ]
        recipes = {w: BlockScaling(x="mxfp8_e4m3", w=w, g="mxfp8_e5m2") for w in FORMATS}
        for w, recipe in recipes.items():
            for layer in layers[w]:
                te_mx.freeze_weights(layer, drop_master=True, recipe=recipe)
        for m in context.pick(TOKENS, (2,)):
            x = context.randn(m, k, seed=m)
            calls: dict[str, Call] = {}
            for name, given in layers.items():
                recipe = recipes.get(name)

                def call(i: int, given=given, recipe=recipe, x=x) -> torch.Tensor:
                    with torch.no_grad(), te_mx.autocast(enabled=recipe is not None, recipe=recipe):
                        return given[i % len(given)](x)

                calls[name] = _graph(call, sets, context)
            times = interleaved(calls, context.effort, warm_up=3, clock=context.clock)
            each = CALLS if context.device.type == "cuda" else 1
            for w, targets in FORMATS.items():
                seconds = times.seconds(w) / each
                nbytes = n * k * (1 if w != "mxfp4" else 0.5) + n * k / 32
                kernel = LAST_RUN.get(layers[w][0]._tag, "")
                yield Row(
                    f"decode {w[:5]}", f"M{m} {n} {k}", kernel, seconds * 1e6,
                    *context.bandwidth(nbytes, seconds), "cuBLAS bf16 graph",
                    times.ratio("bf16", w), targets[m > 16],
                )  # fmt: skip
