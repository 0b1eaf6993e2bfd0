"""Steps that end in a quantizer, and the modules made of them, on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_mx
from benchmarks.bench_layernorm import Plain
from benchmarks.gpu import GpuContext
from benchmarks.row import Row, Target
from benchmarks.timing import interleaved
from benchmarks.training import training_step
from te_mx import _ops as ops
from te_mx._ops.fused import act_quantize_2d, norm_backward_2d, norm_quantize_2d
from te_mx.dispatch.fused import Activation, ActStep, Norm, NormStep
from te_mx.dispatch.fused import Target as Wanted
from te_mx.nn import activations

STEPS = [(16384, 4096), (16384, 14336)]  # tokens, columns
MODULES = [(16384, 4096, 14336)]  # tokens, hidden size, ffn hidden size
BF16 = torch.bfloat16
MX, LOW = "mxfp8_e4m3@sm90:8", "fp8_e4m3_1x128"
WANTED = {  # as the modules ask on Hopper under each recipe
    "MXFP8": Wanted(MX, MX, "rceil"),
    "Float8Block": Wanted(f"{LOW}@sm90_factors", f"{LOW}@sm90:8", "pow2"),
    "DeepSeekV3": Wanted(f"{LOW}@sm90_factors", f"{LOW}@sm90_factors", "fp32"),
}
NOT_SLOWER = Target(1.0, None)


class Case(NamedTuple):
    """A fused step and the same steps apart; bytes an element of the result: those that the fused
    step moves, and those that it saves."""

    name: str
    moved: int
    saved: int
    fused: Callable[[int], object]
    apart: Callable[[int], object]


def _apart(wanted: Wanted) -> Callable[..., ops.Quantized]:
    """The quantizer alone."""

    def quantized(z: Tensor, col_sum: bool = False) -> ops.Quantized:
        return ops.quantize_2d(z, wanted.row, wanted.col, rule=wanted.rule, col_sum=col_sum)

    return quantized


def steps(context: GpuContext) -> Iterator[Row]:
    """Each fused step against torch's function and the quantizer, and against a device copy."""
    for m, k in context.pick(STEPS, [(256, 384)]):
        for case in _all_cases(context, m, k):
            nbytes = case.moved * m * k
            source = torch.ones(nbytes // 2, dtype=torch.uint8, device=context.device)
            target = torch.zeros_like(source)  # a copy reads and writes its size
            times = interleaved(
                {
                    "ours": case.fused,
                    "apart": case.apart,
                    "copy": lambda i, to=target, of=source: to.copy_(of),
                },
                context.effort,
                clock=context.clock,
            )
            seconds = times.seconds("ours")
            ours = (case.name, f"{m} {k}", "sm90", seconds * 1e6)
            rate = context.bandwidth(nbytes, seconds)
            more = f"apart, {case.saved * m * k / 1e6:,.0f} MB more"
            yield Row(*ours, *rate, more, times.ratio("apart", "ours"), NOT_SLOWER)
            yield Row(*ours, *rate, "device copy of as many bytes", times.ratio("copy", "ours"))


def _all_cases(context: GpuContext, m: int, k: int) -> Iterator[Case]:
    for recipe, wanted in WANTED.items():
        for case in _cases(context, m, k, wanted):
            if recipe == "MXFP8":
                yield case
            elif "quant" in case.name:
                yield case._replace(name=f"{case.name} {recipe}")


def _cases(context: GpuContext, m: int, k: int, target: Wanted) -> Iterator[Case]:
    quantized = _apart(target)
    sets = context.sets(4 * m * k)
    hs = [context.randn(m, 2 * k, seed=i) for i in range(sets)]
    xs = [context.randn(m, k, seed=-1 - i) for i in range(sets)]
    weight = torch.ones(k, device=context.device)
    low = weight.to(BF16)
    layer, rms = Norm("LayerNorm", 1e-5), Norm("RMSNorm", 1e-5)
    silu, swiglu = Activation("silu"), Activation("swiglu")

    def x(i: int) -> Tensor:
        return xs[i % sets]

    def h(i: int) -> Tensor:
        return hs[i % sets]

    def norm(i: int, bias: Tensor | None, which: Norm) -> object:
        return norm_quantize_2d(NormStep(x(i), weight, bias, which, BF16, False, target))

    def act(of: Tensor, which: Activation, grad: Tensor | None = None) -> object:
        wanted = target if grad is None else target._replace(col_sum=True)
        return act_quantize_2d(ActStep(of, grad, which, BF16, False, wanted))

    yield Case(
        "layernorm+quant", 4, 4, lambda i: norm(i, weight, layer),
        lambda i: quantized(F.layer_norm(x(i), (k,), low, low)),
    )  # fmt: skip
    yield Case(
        "rmsnorm+quant", 4, 4, lambda i: norm(i, None, rms),
        lambda i: quantized(F.rms_norm(x(i), (k,), low, 1e-5)),
    )  # fmt: skip
    yield Case("silu+quant", 4, 4, lambda i: act(x(i), silu), lambda i: quantized(F.silu(x(i))))
    yield Case(
        "swiglu+quant", 6, 8, lambda i: act(h(i), swiglu),
        lambda i: quantized(activations.plain(h(i), swiglu)),
    )  # fmt: skip
    gate = _Backward(hs, xs, lambda t: activations.plain(t, swiglu))
    yield Case(
        "dswiglu+db+quant", 10, 8,
        lambda i: act(h(i), swiglu, x(i)),
        lambda i: quantized(gate.gradients(i)[0], True),
    )  # fmt: skip
    stats = norm_quantize_2d(NormStep(x(0), weight, weight, layer, BF16, False, target))
    rstd = stats.rstd
    assert rstd is not None
    scale = low.clone().requires_grad_(), low.clone().requires_grad_()
    plain = _Backward(xs, xs[1:] + xs[:1], lambda t: F.layer_norm(t, (k,), *scale), scale)
    yield Case(
        "layernorm bwd", 6, 4,
        lambda i: norm_backward_2d(x(i + 1), x(i), weight, stats.mean, rstd, BF16),
        plain.gradients,
    )  # fmt: skip


class _Backward:
    """torch's backward pass of a function alone: the forward passes ran before."""

    def __init__(
        self,
        xs: list[Tensor],
        grads: list[Tensor],
        function: Callable[[Tensor], Tensor],
        parameters: tuple[Tensor, ...] = (),
    ) -> None:
        self.inputs = [(x.detach().requires_grad_(), *parameters) for x in xs]
        self.outs = [function(x) for x, *_ in self.inputs]
        self.grads = grads

    def gradients(self, i: int) -> tuple[Tensor, ...]:
        i %= len(self.outs)
        return torch.autograd.grad(self.outs[i], self.inputs[i], self.grads[i], retain_graph=True)


def layernorm_mlp(context: GpuContext) -> Iterator[Row]:
    """Forward and backward with all gradients, weights quantized at every step, eager."""
    for shape in context.pick(MODULES, [(64, 64, 96)]):
        for activation in ("gelu", "swiglu"):
            yield from _layernorm_mlp(context, shape, activation)


def _layernorm_mlp(
    context: GpuContext, shape: tuple[int, int, int], activation: str
) -> Iterator[Row]:
    m, hidden, ffn = shape
    with context.device:
        layers: dict[str, nn.Module] = {
            "ours": te_mx.LayerNormMLP(hidden, ffn, activation=activation, dtype=BF16),
            "apart": Plain(hidden, ffn, activation, te_mx.Linear),
            "bf16": Plain(hidden, ffn, activation, nn.Linear),
        }
    sets = context.sets(4 * m * hidden)
    data = [
        (context.randn(m, hidden, seed=2 * i).requires_grad_(), context.randn(m, hidden, seed=i))
        for i in range(sets)
    ]

    with te_mx.autocast():
        times = interleaved(
            {name: training_step(layer, data) for name, layer in layers.items()},
            context.effort,
            clock=context.clock,
        )
    seconds = times.seconds("ours")
    rows = layers["ours"].fc1_weight.shape[0]  # type: ignore[union-attr,index]
    flops = 6 * m * hidden * (rows + ffn)
    kernel = te_mx.audit(layers["ours"])["(root).fc1"].fprop
    for peer, label in (
        ("bf16", "LayerNorm + nn.Linear bf16"),
        ("apart", "LayerNorm + te_mx.Linear"),
    ):
        yield Row(
            f"mlp {activation} f+b", f"{m} {hidden} {ffn}", kernel, seconds * 1e6,
            *context.compute(flops, seconds), label, times.ratio(peer, "ours"),
        )  # fmt: skip
