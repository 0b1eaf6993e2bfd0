"""A training step of a layer, as a call to time."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from benchmarks.timing import Call


def training_step(layer: nn.Module, data: Sequence[tuple[Tensor, Tensor]], *rest: Any) -> Call:
    """Forward and backward with all gradients, fresh ones each time: layer(x, *rest) on the pairs
    (x, gradient of the result) in turn."""

    def step(i: int) -> None:
        x, grad = data[i % len(data)]
        x.grad = None
        layer.zero_grad()
        layer(x, *rest).backward(grad)

    return step
