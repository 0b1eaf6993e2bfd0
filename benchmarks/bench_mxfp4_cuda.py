"""MXFP4 on a Hopper GPU: products with codes of 4 bits, which are unpacked to FP8 tiles at every
call, before the product or in its main loop, against bf16; the quantizer against a device copy;
linear layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

import te_mx
from benchmarks.bench_gemm_cuda import bf16
from benchmarks.bench_grouped_cuda import PEER, grouped_mm
from benchmarks.bench_linear_cuda import Layer
from benchmarks.gpu import GpuContext, captured
from benchmarks.row import Row, Target
from benchmarks.timing import Call, interleaved
from te_mx import _ops as ops
from te_mx._ops import Mode, Operand
from te_mx._ops.grouped_gemm import gemm_rows
from te_mx._ops.grouped_quantize import Groups, quantize_grouped, quantize_weights
from te_mx._ops.quantize import parts_of
from te_mx.backends.sm90.codes import Codes
from te_mx.backends.sm90.gemm import ADAPTIVE
from te_mx.dispatch import registry
from te_mx.dispatch.problem import FEW_ROWS
from te_mx.recipe import BlockScaling
from te_mx.runtime.kernel_log import LAST_RUN

FP4, FP8 = "mxfp4", "mxfp8_e4m3"
TILES, PLAIN = f"{FP4}@sm90:8", f"{FP4}@rows"
TRANSFORMED = f"{FP4}+rht32:0x5b39a1c6@cols"
KINDS = {  # prepacked: a weight as te_mx.prepack leaves it
    "mxfp4 x mxfp4": (PLAIN, PLAIN), "mxfp8 x mxfp4": (f"{FP8}@sm90:8", PLAIN),
    "mxfp4 x mxfp4 prepacked": (PLAIN, TILES), "mxfp8 x mxfp4 prepacked": (f"{FP8}@sm90:8", TILES),
}  # fmt: skip
CUBE, CUBE_TARGET = (8192, 8192, 8192), Target(1.5, 1.8)
FEW = [  # of published kernels, measured in CUDA graphs
    (128, 2048, 7168),
    (128, 24576, 1536),
    (512, 2048, 7168),
    (512, 7168, 2048),
    (1024, 7168, 2048),
    (4096, 4096, 7168),
]
FEW_TARGET = Target(1.1, 1.5)
CALLS = 24  # of a graph, one after the other
GROUPS = [  # groups, rows of each, N, K
    (groups, rows, n, k)
    for groups, rows in ((4, 8192), (8, 4096))
    for n, k in ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
]
GROUPS_TARGET = Target(1.4, 1.7)
QUANTIZE, QUANTIZE_TARGET = [(8192, 8192), (16384, 4096)], Target(0.8, 0.9)
RANDOM_TARGET = Target(0.7, None)
LINEAR, LINEAR_TARGET = [(8192, 4096, 4096), (16384, 14336, 4096)], Target(1.4, 1.7)
MODE = Mode(split_k=True)


def _operand(x: Tensor, spec: str) -> Operand:
    row = ops.quantize_2d(x, spec if x.is_cuda else f"{spec.partition('@')[0]}@rows").row
    assert row is not None
    return row


def _product(pairs: list[tuple[Operand, ...]]) -> Call:
    return lambda i: ops.gemm_2d(*pairs[i % len(pairs)], out_dtype=torch.bfloat16, mode=MODE).out


def _kernel(pair: tuple[Operand, ...]) -> str:
    """The one that multiplies them."""
    tag = 1 << 40  # no module's
    ops.gemm_2d(*pair, out_dtype=torch.bfloat16, mode=MODE, tag=tag)
    return LAST_RUN.pop(tag)


@contextmanager
def _packed_before() -> Iterator[None]:
    """Codes are unpacked before the product inside, however few the rows are."""
    with patch.object(Codes, "accepts", lambda self, problem: "is left out here"):
        registry.forget()
        yield
    registry.forget()


def gemm(context: GpuContext) -> Iterator[Row]:
    """Gaussian operands, whose tiles are all of class 0: 4 bits plain, as they are kept, weights
    prepacked too; 8 bits as the quantizer leaves activations. The cube eager, the others in graphs
    of CALLS products, as those of a model stand behind each other in one. Few rows twice where the
    kernel that runs unpacks codes in its main loop: by that, and unpacked before."""
    for shape in context.pick([CUBE, *FEW], [(64, 96, 128), (32, 40, 64)]):
        m, n, k = shape
        plain = [
            (context.randn(m, k, seed=2 * i), context.randn(n, k, seed=2 * i + 1))
            for i in range(context.sets(m * k + n * k))
        ]
        in_graphs = shape != CUBE
        calls: dict[str, Call] = {}
        kernels: dict[str, str] = {}
        for kind, specs in KINDS.items():
            pairs = [
                tuple(_operand(x, spec) for x, spec in zip(both, specs, strict=True))
                for both in plain
            ]
            call = _product(pairs)
            kernels[kind] = _kernel(pairs[0])
            calls[kind] = call
            if in_graphs:  # which keep the kernel that was captured
                calls[kind] = captured(call, len(plain), context.device, CALLS)
                if specs[1] == PLAIN and m <= FEW_ROWS and kernels[kind] != ADAPTIVE:
                    name = f"{kind} unpacked before"
                    with _packed_before():
                        calls[name] = captured(call, len(plain), context.device, CALLS)
                    kernels[name] = ADAPTIVE
        calls["bf16"] = bf16(plain)
        if in_graphs:
            calls["bf16"] = captured(calls["bf16"], len(plain), context.device, CALLS)
        times = interleaved(calls, context.effort, warm_up=2 * len(plain), clock=context.clock)
        flops = 2 * m * n * k
        each = CALLS if in_graphs and context.device.type == "cuda" else 1
        for name, kernel in kernels.items():
            seconds = times.seconds(name) / each
            yield Row(
                name, " ".join(map(str, shape)), kernel, seconds * 1e6,
                *context.compute(flops, seconds),
                "cuBLAS bf16" + " graph" * in_graphs, times.ratio("bf16", name),
                FEW_TARGET if in_graphs else CUBE_TARGET,
                context.compute(flops, times.seconds("bf16") / each)[0],
            )  # fmt: skip


def _product_of_groups(xs: list[Tensor], groups: Groups, weights: list[Tensor], fmt: str) -> Call:
    """Tokens as the quantizer leaves them, weights in 4 bits."""
    layout = "sm90_rows:8" if xs[0].is_cuda else "rows"
    rows = [quantize_grouped(x, groups, f"{fmt}@{layout}", rule="rceil").row for x in xs]
    stack, _ = quantize_weights(weights, f"{FP4}@rows", rule="rceil")
    return lambda i: gemm_rows(rows[i % len(rows)], stack, groups, out_dtype=torch.bfloat16)


def grouped(context: GpuContext) -> Iterator[Row]:
    """Groups of rows behind each other, of 0.7 to 1.3 times the rows that are said, and in a buffer
    with room for each ("masked"): that peer multiplies all of it, for it knows no masks."""
    for count, rows, n, k in context.pick(GROUPS, [(2, 64, 40, 64)]):
        m, device = count * rows, context.device
        jitter = torch.linspace(0.7, 1.3, count)
        sizes = (jitter * rows).long() // 16 * 16
        ends = sizes.cumsum(0)
        ends[-1] = m
        offs = ends.to(device, torch.int32)
        masked = (torch.arange(count) * rows + sizes.clamp(max=rows)).to(device, torch.int32)
        weight = context.randn(count * n, k, seed=1).view(count, n, k)
        sets = range(context.sets(m * (n + k)))
        xs = [context.randn(m, k, seed=2 + i) for i in sets]
        kinds = {"contiguous": Groups(offs), "masked": Groups(masked, rows)}
        for kind, groups in kinds.items():
            calls: dict[str, Call] = {
                fmt: _product_of_groups(xs, groups, list(weight.unbind(0)), fmt)
                for fmt in (FP4, FP8)
            }
            calls["bf16"] = lambda i, xs=xs, weight=weight, offs=offs: grouped_mm(
                xs[i % len(xs)], weight.transpose(1, 2), offs
            )
            times = interleaved(calls, context.effort, clock=context.clock)
            filled = m if kind == "contiguous" else int(sizes.clamp(max=rows).sum())
            for fmt in (FP4, FP8):
                seconds = times.seconds(fmt)
                yield Row(
                    f"{kind} {fmt[:5]}", f"{rows} {n} {k} G{count}", "sm90_adaptive", seconds * 1e6,
                    *context.compute(2 * filled * n * k, seconds), PEER, times.ratio("bf16", fmt),
                    GROUPS_TARGET, context.compute(2 * m * n * k, times.seconds("bf16"))[0],
                )  # fmt: skip


def quantize(context: GpuContext) -> Iterator[Row]:
    """bf16 to the operands of both directions, as te_mx.Linear asks for them, and to 4 bits at
    rest; a product's operand from those."""
    for rows, cols in context.pick(QUANTIZE, [(256, 384)]):
        xs = [context.randn(rows, cols, seed=i) for i in range(context.sets(2 * rows * cols))]
        held = [ops.quantize_2d(x, PLAIN).row for x in xs]
        seed = torch.tensor([1], device=context.device)
        jobs = {
            "quantize both": (
                lambda i, xs=xs: parts_of(ops.quantize_2d(xs[i % len(xs)], TILES, TILES)),
                xs[0].nbytes,
                QUANTIZE_TARGET,
            ),
            "transformed": (  # x under the recipe of MXFP4 in all GEMMs
                lambda i, xs=xs: parts_of(ops.quantize_2d(xs[i % len(xs)], TILES, TRANSFORMED)),
                xs[0].nbytes,
                RANDOM_TARGET,
            ),
            "random": (  # gradients under the same
                lambda i, xs=xs, seed=seed: parts_of(
                    ops.quantize_2d(xs[i % len(xs)], PLAIN, TRANSFORMED, rule="rceil+sr", seed=seed)
                ),
                xs[0].nbytes,
                RANDOM_TARGET,
            ),
            "quantize 4 bits": (
                lambda i, xs=xs: parts_of(ops.quantize_2d(xs[i % len(xs)], PLAIN)),
                xs[0].nbytes,
                None,
            ),
            "unpack": (
                lambda i, held=held: list(ops.convert_2d(held[i % len(held)], TILES)[:2]),
                sum(part.nbytes for part in held[0][:2]),
                None,
            ),
        }
        for name, (call, read, target) in jobs.items():
            moved = read + sum(part.numel() * part.element_size() for part in call(0))
            source = torch.ones(moved // 2, dtype=torch.uint8, device=context.device)
            there = torch.zeros_like(source)  # a copy reads and writes its size
            times = interleaved(
                {name: call, "copy": lambda i, to=there, of=source: to.copy_(of)},
                context.effort,
                clock=context.clock,
            )
            seconds = times.seconds(name)
            yield Row(
                name, f"{rows} {cols}", "sm90", seconds * 1e6, *context.bandwidth(moved, seconds),
                "device copy of as many bytes", times.ratio("copy", name), target,
                context.bandwidth(moved, times.seconds("copy"))[0],
            )  # fmt: skip


def linear(context: GpuContext) -> Iterator[Row]:
    """Forward and backward with all three gradients, eager: inputs and weights in MXFP4, gradients
    in MXFP8."""
    recipe = BlockScaling(x=FP4, w=FP4, g=FP8)
    for shape in context.pick(LINEAR, [(64, 96, 128)]):
        m, n, k = shape
        sets = context.sets(2 * (m * k + n * k + m * n))
        ours, plain = (Layer(context, kind, shape, sets) for kind in (te_mx.Linear, nn.Linear))

        def step(i: int, layer: Layer = ours) -> None:
            with te_mx.autocast(recipe=recipe):
                layer.step(i)

        calls: dict[str, Call] = {"ours": step, "bf16": plain.step}
        times = interleaved(calls, context.effort, clock=context.clock)
        seconds, flops = times.seconds("ours"), 6 * m * n * k
        yield Row(
            "linear fwd+bwd fp4", f"{m} {n} {k}", ours.kernel, seconds * 1e6,
            *context.compute(flops, seconds), "nn.Linear bf16", times.ratio("bf16", "ours"),
            LINEAR_TARGET, context.compute(flops, times.seconds("bf16"))[0],
        )  # fmt: skip


def mxfp4(context: GpuContext) -> Iterator[Row]:
    """Products and layers."""
    for of in (gemm, grouped, linear):
        yield from of(context)
