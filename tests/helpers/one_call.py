"""Layers as one native call each way, and the same layers one step after the other."""

from __future__ import annotations

import torch
from torch import Tensor

import te_mx
from te_mx.autograd import layer as layers

F32 = torch.float32
RECIPES = {
    "mxfp8": te_mx.recipe.MXFP8BlockScaling(fp8_format=te_mx.recipe.Format.HYBRID),
    "kept": te_mx.recipe.MXFP8BlockScaling(keep_weight_columns=True, alignment_spread=3),
    "pow2": te_mx.recipe.Float8BlockScaling(),
    "fp32": te_mx.recipe.Float8BlockScaling(use_f32_scales=True),
    "fp4": te_mx.recipe.BlockScaling(x="mxfp4", w="mxfp4"),
    "mxfp4": te_mx.recipe.MXFP4BlockScaling(),
    "mxfp4_all": te_mx.recipe.MXFP4BlockScaling(g="mxfp4"),
}
NVFP4 = te_mx.recipe.NVFP4BlockScaling()  # of sizes that divide by 8 alone


def passes(
    layer: torch.nn.Module, x: Tensor, recipe: str, first: bool | None = None
) -> list[Tensor]:
    """Outputs and gradients, those in main_grad too."""
    torch.manual_seed(1)  # of stochastic rounding
    x = x.detach().requires_grad_(x.requires_grad)
    for parameter in layer.parameters():
        parameter.grad, parameter.main_grad = None, torch.ones_like(parameter, dtype=F32)
    with te_mx.autocast(recipe=RECIPES.get(recipe, NVFP4)):
        made = layer(x, is_first_microbatch=first)
    outs = made if isinstance(made, tuple) else (made,)
    outs = [out for out in outs if out.grad_fn is not None and not out.is_leaf]
    torch.autograd.backward(outs, [out.detach().sin() for out in outs])
    if layer.delay_wgrad_compute:
        layer.backward_dw()
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    mains = [p.main_grad for p in layer.parameters()]
    return [type(outs[0].grad_fn).__name__, *outs, *grads, *mains]


def check(layer, x, recipe, monkeypatch, firsts=(None,), by_steps="LayerFunctionBackward") -> None:
    got = [passes(layer, x, recipe, first) for first in firsts]
    with monkeypatch.context() as patch:
        patch.setattr(layers, "_plan", lambda *call: None)
        expected = [passes(layer, x, recipe, first) for first in firsts]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine[0] == "OneCallLayerBackward"
        assert theirs[0] == by_steps
        for one, other in zip(mine[1:], theirs[1:], strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                assert one.dtype == other.dtype and one.shape == other.shape
                assert one.stride() == other.stride() and torch.equal(one, other)
