"""Layers in NVFP4 as one native call each way: the bits of one step after the other."""

from __future__ import annotations

import fake_sm90
import pytest
import torch
from emulated_hopper import CUBLAS, hopper
from fake_sm90 import UNSUPPORTED
from one_call import NVFP4, check

import te_mx

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def on_hopper(threads):
    threads(1)
    with hopper():
        yield


NVFP4_LAYERS = [
    (te_mx.Linear, {}),
    (te_mx.Linear, {"fuse_wgrad_accumulation": True, "return_bias": True}),
    (te_mx.LayerNormLinear, {"delay_wgrad_compute": True, "normalization": "RMSNorm"}),
    (te_mx.LayerNormMLP, {"activation": "swiglu", "bias": False, "delay_wgrad_compute": True}),
    (te_mx.LayerNormMLP, {"activation": "srelu", "bias": False, "fuse_wgrad_accumulation": True}),
]


@pytest.mark.parametrize(("kind", "fields"), NVFP4_LAYERS)
def test_layers_in_nvfp4(kind, fields, monkeypatch):
    torch.manual_seed(0)
    layer = kind(64, 48, dtype=BF16, **fields)
    x = torch.randn(3, 24, 64, dtype=BF16, requires_grad=True)
    steps = "LinearFunctionBackward" if kind is te_mx.Linear else "LayerFunctionBackward"
    check(layer, x, "nvfp4", monkeypatch, (None, True, False), steps)


@pytest.mark.parametrize("what", ["sizes", "bias", "library", "main_grad"])
def test_products_of_nvfp4_that_the_library_does_not_take(what, monkeypatch):
    layer = te_mx.Linear(64, 44 if what == "sizes" else 48, dtype=BF16)
    layer.fuse_wgrad_accumulation = what == "main_grad"
    if what == "bias":
        layer.bias = torch.nn.Parameter(layer.bias.detach().float())
    if what == "library":
        monkeypatch.setitem(CUBLAS, "nvfp4_multiplies", lambda args: UNSUPPORTED)
    x = torch.randn(24, 64, dtype=BF16, requires_grad=True)
    with te_mx.autocast(recipe=NVFP4):
        y = layer(x)
    steps = "OneCallLayerBackward" if what == "main_grad" else "LinearFunctionBackward"
    assert type(y.grad_fn).__name__ == steps
    # Where no row starts at whole 16 bytes.
    main = torch.ones(layer.weight.numel() + 1)[1:].view_as(layer.weight)
    layer.weight.main_grad = main
    y.sum().backward()
    grad = main if what == "main_grad" else layer.weight.grad
    assert grad.isfinite().all() and bool((grad != 1).any()) and x.grad.isfinite().all()


def test_what_a_layer_calls(monkeypatch):
    """Both matrices of each way are quantized side by side, with the factors of what follows."""
    made, sequence = [], fake_sm90.sequence
    monkeypatch.setattr(
        fake_sm90, "sequence", lambda steps, *more: made.append(steps) or sequence(steps, *more)
    )
    layer = te_mx.Linear(64, 48, bias=False, dtype=BF16)
    with te_mx.autocast(recipe=NVFP4):
        layer(torch.randn(24, 64, dtype=BF16, requires_grad=True))
    assert [[name for name, *_ in steps] for steps in made] == [
        ["nvfp4_quantize_two", "nvfp4_multiply"],
        ["nvfp4_quantize_two", "nvfp4_multiply", "nvfp4_from_rows", "nvfp4_multiply"],
    ]
    for steps in made:
        for name, _, places in steps:
            if name == "nvfp4_multiply":
                assert "factors" in [field for _, field, *_ in places]
