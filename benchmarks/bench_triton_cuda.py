"""te_mx's Triton kernels on a Hopper GPU, whose own kernels come first: `triton_cuda`, by name.

They serve GPUs that te_mx has no native kernels for; here they are measured where one is at hand.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import te_mx
from benchmarks import peers_cuda
from benchmarks.bench_gemm_cuda import bf16
from benchmarks.gpu import GpuContext, captured
from benchmarks.row import NOT_SLOWER, Row, Target
from benchmarks.timing import Call, interleaved
from te_mx.dispatch.calls import Epilogue, Mode, Product, Quantize
from te_mx.dispatch.kernels import Kernel, kernels
from te_mx.formats import get
from te_mx.layouts.operand import Operand

BOTH = "mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_e4m3_1x128"
SHAPE, CUBE, WIDE = (8192, 8192), (4096, 4096, 4096), (8192, 8192, 8192)
DOT_SCALED = "Triton dot_scaled MXFP8"


def _kernel(op: str, device: torch.device) -> Kernel:
    """Triton's, or plain torch's where a test has no GPU."""
    name = "triton" if device.type == "cuda" else "reference"
    return next(one for one in kernels(op) if one.name == name)


def quantize(context: GpuContext) -> Iterator[Row]:
    """Both directions from one matrix in bf16, as layers ask for them."""
    (rows, cols), kernel = (
        context.pick([SHAPE], [(64, 128)])[0],
        _kernel("quantize", context.device),
    )
    xs = [context.randn(rows, cols, seed=i) for i in range(context.sets(2 * rows * cols))]
    room = torch.empty_like(xs[0])
    for fmt in BOTH:
        spec, rule = f"{fmt}@rows", get(fmt).scaling.rules[0]

        def ours(i: int, spec: str = spec, rule: str = rule) -> object:
            return kernel.run(Quantize(xs[i % len(xs)], spec, spec, rule))

        calls = {"ours": ours, "copy": lambda i: room.copy_(xs[i % len(xs)])}
        graphs = {name: captured(call, len(xs), context.device) for name, call in calls.items()}
        times = interleaved(graphs, context.effort, clock=context.clock)
        yield Row(
            f"Triton {fmt} both", f"{rows} {cols}", kernel.name, times.seconds("ours") * 1e6, "",
            None, "copy of the input", times.ratio("copy", "ours"), Target(0.7, None),
        )  # fmt: skip


def _product(kernel: Kernel, sides: list[tuple[Operand, Operand]]) -> Call:
    outs = [torch.empty(a.rows, b.rows, dtype=torch.bfloat16, device=a.codes.device)
            for a, b in sides]  # fmt: skip

    def call(i: int) -> Tensor:
        (a, b), out = sides[i % len(sides)], outs[i % len(sides)]
        kernel.run(Product(a, b, Epilogue(), out, None, Mode()))
        return out

    return call


def products(context: GpuContext) -> Iterator[Row]:
    """MXFP8 beside a kernel of nothing but dot_scaled, blockwise FP8 beside cuBLAS bf16."""
    kernel = _kernel("gemm", context.device)
    for pair, shape, target in (
        (("mxfp8_e4m3", "mxfp8_e4m3"), CUBE, NOT_SLOWER),
        (("fp8_e4m3_1x128", "fp8_e4m3_128x128"), WIDE, Target(1.2, None)),
    ):
        m, n, k = context.pick([shape], [(64, 128, 256)])[0]
        plain = [
            (context.randn(m, k, seed=2 * i), context.randn(n, k, seed=2 * i + 1))
            for i in range(context.sets(m * k + n * k))
        ]
        held = [(te_mx.quantize(x, pair[0]), te_mx.quantize(w, pair[1])) for x, w in plain]
        sides = [tuple(one.operand("rowwise") for one in both) for both in held]
        calls = {"ours": _product(kernel, sides), "cuBLAS bf16": bf16(plain)}
        judged = DOT_SCALED if pair[0] == "mxfp8_e4m3" else "cuBLAS bf16"
        if judged == DOT_SCALED and context.device.type == "cuda":
            calls[judged] = peers_cuda.dot_scaled(plain, held)
        graphs = {name: captured(call, len(plain), context.device) for name, call in calls.items()}
        times = interleaved(graphs, context.effort, clock=context.clock)
        seconds = times.seconds("ours")
        for peer in list(calls)[1:]:
            yield Row(
                f"Triton {' x '.join(pair)}", f"{m} {n} {k}", kernel.name, seconds * 1e6,
                *context.compute(2 * m * n * k, seconds), peer, times.ratio(peer, "ours"),
                target if peer == judged else None,
            )  # fmt: skip


def triton(context: GpuContext) -> Iterator[Row]:
    yield from quantize(context)
    yield from products(context)
