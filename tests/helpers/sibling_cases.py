"""What the tests of layers that read one tensor and add up its gradients share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import as_on_hopper
import torch
from torch import Tensor, nn

import te_mx
from te_mx.autograd import input_cache

F32, BF16 = torch.float32, torch.bfloat16
IN, ROWS = 64, 40
ROUNDOFF = {F32: 2.0**-24, BF16: 2.0**-8}
ALL = (0, 1, 2)
# How layers run: by steps, on Hopper in one call each way, or there k by steps.
PATHS = ["steps", "one call", "both"]


def running(path: str) -> AbstractContextManager:
    return nullcontext() if path == "steps" else as_on_hopper.hopper()


def qkv(dtype=F32, path="steps") -> nn.ModuleList:
    torch.manual_seed(0)
    made = [te_mx.Linear(IN, n, b, dtype=dtype) for n, b in ((48, True), (17, True), (33, False))]
    made[1].save_original_input = path == "both"
    return nn.ModuleList(made)


def given(dtype=F32) -> Tensor:
    return torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1)).to(dtype)


def upstream(outputs) -> list[Tensor]:
    return [torch.arange(y.numel()).view(y.shape).sin().to(y.dtype) for y in outputs]


def run(layers, x: Tensor, recipe=None) -> list[Tensor]:
    with te_mx.autocast(recipe=recipe):
        input_cache.open_for(x)
        return [layer(x) for layer in layers]


class Apart:
    """What each of the layers gives by itself, with fp32 for the gradients of its input."""

    def __init__(self, layers, dtype=F32, recipe=None):
        self.dtype, self.dx, self.held = dtype, [], []
        for layer in layers:
            inputs = given(dtype).requires_grad_()
            (y,) = run([layer], inputs, recipe)
            g = upstream([y])
            self.held.append(torch.autograd.grad(y, list(layer.parameters()), g))
            exact = te_mx.Linear(IN, layer.out_features, bias=False)
            exact.load_state_dict({"weight": layer.weight.float()})
            inputs = given(dtype).float().requires_grad_()
            (y,) = run([exact], inputs, recipe)
            self.dx += torch.autograd.grad(y, inputs, [t.float() for t in g])

    def is_sum(self, got: Tensor, which=ALL) -> bool:
        """Whether this is the sum over these layers, rounded after each, the last one first."""
        parts = torch.stack([self.dx[i].double() for i in sorted(which, reverse=True)]).cumsum(0)
        bound = 1.01 * ROUNDOFF[self.dtype] * parts.abs().sum(0) + 1e-30
        return got.dtype == self.dtype and bool(((got - parts[-1]).abs() <= bound).all())
