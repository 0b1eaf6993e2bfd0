"""What the tests of layers that read one tensor share: layers, steps on one tensor and on copies of
it, and how often an input was quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import te_mx
from te_mx.autograd import input_cache, linear
from te_mx.dispatch import run

ROWS, IN = 40, 70


def qkv(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    sizes = ((48, True), (17, True), (33, False))
    return [te_mx.Linear(IN, n, bias, dtype=dtype) for n, bias in sizes]


def separate(layers: Sequence[nn.Module], h: Tensor) -> list[Tensor]:
    return [layer(h.clone()) for layer in layers]


def opened(x: Tensor) -> Tensor:
    """x, for whose readers the cache is open, as that of a fused normalization's result is."""
    input_cache.open_for(x)
    return x


def together(layers: Sequence[nn.Module], h: Tensor) -> list[Tensor]:
    return [layer(opened(h)) if i == 0 else layer(h) for i, layer in enumerate(layers)]


def step(
    layers: Sequence[nn.Module], x: Tensor, call: Callable[..., list[Tensor]], recipe=None
) -> list[Tensor | None]:
    """Outputs and all gradients of one forward and backward on something computed of x."""
    for layer in layers:
        layer.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        outputs = call(layers, leaf * 1)
    grads = [torch.arange(y.numel()).view(y.shape).sin().to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, grads)
    parameters = [p.grad for layer in layers for p in layer.parameters()]
    return [*(y.detach() for y in outputs), leaf.grad, *parameters]


def assert_same(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which "row", "col" or "both" is added when a tensor with IN columns and not the
    rows of a weight is quantized. Layers without gradients run step by step, too."""
    reads: list[str] = []
    quantize = run.quantize

    def record(what):
        if what.x.shape[-1] == IN and what.x.shape[0] not in (48, 17, 33):
            reads.append("both" if what.row and what.col else "row" if what.row else "col")
        return quantize(what)

    monkeypatch.setattr(run, "quantize", record)
    monkeypatch.setattr(linear, "infer_in_one_call", lambda *_: None)
    return reads
