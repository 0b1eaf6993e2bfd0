"""Linear layers, the quantizer and fixed costs on a Hopper GPU."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import te_mx
from benchmarks.gpu import GpuContext, warm_up
from benchmarks.row import Row, Target
from benchmarks.timing import Call, interleaved
from te_mx import _ops as ops
from te_mx._ops.quantize import parts_of

LINEAR = [  # tokens, out features, in features
    ((16384, 4096, 4096), Target(1.35, 1.6)),
    ((8192, 14336, 4096), Target(1.35, 1.6)),
    ((16384, 14336, 4096), Target(1.35, 1.6)),
    ((8192, 4096, 4096), Target(1.15, 1.4)),
]
SMALL = (1024, 1024, 1024)
QUICK = (64, 96, 128)
HOST = Target(0.40, 0.25, "ms", lower_is_better=True)
HOST_GEMM = Target(0.015, 0.012, "ms", lower_is_better=True)
GRAPH = Target(1.0, 1.2)
QUANTIZE = [(8192, 8192), (16384, 4096)]
QUANTIZE_TARGET = Target(0.80, 0.92)
WORKSPACE = [1024, 4096]


class Layer:
    """A layer with data to rotate through: `step(i)` is one forward and backward."""

    def __init__(
        self, context: GpuContext, kind: type[nn.Linear], shape: tuple[int, int, int], sets: int
    ):
        m, n, k = shape
        torch.manual_seed(0)  # the same parameters for every kind
        self.module = kind(k, n, device=context.device, dtype=torch.bfloat16)
        self.data = [
            (
                context.randn(m, k, seed=2 * i).requires_grad_(),
                context.randn(m, n, seed=2 * i + 1),
            )
            for i in range(sets)
        ]

    def step(self, i: int) -> None:
        x, grad = self.data[i % len(self.data)]
        x.grad = self.module.weight.grad = self.module.bias.grad = None
        self.module(x).backward(grad)

    @property
    def kernel(self) -> str:
        return te_mx.audit(self.module)["(root)"].fprop


def _layers(context: GpuContext, shape: tuple[int, int, int], sets: int) -> tuple[Layer, Layer]:
    return (
        Layer(context, te_mx.Linear, shape, sets),
        Layer(context, nn.Linear, shape, sets),
    )


def linear(context: GpuContext) -> Iterator[Row]:
    """Forward and backward with all three gradients, weights quantized at every step, eager."""
    for shape, target in context.pick(LINEAR, [(QUICK, Target(1.35, 1.6))]):
        m, n, k = shape
        ours, plain = _layers(context, shape, context.sets(2 * (m * k + n * k + m * n)))
        with te_mx.autocast():
            times = interleaved(
                {"ours": ours.step, "bf16": plain.step}, context.effort, clock=context.clock
            )
        seconds = times.seconds("ours")
        yield Row(
            "linear fwd+bwd", f"{m} {n} {k}", ours.kernel, seconds * 1e6,
            *context.compute(6 * m * n * k, seconds), "nn.Linear bf16",
            times.ratio("bf16", "ours"), target,
            context.compute(6 * m * n * k, times.seconds("bf16"))[0],
        )  # fmt: skip


def kept(context: GpuContext) -> Iterator[Row]:
    """What weights cost that backward quantizes again, beside columns kept from forward on."""
    recipes = {"again": None, "kept": te_mx.recipe.MXFP8BlockScaling(keep_weight_columns=True)}
    for shape, _ in context.pick(LINEAR, [(QUICK, Target(1.35, 1.6))]):
        m, n, k = shape
        layer = Layer(context, te_mx.Linear, shape, context.sets(2 * (m * k + n * k + m * n)))

        def step(i: int, layer: Layer = layer, recipe: object = None) -> None:
            with te_mx.autocast(recipe=recipe):
                layer.step(i)

        calls = {name: partial(step, recipe=recipe) for name, recipe in recipes.items()}
        times = interleaved(calls, context.effort, clock=context.clock)
        seconds = times.seconds("again")
        yield Row(
            "linear made again", f"{m} {n} {k}", layer.kernel, seconds * 1e6,
            *context.compute(6 * m * n * k, seconds), "keep_weight_columns=True",
            times.ratio("kept", "again"), None,
            context.compute(6 * m * n * k, times.seconds("kept"))[0],
        )  # fmt: skip


def host(context: GpuContext) -> Iterator[Row]:
    """Host time of a small forward and backward: until the calls return, not the GPU."""
    shape = context.pick([SMALL], [QUICK])[0]
    m, n, k = shape
    ours, plain = _layers(context, shape, 2)
    with te_mx.autocast():
        times = interleaved(
            {"ours": ours.step, "bf16": plain.step},
            context.effort,
            warm_up=20,
            clock=context.host_clock,
        )
    seconds = times.seconds("ours")
    yield Row(
        "host fwd+bwd", f"{m} {n} {k}", ours.kernel, seconds * 1e6, "", None,
        "beside nn.Linear bf16", seconds * 1e3, HOST, f"{times.seconds('bf16') * 1e3:.3f} ms",
    )  # fmt: skip


def host_gemm(context: GpuContext) -> Iterator[Row]:
    """Host time of te_mx.gemm on tensors that stand still, until the call returns."""
    m, n, k = context.pick([(128, 128, 128)], [QUICK])[0]
    a, b = context.randn(n, k, seed=1), context.randn(m, k, seed=2)
    A, B, a_t = te_mx.quantize(a), te_mx.quantize(b), a.t()
    calls: dict[str, Call] = {
        "ours": lambda i: te_mx.gemm(A, B),
        "bf16": lambda i: torch.mm(b, a_t),
    }
    times = interleaved(calls, context.effort, warm_up=20, clock=context.host_clock)
    seconds = times.seconds("ours")
    yield Row(
        "host gemm", f"{m} {n} {k}", te_mx.explain(A, B).kernel, seconds * 1e6, "", None,
        "beside torch.mm bf16", seconds * 1e3, HOST_GEMM, f"{times.seconds('bf16') * 1e3:.4f} ms",
    )  # fmt: skip


def graph(context: GpuContext) -> Iterator[Row]:
    """Forward and backward of a small layer as a CUDA graph, one graph for each set of data."""
    shape = context.pick([SMALL], [QUICK])[0]
    m, n, k = shape
    sets = context.pick([8], [2])[0]
    with te_mx.autocast():
        kinds = {"ours": te_mx.Linear, "bf16": nn.Linear}
        graphs = {
            name: [Captured(Layer(context, kind, shape, 1)) for _ in range(sets)]
            for name, kind in kinds.items()
        }
    calls: dict[str, Call] = {
        name: lambda i, made=made: made[i % sets].replay() for name, made in graphs.items()
    }
    times = interleaved(calls, context.effort, clock=context.clock)
    seconds = times.seconds("ours")
    kernel = te_mx.explain(m=n, n=m, k=k, device=context.device).kernel
    yield Row(
        "graph fwd+bwd", f"{m} {n} {k}", kernel, seconds * 1e6,
        *context.compute(6 * m * n * k, seconds), "nn.Linear bf16 graph",
        times.ratio("bf16", "ours"), GRAPH, f"{times.seconds('bf16') * 1e6:.1f} us",
    )  # fmt: skip


class Captured:
    """One step of a layer as a CUDA graph, with the memory that it works on."""

    def __init__(self, layer: Layer):
        self.layer = layer
        warm_up(layer.step, 3)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            layer.step(0)
        self.replay = self.graph.replay


# ----------------------------------------------------------------------------- quantizer, workspace
def _quantizer(xs: list[Tensor], col_sum: bool) -> Callable[[int], ops.Quantized]:
    def call(i: int) -> ops.Quantized:
        spec = "mxfp8_e4m3@sm90:8"
        return ops.quantize_2d(xs[i % len(xs)], spec, spec, col_sum=col_sum)

    return call


def quantize(context: GpuContext) -> Iterator[Row]:
    """bf16 to the packed operands of both directions, as te_mx.Linear asks for them."""
    for rows, cols in context.pick(QUANTIZE, [(256, 384)]):
        xs = [context.randn(rows, cols, seed=i) for i in range(context.sets(2 * rows * cols))]
        calls = {"quantize both": _quantizer(xs, False), "quantize + sums": _quantizer(xs, True)}
        written = parts_of(calls["quantize both"](0))
        moved = xs[0].nbytes + sum(part.numel() * part.element_size() for part in written)
        source = torch.ones(moved // 2, dtype=torch.uint8, device=context.device)
        target = torch.zeros_like(source)  # a copy reads and writes its size
        times = interleaved(
            {**calls, "copy": lambda i, to=target, of=source: to.copy_(of)},
            context.effort,
            clock=context.clock,
        )
        for name in calls:
            seconds = times.seconds(name)
            yield Row(
                name, f"{rows} {cols}", "sm90", seconds * 1e6,
                *context.bandwidth(moved, seconds), "device copy of as many bytes",
                times.ratio("copy", name), QUANTIZE_TARGET if name == "quantize both" else None,
                context.bandwidth(moved, times.seconds("copy"))[0],
            )  # fmt: skip


def workspace(context: GpuContext) -> Iterator[Row]:
    """A GEMM that packs into scratch memory: the cached buffer against a new one for every call."""
    for size in context.pick(WORKSPACE, [256]):
        # Plain operands: an MXTensor would keep its packed form and need no scratch from then on.
        sides = [
            te_mx.quantize(context.randn(size, size, seed=i)).operand("rowwise") for i in (0, 1)
        ]

        def call(i: int, sides: list = sides) -> object:
            return ops.gemm_2d(*sides, out_dtype=torch.bfloat16).out

        def plain(i: int, call: Call = call) -> object:
            te_mx.workspace.reset(context.device)
            return call(i)

        times = interleaved({"ours": call, "plain": plain}, context.effort, clock=context.clock)
        seconds = times.seconds("ours")
        kernel = te_mx.explain(m=size, n=size, k=size, device=context.device).kernel
        yield Row(
            "workspace", f"{size} {size} {size}", kernel, seconds * 1e6,
            *context.compute(2 * size**3, seconds), "allocation per call",
            times.ratio("plain", "ours"),
        )  # fmt: skip
