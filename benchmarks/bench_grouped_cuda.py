"""Grouped layers on a Hopper GPU against torch's grouped_mm in bf16: every product on operands that
are packed already, and forward and backward with all quantization."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import te_mx
from benchmarks.bench_grouped import splits_of
from benchmarks.gpu import GpuContext
from benchmarks.row import Row, Target
from benchmarks.timing import Call, interleaved
from benchmarks.training import training_step
from te_mx._ops.grouped_gemm import gemm_k, gemm_rows
from te_mx._ops.grouped_quantize import Groups, quantize_grouped, quantize_weights

Size = tuple[int, int, int, int]  # experts, tokens, out features, in features
LARGE, MANY = (8, 32768, 2048, 7168), (64, 65536, 1408, 2048)
QUICK = (4, 96, 64, 32)
PRODUCTS = {"fprop": Target(1.4, 1.8), "dgrad": Target(1.4, 1.8), "wgrad": Target(1.2, 1.6)}
STEP = Target(1.2, 1.5)
PEER = "grouped_mm bf16"


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """torch's own: rows [R, K] by [G, K, N], or [M, R] by [R, N] to [G, M, N]."""
    if a.is_cuda:
        return getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)(a, b, offs=offs)
    splits = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()  # for the test without a GPU
    if b.dim() == 3:
        return torch.cat([x @ w for x, w in zip(a.split(splits), b, strict=True)])
    pairs = zip(a.split(splits, 1), b.split(splits), strict=True)
    return torch.stack([left @ right for left, right in pairs])


class GroupedMM(torch.autograd.Function):
    """x [R, K] by weights [G, N, K], with both gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        return grouped_mm(x, weight.transpose(1, 2), offs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, offs = ctx.saved_tensors
        return grouped_mm(grad, weight, offs), grouped_mm(grad.t(), x, offs), None


def _offs(splits: list[int], device: torch.device) -> Tensor:
    return torch.tensor(splits).cumsum(0).to(device, torch.int32)


def products(context: GpuContext) -> Iterator[Row]:
    """fprop, dgrad and wgrad on packed operands, even splits on the device."""
    for size in context.pick([LARGE, MANY], [QUICK]):
        experts, m, n, k = size
        offs = _offs(splits_of("even", experts, m), context.device)
        weight = context.randn(experts * n, k, seed=1).view(experts, n, k)
        sets = range(context.sets(2 * m * (n + k)))
        xs = [context.randn(m, k, seed=2 + 2 * i) for i in sets]
        gs = [context.randn(m, n, seed=3 + 2 * i) for i in sets]
        calls, peers = _ours(xs, gs, weight, offs), _peers(xs, gs, weight, offs)
        for name, target in PRODUCTS.items():
            times = interleaved(
                {"ours": calls[name], "bf16": peers[name]}, context.effort, clock=context.clock
            )
            seconds = times.seconds("ours")
            yield Row(
                f"grouped {name}", f"{m} {n} {k} E{experts}", "sm90_adaptive", seconds * 1e6,
                *context.compute(2 * m * n * k, seconds), PEER, times.ratio("bf16", "ours"),
                target if size != MANY else None,
                context.compute(2 * m * n * k, times.seconds("bf16"))[0],
            )  # fmt: skip


def _peers(xs: list[Tensor], gs: list[Tensor], weight: Tensor, offs: Tensor) -> dict[str, Call]:
    return {
        "fprop": lambda i: grouped_mm(xs[i % len(xs)], weight.transpose(1, 2), offs),
        "dgrad": lambda i: grouped_mm(gs[i % len(gs)], weight, offs),
        "wgrad": lambda i: grouped_mm(gs[i % len(gs)].t(), xs[i % len(xs)], offs),
    }


def _ours(
    xs: list[Tensor], gs: list[Tensor], weight: Tensor, offs: Tensor
) -> dict[str, Callable[[int], Tensor]]:
    rows, cols, weights = ("sm90_rows:8", "sm90_k:8", ("sm90:8", "sm90:8"))
    if not weight.is_cuda:
        rows, cols, weights = ("rows", "grouped_cols", ("rows", "cols"))
    fmt, groups = "mxfp8_e4m3", Groups(offs)
    row, col = quantize_weights(
        list(weight.unbind(0)), *(f"{fmt}@{layout}" for layout in weights), rule="rceil"
    )
    assert col is not None
    made = [
        [quantize_grouped(x, groups, f"{fmt}@{rows}", f"{fmt}@{cols}", rule="rceil") for x in each]
        for each in (xs, gs)
    ]
    (x_rows, x_cols), (g_rows, g_cols) = (zip(*(q[:2] for q in each), strict=True) for each in made)
    bf16, sets = {"out_dtype": torch.bfloat16}, len(xs)
    return {
        "fprop": lambda i: gemm_rows(x_rows[i % sets], row, groups, **bf16),
        "dgrad": lambda i: gemm_rows(g_rows[i % sets], col, groups, **bf16),
        "wgrad": lambda i: gemm_k(g_cols[i % sets], x_cols[i % sets], groups, **bf16),
    }


def steps(context: GpuContext) -> Iterator[Row]:
    """Forward and backward, weights quantized at every step, splits on the device. The peer holds
    all weights in one parameter, and so do we; "apart" is a parameter for each."""
    for experts, m, n, k in context.pick([LARGE, MANY], [QUICK]):
        layer = te_mx.GroupedLinear(
            experts, k, n, bias=False, device=context.device, dtype=torch.bfloat16,
            single_grouped_weight=True,
        )  # fmt: skip
        apart = te_mx.GroupedLinear(
            experts, k, n, bias=False, device=context.device, dtype=torch.bfloat16
        )
        weight = layer.weight.detach().clone().requires_grad_()
        sets = range(context.sets(2 * m * (n + k)))
        data = [
            (context.randn(m, k, seed=2 * i).requires_grad_(), context.randn(m, n, seed=2 * i + 1))
            for i in sets
        ]
        for kind in ("even", "zipf", "half", "apart"):
            mine, rows = (apart, "even") if kind == "apart" else (layer, kind)
            calls = steps_of(mine, weight, data, splits_of(rows, experts, m))
            with te_mx.autocast():
                times = interleaved(calls, context.effort, clock=context.clock)
            seconds = times.seconds("ours")
            yield Row(
                f"grouped {kind} fwd+bwd", f"{m} {n} {k} E{experts}",
                te_mx.audit(mine)["(root)"].wgrad, seconds * 1e6,
                *context.compute(6 * m * n * k, seconds), PEER, times.ratio("bf16", "ours"),
                STEP if kind != "apart" else None,
                context.compute(6 * m * n * k, times.seconds("bf16"))[0],
            )  # fmt: skip


def steps_of(
    layer: te_mx.GroupedLinear, weight: Tensor, data: list[tuple[Tensor, Tensor]], splits: list[int]
) -> dict[str, Call]:
    m_splits, offs = torch.tensor(splits, device=weight.device), _offs(splits, weight.device)

    def bf16(i: int) -> None:
        x, grad = data[i % len(data)]
        x.grad = weight.grad = None
        GroupedMM.apply(x, weight, offs).backward(grad)

    return {"ours": training_step(layer, data, m_splits), "bf16": bf16}


def grouped(context: GpuContext) -> Iterator[Row]:
    yield from products(context)
    yield from steps(context)
