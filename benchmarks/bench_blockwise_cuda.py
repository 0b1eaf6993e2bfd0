"""Blockwise FP8 on a Hopper GPU: products, linear layers and experts against bf16, the quantizer
against a device copy."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import te_mx
from benchmarks import bench_grouped_cuda as experts_cuda
from benchmarks.bench_gemm_cuda import GEMM, QUICK, bf16
from benchmarks.bench_grouped import splits_of
from benchmarks.bench_linear_cuda import Layer
from benchmarks.gpu import GpuContext
from benchmarks.row import Row, Target
from benchmarks.timing import Call, interleaved
from te_mx import _ops as ops
from te_mx._ops import Epilogue, Operand
from te_mx._ops.quantize import parts_of
from te_mx.recipe import DeepSeekV3, Float8BlockScaling

X, W = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
LAYOUT, ALIGNED = "sm90_factors", "sm90:8"
CUBE = GEMM[0][0]
# By the blocks of rhs: fprop and dgrad multiply by weights, wgrad by inputs.
FPROP = {CUBE: Target(1.6, 1.85)}
FPROP_OTHERS, WGRAD = Target(1.5, 1.75), Target(1.2, 1.45)
LINEAR = [  # tokens, out features, in features
    ((8192, 4096, 4096), Target(1.35, 1.5)),
    ((16384, 4096, 4096), Target(1.45, 1.6)),
    ((8192, 14336, 4096), Target(1.5, 1.7)),
    ((16384, 14336, 4096), Target(1.55, 1.8)),
]
QUANTIZE = [(8192, 8192), (16384, 4096), (8192, 14336)]
QUANTIZE_TARGET = Target(0.85, 0.93)
EXPERTS = Target(1.3, 1.55)

Pairs = list[tuple[Operand, Operand]]


def _quantized(x: Tensor, fmt: str, rule: str) -> Operand:
    row = ops.quantize_2d(x, f"{fmt}@{LAYOUT}", rule=rule).row
    assert row is not None
    return row


def _aligned(x: Tensor) -> Operand:
    """An operand of wgrad by the rule pow2: the columns of what a layer quantizes."""
    col = ops.quantize_2d(x.t().contiguous(), col=f"{X}@{ALIGNED}", rule="pow2").col
    assert col is not None
    return col


def _product(pairs: Pairs, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Call:
    epilogue = Epilogue(accumulate=out is not None)

    def call(i: int) -> Tensor:
        lhs, rhs = pairs[i % len(pairs)]
        return ops.gemm_2d(lhs, rhs, epilogue, out=out, out_dtype=dtype).out

    return call


def gemm(context: GpuContext) -> Iterator[Row]:
    """Gaussian operands, quantized before. Scales of wgrad are powers of two, as by default, which
    are aligned, and any fp32 numbers."""
    for shape, _ in context.pick(GEMM, [(QUICK, None)]):
        m, n, k = shape
        plain = [
            (context.randn(m, k, seed=2 * i), context.randn(n, k, seed=2 * i + 1))
            for i in range(context.sets(m * k + n * k))
        ]
        pairs: dict[str, Pairs] = {
            name: [
                (_quantized(lhs, X, name[6:]), _quantized(rhs, fmt, name[6:])) for lhs, rhs in plain
            ]
            for name, fmt in (("fprop fp32", W), ("wgrad fp32", X))
        }
        pairs["wgrad pow2"] = [(_aligned(lhs), _aligned(rhs)) for lhs, rhs in plain]
        calls = {name: _product(of) for name, of in pairs.items()}
        main_grad = torch.zeros(m, n, device=context.device)
        for rule in ("pow2", "fp32"):
            calls[f"wgrad {rule} +="] = _product(pairs[f"wgrad {rule}"], torch.float32, main_grad)
        calls["bf16"] = bf16(plain)
        times = interleaved(calls, context.effort, warm_up=2 * len(plain), clock=context.clock)
        flops = 2 * m * n * k
        for name in list(calls)[:-1]:
            seconds = times.seconds(name)
            fprop = name.startswith("fprop")
            yield Row(
                name, " ".join(map(str, shape)), "sm90_blockwise", seconds * 1e6,
                *context.compute(flops, seconds), "cuBLAS bf16", times.ratio("bf16", name),
                FPROP.get(shape, FPROP_OTHERS) if fprop else WGRAD,
                context.compute(flops, times.seconds("bf16"))[0],
            )  # fmt: skip


def _both(xs: list[Tensor], fmt: str, columns: str = LAYOUT) -> Call:
    row, col = f"{fmt}@{LAYOUT}", f"{fmt}@{columns}"
    return lambda i: ops.quantize_2d(xs[i % len(xs)], row, col, rule="pow2")


def quantize(context: GpuContext) -> Iterator[Row]:
    """bf16 to the operands of both directions, as te_mx.Linear asks for inputs and weights."""
    for rows, cols in context.pick(QUANTIZE, [(256, 384)]):
        xs = [context.randn(rows, cols, seed=i) for i in range(context.sets(2 * rows * cols))]
        calls = {f"quantize {fmt[9:]}": _both(xs, fmt) for fmt in (X, W)}
        calls["quantize 1x128 aligned"] = _both(xs, X, ALIGNED)
        written = parts_of(ops.quantize_2d(xs[0], f"{X}@{LAYOUT}", f"{X}@{LAYOUT}", rule="pow2"))
        moved = xs[0].nbytes + sum(part.numel() * part.element_size() for part in written)
        source = torch.ones(moved // 2, dtype=torch.uint8, device=context.device)
        target = torch.zeros_like(source)  # a copy reads and writes its size
        calls["copy"] = lambda i, to=target, of=source: to.copy_(of)
        times = interleaved(calls, context.effort, clock=context.clock)
        for name in list(calls)[:-1]:
            seconds = times.seconds(name)
            yield Row(
                name, f"{rows} {cols}", "sm90_blockwise", seconds * 1e6,
                *context.bandwidth(moved, seconds), "device copy of as many bytes",
                times.ratio("copy", name), QUANTIZE_TARGET,
                context.bandwidth(moved, times.seconds("copy"))[0],
            )  # fmt: skip


def linear(context: GpuContext) -> Iterator[Row]:
    """Forward and backward with all three gradients, weights quantized at every step, eager."""
    for shape, target in context.pick(LINEAR, [((64, 96, 128), LINEAR[0][1])]):
        m, n, k = shape
        sets = context.sets(2 * (m * k + n * k + m * n))
        layers = {
            "pow2": (Layer(context, te_mx.Linear, shape, sets), Float8BlockScaling()),
            "fp32": (Layer(context, te_mx.Linear, shape, sets), DeepSeekV3()),
            "pow2 kept": (
                Layer(context, te_mx.Linear, shape, sets),
                Float8BlockScaling(keep_weight_columns=True),
            ),
        }
        plain = Layer(context, nn.Linear, shape, sets)
        calls: dict[str, Call] = {"bf16": plain.step}
        for name, (layer, recipe) in layers.items():
            calls[name] = lambda i, layer=layer, recipe=recipe: _step(layer, recipe, i)
        times = interleaved(calls, context.effort, clock=context.clock)
        flops = 6 * m * n * k
        for name, (layer, _) in layers.items():
            seconds = times.seconds(name)
            yield Row(
                f"linear f+b {name}", f"{m} {n} {k}", layer.kernel, seconds * 1e6,
                *context.compute(flops, seconds), "nn.Linear bf16", times.ratio("bf16", name),
                target, context.compute(flops, times.seconds("bf16"))[0],
            )  # fmt: skip


def _step(layer: Layer, recipe: te_mx.recipe.Recipe, i: int) -> None:
    with te_mx.autocast(recipe=recipe):
        layer.step(i)


def experts(context: GpuContext) -> Iterator[Row]:
    """Forward and backward of GroupedLinear, weights quantized at every step, splits on the
    device."""
    for count, m, n, k in context.pick([experts_cuda.LARGE], [experts_cuda.QUICK]):
        layer = te_mx.GroupedLinear(
            count, k, n, bias=False, device=context.device, dtype=torch.bfloat16,
            single_grouped_weight=True,
        )  # fmt: skip
        weight = layer.weight.detach().clone().requires_grad_()
        data = [
            (context.randn(m, k, seed=2 * i).requires_grad_(), context.randn(m, n, seed=2 * i + 1))
            for i in range(context.sets(2 * m * (n + k)))
        ]
        for name, recipe in (("pow2", Float8BlockScaling()), ("fp32", DeepSeekV3())):
            for kind in ("even", "zipf"):
                calls = experts_cuda.steps_of(layer, weight, data, splits_of(kind, count, m))
                with te_mx.autocast(recipe=recipe):
                    times = interleaved(calls, context.effort, clock=context.clock)
                seconds = times.seconds("ours")
                yield Row(
                    f"grouped {kind} f+b {name}", f"{m} {n} {k} E{count}",
                    te_mx.audit(layer)["(root)"].wgrad, seconds * 1e6,
                    *context.compute(6 * m * n * k, seconds), experts_cuda.PEER,
                    times.ratio("bf16", "ours"), EXPERTS,
                    context.compute(6 * m * n * k, times.seconds("bf16"))[0],
                )  # fmt: skip


def blockwise(context: GpuContext) -> Iterator[Row]:
    """All of them."""
    for of in (gemm, quantize, linear, experts):
        yield from of(context)
