"""Linear layers: a training step of one, and decoding with weights that stand still."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_mx
from benchmarks.context import Context, randn
from benchmarks.row import Row, Target
from benchmarks.timing import interleaved
from te_mx.recipe import MXFP8BlockScaling, Recipe

TRAINING = [(2048, 2048, 2048), (4096, 4096, 1024)]  # tokens, out features, in features
THIN = [(8, 10, 28800), (8, 10, 4096), (8, 28800, 10)]  # classifier heads, LoRA
DECODE = [(4096, 4096), (14336, 4096)]  # out features, in features
DECODE_ROWS = [1, 2, 4, 8, 16]
AS_IS = {1: Target(2.2, 3.0), 4: Target(1.8, 3.0), 16: Target(1.1, 3.0), 64: Target(0.9, 1.5)}


def _pair(n: int, k: int, seed: int) -> tuple[nn.Linear, te_mx.Linear]:
    """A bf16 nn.Linear and a te_mx.Linear with the same parameters."""
    torch.manual_seed(seed)
    plain = nn.Linear(k, n, dtype=torch.bfloat16)
    ours = te_mx.Linear(k, n, dtype=torch.bfloat16)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def linear(context: Context) -> Iterator[Row]:
    """Forward and backward with all three gradients, weights quantized at every step."""
    yield from training(context, "linear fwd+bwd", MXFP8BlockScaling(), must=1.25, aim=1.8)


def thin(context: Context) -> Iterator[Row]:
    """The same of few rows and few features on one side."""
    target = Target(0.7, 1.0)
    for row in training(context, "thin fwd+bwd", MXFP8BlockScaling(), 0.7, 1.0, THIN):
        yield replace(row, target=target)


def training(
    context: Context, name: str, recipe: Recipe, must: float, aim: float,
    shapes: list[tuple[int, int, int]] = TRAINING,
) -> Iterator[Row]:  # fmt: skip
    """The same under a recipe."""
    for m, n, k in context.pick(shapes, [(64, 96, 32)]):
        sets = context.sets(2 * (m * k + n * k + m * n))
        plain, ours = _pair(n, k, 0)
        data = [(randn((m, k), i).requires_grad_(), randn((m, n), -1 - i)) for i in range(sets)]

        def step(layer: nn.Linear, i: int, data: list = data, sets: int = sets) -> None:
            x, grad = data[i % sets]
            x.grad = layer.weight.grad = layer.bias.grad = None
            layer(x).backward(grad)

        with te_mx.autocast(recipe=recipe):
            times = interleaved(
                {
                    "ours": lambda i, layer=ours, step=step: step(layer, i),
                    "bf16": lambda i, layer=plain, step=step: step(layer, i),
                },
                context.effort,
            )
        seconds = times.seconds("ours")
        rate, of_peak = context.compute(6 * m * n * k, seconds)
        yield Row(
            name, f"{m} {n} {k}", te_mx.audit(ours)["(root)"].fprop, seconds * 1e6,
            rate, of_peak, "nn.Linear bf16", times.ratio("bf16", "ours"),
            context.against_bf16(must, aim),
        )  # fmt: skip


def decode(context: Context) -> Iterator[Row]:
    """Forward of few tokens with te_mx.freeze_weights: reading the weight is what costs."""
    yield from _decode(context, "decode", DECODE, DECODE_ROWS)


def weights_only(context: Context) -> Iterator[Row]:
    """The same of inputs as they are on codes in MXFP4 and NVFP4, up to 64 rows."""
    for fmt, name in (("mxfp4", "weights only"), ("nvfp4", "weights only, NVFP4")):
        how = {"drop_master": True, "fmt": fmt, "activations": "bf16"}
        for row in _decode(context, name, DECODE[:1], list(AS_IS), **how):
            target = AS_IS.get(int(row.shape.split()[0]))
            yield row if target is None or "bf16" not in row.peer else replace(row, target=target)


def _decode(context: Context, name: str, shapes: list, rows: list, **how: Any) -> Iterator[Row]:
    for n, k in context.pick(shapes, [(96, 64)]):
        sets = context.sets(2 * n * k)
        pairs = [_pair(n, k, i) for i in range(sets)]
        for _, ours in pairs:
            te_mx.freeze_weights(ours, **how)
        fmt = how.get("fmt", "mxfp8")
        codes = [te_mx.quantize(plain.weight.detach(), fmt=fmt) for plain, _ in pairs]
        for m in context.pick(rows, [1, 3]):
            for row in _decode_rows(context, pairs, codes, m):
                yield replace(row, benchmark=name)


@torch.inference_mode()
def _measure_decode(context: Context, pairs: list, codes: list, m: int):
    k, sets = pairs[0][0].in_features, len(pairs)
    x = randn((m, k), 7)

    def dequantize(i: int) -> Tensor:
        plain = pairs[i % sets][0]
        return F.linear(x, codes[i % sets].dequantize(torch.bfloat16), plain.bias)

    with te_mx.autocast():
        return interleaved(
            {
                "ours": lambda i: pairs[i % sets][1](x),
                "bf16": lambda i: pairs[i % sets][0](x),
                "dequantize": dequantize,
            },
            context.effort,
            warm_up=sets,
        )


def _decode_rows(context: Context, pairs: list, codes: list, m: int) -> Iterator[Row]:
    plain, ours = pairs[0]
    n, k = plain.out_features, plain.in_features
    times = _measure_decode(context, pairs, codes, m)
    seconds = times.seconds("ours")
    rate, of_peak = context.bandwidth(codes[0].nbytes, seconds, context.machine.read_gbs)
    kernel = te_mx.audit(ours)["(root)"].fprop
    for peer, label, target in (
        ("bf16", "nn.Linear bf16", context.against_bf16(1.7, 1.95)),
        ("dequantize", "dequantize + F.linear", context.against_dequantize()),
    ):
        yield Row(
            "decode", f"{m} {n} {k}", kernel, seconds * 1e6, rate, of_peak, label,
            times.ratio(peer, "ours"), target,
        )  # fmt: skip
