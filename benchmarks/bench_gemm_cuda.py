"""GEMMs on a Hopper GPU: against cuBLAS bf16 and other FP8, by kinds of scales, with epilogues.

Letters are those of the problem D[M, N] = lhs[M, K] @ rhs[N, K]^T in bf16; te_mx.gemm calls rhs A
and lhs B.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import te_mx
from benchmarks import peers_cuda
from benchmarks.gpu import GpuContext
from benchmarks.row import Row, Target
from benchmarks.timing import Call, interleaved

GEMM = [
    ((8192, 8192, 8192), Target(1.5, 1.8)),
    ((4096, 4096, 4096), Target(1.4, 1.7)),
    ((16384, 4096, 4096), Target(1.4, 1.7)),
    ((8192, 14336, 4096), Target(1.4, 1.7)),
    ((8192, 4096, 14336), Target(1.4, 1.7)),
]
# (kind of lhs, kind of rhs, precision)
SCALES = {
    "gemm row scales": ("gaussian", "row scales 2^10", "adaptive", Target(1.2, 1.4)),
    "gemm outliers": ("outliers", "outliers", "adaptive", Target(1.4, 1.7)),
    "gemm spread": ("spread", "spread", "adaptive", Target(0.45, 0.6)),
    "gemm exact": ("gaussian", "gaussian", "exact", Target(0.85, 0.95)),
}
CUBE = (8192, 8192, 8192)
QUICK = (256, 384, 512)
EPILOGUE = Target(8, 4, "%", lower_is_better=True)


def _operands(
    context: GpuContext, shape: tuple[int, int, int], kinds: tuple[str, str]
) -> tuple[list[peers_cuda.Pair], list[peers_cuda.MXPair]]:
    """Enough pairs (lhs, rhs) to rotate through, in bf16 and quantized."""
    m, n, k = shape
    plain = [
        (
            context.randn(m, k, seed=2 * i, kind=kinds[0]),
            context.randn(n, k, seed=2 * i + 1, kind=kinds[1]),
        )
        for i in range(context.sets(m * k + n * k))
    ]
    return plain, [(te_mx.quantize(lhs), te_mx.quantize(rhs)) for lhs, rhs in plain]


def _ours(quantized: list[peers_cuda.MXPair], **options: object) -> Call:
    def call(i: int) -> Tensor:
        lhs, rhs = quantized[i % len(quantized)]
        return te_mx.gemm(rhs, lhs, **options).out

    return call


def bf16(plain: list[peers_cuda.Pair]) -> Call:
    """Products of pairs in turn by cuBLAS."""

    def call(i: int) -> Tensor:
        lhs, rhs = plain[i % len(plain)]
        return torch.mm(lhs, rhs.t())

    return call


def _sizes(shape: tuple[int, int, int]) -> str:
    return " ".join(map(str, shape))


def _flops(shape: tuple[int, int, int]) -> int:
    m, n, k = shape
    return 2 * m * n * k


def gemm(context: GpuContext) -> Iterator[Row]:
    """Gaussian operands, packed before, against cuBLAS bf16 and every FP8 peer that runs."""
    for shape, target in context.pick(GEMM, [(QUICK, Target(1.4, 1.7))]):
        plain, quantized = _operands(context, shape, ("gaussian", "gaussian"))
        calls = {"ours": _ours(quantized), "cuBLAS bf16": bf16(plain)}
        calls.update(peers_cuda.working(plain, quantized))
        # Twice through all sets: an MXTensor keeps its packed form from the second use on.
        times = interleaved(calls, context.effort, warm_up=2 * len(plain), clock=context.clock)
        seconds = times.seconds("ours")
        kernel = te_mx.explain(quantized[0][1], quantized[0][0]).kernel
        for peer in list(calls)[1:]:
            yield Row(
                "gemm", _sizes(shape), kernel, seconds * 1e6,
                *context.compute(_flops(shape), seconds), peer, times.ratio(peer, "ours"),
                target if peer == "cuBLAS bf16" else None,
                context.compute(_flops(shape), times.seconds(peer))[0],
            )  # fmt: skip


def scales(context: GpuContext) -> Iterator[Row]:
    """What the scales of the operands cost, and the exact path with its pre-pass."""
    shape = context.pick([CUBE], [QUICK])[0]
    calls, kernels = {}, {}
    sets = 0
    for name, (lhs, rhs, precision, _) in SCALES.items():
        plain, quantized = _operands(context, shape, (lhs, rhs))
        calls[name] = _ours(quantized, precision=precision)
        calls[f"{name} bf16"] = bf16(plain)
        pair = quantized[0]
        kernels[name] = te_mx.explain(pair[1], pair[0], precision=precision).kernel
        sets = len(plain)
    times = interleaved(calls, context.effort, warm_up=2 * sets, clock=context.clock)
    for name, (*_, target) in SCALES.items():
        seconds = times.seconds(name)
        yield Row(
            name, _sizes(shape), kernels[name], seconds * 1e6,
            *context.compute(_flops(shape), seconds), "cuBLAS bf16",
            times.ratio(f"{name} bf16", name), target,
            context.compute(_flops(shape), times.seconds(f"{name} bf16"))[0],
        )  # fmt: skip


def epilogue(context: GpuContext) -> Iterator[Row]:
    """Time that a fused epilogue adds to the plain GEMM, with all that it reads and writes."""
    shape = context.pick([CUBE], [QUICK])[0]
    m, n, _ = shape
    _, quantized = _operands(context, shape, ("gaussian", "gaussian"))
    bias = context.randn(n, seed=1)
    aux = [context.randn(m, n, seed=i) for i in range(len(quantized))]

    def backward(i: int) -> Tensor:
        lhs, rhs = quantized[i % len(quantized)]
        return te_mx.gemm(rhs, lhs, grad=True, gelu_in=aux[i % len(aux)], bias=True).out

    calls = {
        "plain": _ours(quantized),
        "gemm + bias": _ours(quantized, bias=bias),
        "gemm + GELU-aux": _ours(quantized, bias=bias, gelu="tanh"),
        "gemm + dGELU": backward,
    }
    times = interleaved(calls, context.effort, warm_up=2 * len(quantized), clock=context.clock)
    kernel = te_mx.explain(quantized[0][1], quantized[0][0]).kernel
    for name in list(calls)[1:]:
        seconds = times.seconds(name)
        yield Row(
            name, _sizes(shape), kernel, seconds * 1e6, *context.compute(_flops(shape), seconds),
            "time added to the plain GEMM", 100 * (times.ratio(name, "plain") - 1), EPILOGUE,
        )  # fmt: skip
