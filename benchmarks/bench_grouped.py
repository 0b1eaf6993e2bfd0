"""Grouped linear layers: a training step of the experts of a mixture."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import te_mx
from benchmarks.context import Context, randn
from benchmarks.row import Row
from benchmarks.timing import interleaved
from benchmarks.training import training_step

# experts, tokens, out features, in features
SIZES = [(8, 4096, 4096, 1024)]


def splits_of(kind: str, experts: int, tokens: int) -> list[int]:
    """Tokens of every expert: "even", "zipf" (the i-th gets 1/i of the first) or "half" (the odd
    experts get none)."""
    weights = {
        "even": [1.0] * experts,
        "zipf": [1 / (i + 1) for i in range(experts)],
        "half": [float(i % 2 == 0) for i in range(experts)],
    }[kind]
    splits = [int(tokens * w / sum(weights)) for w in weights]
    splits[0] += tokens - sum(splits)
    return splits


class Loop(nn.Module):
    """One layer an expert, called one after the other: what people do without a grouped layer."""

    def __init__(self, layers: list[nn.Linear]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, splits: list[int]) -> Tensor:
        parts = zip(self.layers, x.split(splits), strict=True)
        return torch.cat([layer(part) for layer, part in parts])


def grouped(context: Context) -> Iterator[Row]:
    """Forward and backward with all gradients, weights quantized at every step."""
    for experts, m, n, k in context.pick(SIZES, [(4, 96, 64, 32)]):
        torch.manual_seed(0)
        plain = [nn.Linear(k, n, dtype=torch.bfloat16) for _ in range(experts)]
        loop = [te_mx.Linear(k, n, dtype=torch.bfloat16) for _ in range(experts)]
        ours = te_mx.GroupedLinear(experts, k, n, dtype=torch.bfloat16)
        for i, layer in enumerate(plain):
            loop[i].load_state_dict(layer.state_dict())
            getattr(ours, f"weight{i}").data.copy_(layer.weight)
            getattr(ours, f"bias{i}").data.copy_(layer.bias)
        layers = {"ours": ours, "bf16": Loop(plain), "loop": Loop(loop)}
        data = [(randn((m, k), i).requires_grad_(), randn((m, n), -1 - i)) for i in range(2)]
        for kind in ("even", "zipf", "half"):
            yield from _rows(context, layers, data, splits_of(kind, experts, m), kind)


def _rows(
    context: Context, layers: dict[str, nn.Module], data: list, splits: list[int], kind: str
) -> Iterator[Row]:
    with te_mx.autocast():
        calls = {name: training_step(layer, data, splits) for name, layer in layers.items()}
        times = interleaved(calls, context.effort)
    ours = layers["ours"]
    m, n, k = len(data[0][0]), ours.out_features, ours.in_features
    seconds = times.seconds("ours")
    rate, of_peak = context.compute(6 * m * n * k, seconds)
    kernel = te_mx.audit(ours)["(root)"].wgrad
    shape = f"{m} {n} {k} E{len(splits)}"
    for peer, label in (("bf16", "loop of nn.Linear bf16"), ("loop", "loop of te_mx.Linear")):
        target = context.against_bf16(1.25, 1.8) if peer == "bf16" else None
        yield Row(
            f"grouped {kind}", shape, kernel, seconds * 1e6, rate, of_peak, label,
            times.ratio(peer, "ours"), target,
        )  # fmt: skip
