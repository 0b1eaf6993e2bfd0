"""Grouped layers on a Hopper GPU whose weights stand as plain codes, and with a main_grad for each
weight: what that costs."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import te_mx
from benchmarks.bench_grouped import splits_of
from benchmarks.bench_grouped_cuda import LARGE, MANY, QUICK
from benchmarks.gpu import GpuContext
from benchmarks.row import Row
from benchmarks.timing import Call, interleaved
from benchmarks.training import training_step

ROWS = {  # ours, its peer, products
    "one copy fwd+bwd": ("one copy", "both copies", 3),
    "dropped fwd": ("dropped", "packed weights", 1),
    "main_grads f+b": ("in one buffer", "between rows, added", 3),
}


def plain(context: GpuContext) -> Iterator[Row]:
    """Even splits on the device."""
    for experts, m, n, k in context.pick([LARGE, MANY], [QUICK]):
        m_splits = torch.tensor(splits_of("even", experts, m), device=context.device)
        data = [
            (context.randn(m, k, seed=2 * i).requires_grad_(), context.randn(m, n, seed=2 * i + 1))
            for i in range(context.sets(2 * m * (n + k)))
        ]

        layer = partial(
            te_mx.GroupedLinear, experts, k, n, bias=False, device=context.device,
            dtype=torch.bfloat16,
        )  # fmt: skip
        fused = partial(layer, fuse_wgrad_accumulation=True)
        calls = {
            **_steps(layer(), data, m_splits),
            **_inference(layer(), layer(), data, m_splits),
            "in one buffer": _with_main_grads(fused(), 0, data, m_splits),
            "between rows, added": _with_main_grads(fused(), 16, data, m_splits),
        }
        for name, (ours, peer, products) in ROWS.items():
            pair = {ours: calls[ours], peer: calls[peer]}
            times = interleaved(pair, context.effort, clock=context.clock)
            seconds = times.seconds(ours)
            yield Row(
                f"grouped {name}", f"{m} {n} {k} E{experts}", "sm90_adaptive", seconds * 1e6,
                *context.compute(2 * products * m * n * k, seconds), peer, times.ratio(peer, ours),
            )  # fmt: skip


def _steps(
    layer: te_mx.GroupedLinear, data: list[tuple[Tensor, Tensor]], m_splits: Tensor
) -> dict[str, Call]:
    step = training_step(layer, data, m_splits)
    one_copy = te_mx.recipe.MXFP8BlockScaling(one_copy_weights=True)

    def both(i: int) -> None:
        with te_mx.autocast():
            step(i)

    def one(i: int) -> None:
        with te_mx.autocast(recipe=one_copy):
            step(i)

    return {"both copies": both, "one copy": one}


def _inference(
    kept: te_mx.GroupedLinear, dropped: te_mx.GroupedLinear, data: list[tuple[Tensor, Tensor]],
    m_splits: Tensor,
) -> dict[str, Call]:  # fmt: skip
    te_mx.freeze_weights(kept)
    te_mx.freeze_weights(dropped, drop_master=True)

    def call(layer: te_mx.GroupedLinear) -> Call:
        def run(i: int) -> None:
            with te_mx.autocast(), torch.no_grad():
                layer(data[i % len(data)][0], m_splits)

        return run

    return {"packed weights": call(kept), "dropped": call(dropped)}


def _with_main_grads(
    layer: te_mx.GroupedLinear, gap: int, data: list[tuple[Tensor, Tensor]], m_splits: Tensor
) -> Call:
    """main_grads in one buffer, `gap` numbers apart."""
    weights = layer.weights()
    size = weights[0].numel()
    buffer = torch.zeros(len(weights) * (size + gap), device=m_splits.device)
    for i, weight in enumerate(weights):
        weight.main_grad = buffer[i * (size + gap) :][:size].view_as(weight)
    step = training_step(layer, data, m_splits)

    def run(i: int) -> None:
        with te_mx.autocast():
            step(i)

    return run
