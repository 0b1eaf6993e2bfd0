"""What tensor parallelism computes, in one process: a layer for each rank, made of slices of the
whole one, and sums of what they give. Every rank must have the same bits.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import te_mx

WORLD = 2


def slices(name: str, value: Tensor, module: Any, kind: str) -> list[Tensor]:
    """What each rank has of a parameter."""
    if name.startswith("layer_norm"):
        return [value] * WORLD
    if isinstance(module, te_mx.LayerNormMLP):
        if name.startswith("fc1"):
            blocks = value.chunk(2) if module._act.gated else (value,)
            return [torch.cat(p) for p in zip(*(b.chunk(WORLD) for b in blocks), strict=True)]
        return list(value.chunk(WORLD, 1)) if name == "fc2_weight" else [value] * WORLD
    stacked = isinstance(module, te_mx.GroupedLinear) and module.single_grouped_weight
    if kind == "row" and "bias" in name:
        return [value] * WORLD
    return list(value.chunk(WORLD, int(kind == "row") + int(stacked)))


def merged(name: str, grads: list[Tensor], module: Any, kind: str) -> Tensor:
    """The gradient of the whole parameter."""
    if name.startswith("layer_norm"):
        return sum(grads[1:], grads[0])
    if isinstance(module, te_mx.LayerNormMLP) and name.startswith("fc1"):
        if not module._act.gated:
            return torch.cat(grads)
        return torch.cat([torch.cat(p) for p in zip(*(g.chunk(2) for g in grads), strict=True)])
    if name == "fc2_bias" or (kind == "row" and "bias" in name):
        return grads[0]
    row = name == "fc2_weight" or kind == "row"
    stacked = isinstance(module, te_mx.GroupedLinear) and module.single_grouped_weight
    return torch.cat(grads, int(row) + int(stacked))


def layers(module: Any, kind: str) -> list[Any]:
    """The layer of each rank; `kind` "column" or "row", of LayerNormMLP both."""
    made = [copy.deepcopy(module) for _ in range(WORLD)]
    for name, value in module.named_parameters():
        for rank, piece in enumerate(slices(name, value.detach(), module, kind)):
            setattr(made[rank], name, nn.Parameter(piece.clone()))
    for layer in made:
        if isinstance(module, te_mx.LayerNormMLP):
            layer.ffn_hidden_size //= WORLD
        elif kind == "row":
            layer.in_features //= WORLD
        else:
            layer.out_features //= WORLD
    return made


def run(module: Any, kind: str, x: Tensor, grad: Tensor, *args: Any) -> dict[str, Tensor]:
    """y, dx and the gradients of the whole parameters, after one pass with this output gradient."""
    made = layers(module, kind)
    summed = kind == "row" or isinstance(module, te_mx.LayerNormMLP)
    pieces = x.chunk(WORLD, -1) if kind == "row" else (x,) * WORLD
    inputs = [piece.detach().clone().requires_grad_() for piece in pieces]
    for layer in made[1:] if summed else ():
        for name, parameter in layer.named_parameters():
            if name == "fc2_bias" or (kind == "row" and "bias" in name):
                parameter.data.zero_()
    outs = [layer(one, *args) for layer, one in zip(made, inputs, strict=True)]
    grads = (grad,) * WORLD if summed else grad.chunk(WORLD, -1)
    for out, one in zip(outs, grads, strict=True):
        out.backward(one.contiguous())
    of = [one.grad for one in inputs]
    found = {
        "y": sum(outs[1:], outs[0]).detach() if summed else torch.cat(outs, -1).detach(),
        "dx": torch.cat(of, -1) if kind == "row" else sum(of[1:], of[0]),
    }
    for name, _ in module.named_parameters():
        each = [dict(layer.named_parameters())[name].grad for layer in made]
        found[name] = merged(name, each, module, kind)
    return found
