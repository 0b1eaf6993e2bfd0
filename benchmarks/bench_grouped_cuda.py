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
from te_mx.backends.base import Operand
from te_mx.ops.grouped_gemm import gemm_rows
from te_mx.ops.grouped_quantize import quantize_grouped
from te_mx.ops.grouped_weights import quantize_weights
from te_mx.ops.grouped_wgrad import gemm_k

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
    spread = 8 if weight.is_cuda else -1
    orders = ("sm90_rows", "sm90_k") if weight.is_cuda else ("k_last", "k_first")
    row, col = quantize_weights(
        list(weight.unbind(0)), "e4m3", columnwise=True, scale_rule="rceil", spread=spread
    )
    assert col is not None
    sides = []
    for tensors in (xs, gs):
        made = [
            quantize_grouped(
                x, offs, "e4m3", rowwise=True, columnwise=True, scale_rule="rceil", spread=spread
            )
            for x in tensors
        ]
        sides.append([Operand(q[0], q[1], "e4m3", orders[0]) for q in made])  # type: ignore[arg-type]
        sides.append([Operand(q[2], q[3], "e4m3", orders[1]) for q in made])  # type: ignore[arg-type]
    x_rows, x_cols, g_rows, g_cols = sides
    bf16, rows = torch.bfloat16, len(xs[0])

    def wgrad(i: int) -> Tensor:
        i %= len(xs)
        return gemm_k(x_cols[i], g_cols[i], offs, rows=rows, out_dtype=bf16)

    return {
        "fprop": lambda i: gemm_rows(row, x_rows[i % len(xs)], offs, out_dtype=bf16),
        "dgrad": lambda i: gemm_rows(col, g_rows[i % len(xs)], offs, out_dtype=bf16),
        "wgrad": wgrad,
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
            calls = _steps(mine, weight, data, splits_of(rows, experts, m))
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


def _steps(
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
