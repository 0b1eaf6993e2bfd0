"""The linear step of a LayerNormLinear as one native call each way: the bits of one step after the
other. Without a GPU: tests/fake_sm90.py stands in for the native module."""

from __future__ import annotations

import as_on_hopper
import pytest
import torch
from torch import Tensor

import te_mx
from te_mx.autograd import layernorm_linear

F32, BF16 = torch.float32, torch.bfloat16
RECIPES = {
    "mxfp8": te_mx.recipe.MXFP8BlockScaling(fp8_format=te_mx.recipe.Format.HYBRID),
    "kept": te_mx.recipe.MXFP8BlockScaling(keep_weight_columns=True, alignment_spread=3),
    "pow2": te_mx.recipe.Float8BlockScaling(),
    "fp32": te_mx.recipe.Float8BlockScaling(use_f32_scales=True),
    "fp4": te_mx.recipe.BlockScaling(x="mxfp4", w="mxfp4"),
}


@pytest.fixture(autouse=True)
def hopper(threads):
    threads(1)  # many small operators
    with as_on_hopper.hopper():
        yield


def module(dtype=BF16, **fields) -> te_mx.LayerNormLinear:
    torch.manual_seed(0)
    made = te_mx.LayerNormLinear(70, 33, dtype=dtype, **fields)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def passes(
    layer: te_mx.LayerNormLinear, x: Tensor, recipe: str, first: bool | None = None
) -> list[Tensor]:
    """Outputs and gradients, those in main_grad too."""
    x = x.detach().requires_grad_(x.requires_grad)
    for parameter in layer.parameters():
        parameter.grad, parameter.main_grad = None, torch.ones(parameter.shape)
    with te_mx.autocast(recipe=RECIPES[recipe]):
        made = layer(x, is_first_microbatch=first)
    outs = made if isinstance(made, tuple) else (made,)
    outs = [out for out in outs if out.grad_fn is not None and not out.is_leaf]
    torch.autograd.backward(outs, [out.detach().sin() for out in outs])
    if layer.delay_wgrad_compute:
        layer.backward_dw()
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    mains = [p.main_grad for p in layer.parameters()]
    return [type(outs[0].grad_fn).__name__, *outs, *grads, *mains]


def check(layer, x, recipe, monkeypatch, firsts=(None,)) -> None:
    got = [passes(layer, x, recipe, first) for first in firsts]
    with monkeypatch.context() as patch:
        patch.setattr(layernorm_linear, "_kernel", lambda *call: None)
        expected = [passes(layer, x, recipe, first) for first in firsts]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine[0] == "OneCallLayerNormLinearBackward"
        assert theirs[0] == "LayerNormLinearFunctionBackward"
        for one, other in zip(mine[1:], theirs[1:], strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                assert one.dtype == other.dtype and one.shape == other.shape
                assert one.stride() == other.stride() and torch.equal(one, other)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bias": False, "normalization": "RMSNorm", "zero_centered_gamma": True},
        {"return_layernorm_output": True, "return_bias": True},
        {"fuse_wgrad_accumulation": True},
        {"delay_wgrad_compute": True},
        {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
        {"parameters_split": ("query", "key", "value")},
    ],
    ids=str,
)
def test_bits_of_one_step_after_the_other(fields, recipe, monkeypatch):
    layer = module(**fields)
    x = torch.randn(3, 25, 70, dtype=BF16, requires_grad=True)
    check(layer, x, recipe, monkeypatch, (None, True, False))


@pytest.mark.parametrize("trains", ["input", "norm", "weight", "weight and bias"])
def test_what_needs_no_gradient(trains, monkeypatch):
    layer = module(F32)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(
            name in ("layer_norm_weight",) if trains == "norm" else name in trains.split()
        )
    x = torch.randn(40, 70, requires_grad=trains == "input")
    check(layer, x, "mxfp8", monkeypatch)


def test_one_who_watches_the_backward_pass_sees_its_ops():
    layer, x = module(), torch.randn(40, 70, dtype=BF16, requires_grad=True)
    expected = passes(layer, x, "mxfp8")[2:]
    x = x.detach().requires_grad_()
    with te_mx.autocast(recipe=RECIPES["mxfp8"]):
        y = layer(x)
    for parameter in layer.parameters():
        parameter.grad = None
    with torch.profiler.profile() as profile:
        y.backward(y.detach().sin())
    assert any(event.key == "te_mx::gemm" for event in profile.key_averages())
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    for one, other in zip(grads, expected, strict=False):
        assert torch.equal(one, other)


def test_a_gradient_that_is_no_operand_runs_step_by_step(monkeypatch):
    """What native code does not take."""
    layer, x = module(), torch.randn(40, 70, dtype=BF16, requires_grad=True)
    expected = passes(layer, x, "mxfp8")
    monkeypatch.setattr(layernorm_linear, "backward_of", lambda *call: None)
    for one, other in zip(passes(layer, x, "mxfp8")[1:], expected[1:], strict=True):
        assert torch.equal(one, other) if one is not None else other is None
