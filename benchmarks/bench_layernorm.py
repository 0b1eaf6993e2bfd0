"""Modules with a normalization: training steps against plain layers and against te_mx.Linear after
plain layers, and the fused steps alone against the same steps one after the other."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_mx
from benchmarks.context import Context, randn
from benchmarks.row import Row
from benchmarks.timing import interleaved
from benchmarks.training import training_step
from te_mx._ops import quantize_2d
from te_mx._ops.fused import act_quantize_2d, norm_quantize_2d
from te_mx.dispatch.fused import Activation, ActStep, Norm, NormStep, Target
from te_mx.nn import activations

MODULES = [(2048, 1024, 4096)]  # tokens, hidden size, ffn hidden size
STEPS = [(2048, 1024), (4096, 4096)]  # tokens, columns
BF16 = torch.bfloat16
TARGET = Target("mxfp8_e4m3@rows", "mxfp8_e4m3@cols", "rceil")


class Plain(nn.Module):
    """A normalization, fc1, an activation and fc2 as layers of their own."""

    def __init__(self, hidden: int, ffn: int, activation: str, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.act = Activation(activation)
        self.norm = nn.LayerNorm(hidden, dtype=BF16)
        self.fc1 = linear(hidden, 2 * ffn if self.act.gated else ffn, dtype=BF16)
        self.fc2 = linear(ffn, hidden, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(activations.plain(self.fc1(self.norm(x)), self.act))


def layernorm_mlp(context: Context) -> Iterator[Row]:
    """Forward and backward with all gradients, weights quantized at every step."""
    for m, hidden, ffn in context.pick(MODULES, [(64, 64, 96)]):
        for activation in ("gelu", "swiglu"):
            layers = {
                "ours": te_mx.LayerNormMLP(hidden, ffn, activation=activation, dtype=BF16),
                "apart": Plain(hidden, ffn, activation, te_mx.Linear),
                "bf16": Plain(hidden, ffn, activation, nn.Linear),
            }
            sets = context.sets(4 * m * hidden)
            data = [
                (randn((m, hidden), i).requires_grad_(), randn((m, hidden), -1 - i))
                for i in range(sets)
            ]

            with te_mx.autocast():
                times = interleaved(
                    {name: training_step(layer, data) for name, layer in layers.items()},
                    context.effort,
                )
            seconds = times.seconds("ours")
            rows = layers["ours"].fc1_weight.shape[0]
            flops = 6 * m * hidden * (rows + ffn)
            rate, of_peak = context.compute(flops, seconds)
            kernel = te_mx.audit(layers["ours"])["(root).fc1"].fprop
            for peer, label in (
                ("bf16", "LayerNorm + nn.Linear bf16"),
                ("apart", "LayerNorm + te_mx.Linear"),
            ):
                yield Row(
                    f"mlp {activation} f+b", f"{m} {hidden} {ffn}", kernel, seconds * 1e6, rate,
                    of_peak, label, times.ratio(peer, "ours"),
                )  # fmt: skip


def _quantized(z: Tensor, col_sum: bool = False) -> None:
    quantize_2d(z, *TARGET[:2], rule="rceil", col_sum=col_sum)


def fused_steps(context: Context) -> Iterator[Row]:
    """Each fused step against torch's function and te_mx's quantizer, both directions."""
    for m, k in context.pick(STEPS, [(64, 96)]):
        yield from _fused_steps(context, m, k)


def _fused_steps(context: Context, m: int, k: int) -> Iterator[Row]:
    sets = context.sets(4 * m * k)
    xs = [randn((m, 2 * k), i) for i in range(sets)]
    grads = [randn((m, k), -1 - i) for i in range(sets)]
    weight = torch.ones(k)
    low = weight.to(BF16)
    swiglu, silu, sums = Activation("swiglu"), Activation("silu"), TARGET._replace(col_sum=True)

    def gradient(i: int) -> Tensor:
        h = xs[i % sets].detach().requires_grad_()
        (dh,) = torch.autograd.grad(activations.plain(h, swiglu), h, grads[i % sets])
        return dh

    layer, rms = Norm("LayerNorm", 1e-5), Norm("RMSNorm", 1e-5)
    # With the bytes that the fused step moves: what it reads, and codes of both directions. One
    # after the other also writes and reads what is quantized, 4 more an element.
    cases: list[tuple[str, int, Callable, Callable]] = [
        (
            "layernorm+quant", 4 * m * k,
            lambda i: norm_quantize_2d(
                NormStep(grads[i % sets], weight, weight, layer, BF16, False, TARGET)
            ),
            lambda i: _quantized(F.layer_norm(grads[i % sets], (k,), low, low)),
        ),
        (
            "rmsnorm+quant", 4 * m * k,
            lambda i: norm_quantize_2d(
                NormStep(grads[i % sets], weight, None, rms, BF16, False, TARGET)
            ),
            lambda i: _quantized(F.rms_norm(grads[i % sets], (k,), low, 1e-5)),
        ),
        (
            "silu+quant", 4 * m * k,
            lambda i: act_quantize_2d(
                ActStep(grads[i % sets], None, silu, BF16, False, TARGET)
            ),
            lambda i: _quantized(F.silu(grads[i % sets])),
        ),
        (
            "swiglu+quant", 6 * m * k,
            lambda i: act_quantize_2d(ActStep(xs[i % sets], None, swiglu, BF16, False, TARGET)),
            lambda i: _quantized(activations.plain(xs[i % sets], swiglu)),
        ),
        (
            "dswiglu+db+quant", 10 * m * k,
            lambda i: act_quantize_2d(
                ActStep(xs[i % sets], grads[i % sets], swiglu, BF16, False, sums)
            ),
            lambda i: _quantized(gradient(i), True),
        ),
    ]  # fmt: skip
    for name, nbytes, ours, apart in cases:
        times = interleaved({"ours": ours, "apart": apart}, context.effort)
        seconds = times.seconds("ours")
        limit = context.machine.copy_gbs
        rate, of_peak = context.bandwidth(nbytes, seconds, limit)
        yield Row(
            name, f"{m} {k}", "", seconds * 1e6, rate, of_peak,
            "one after the other", times.ratio("apart", "ours"),
        )  # fmt: skip
