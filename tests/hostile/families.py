"""Layers and recipes that the tests of differentiation run over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import te_mx
from te_mx.recipe import Float8BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling

IN, OUT, ROWS = 36, 40, 3

RECIPES: dict[str, Any] = {
    "default": MXFP8BlockScaling(),
    "high_precision": MXFP8BlockScaling(backward_override="high_precision"),
    "dequantized": MXFP8BlockScaling(backward_override="dequantized"),
    "wgrad_with_hp": MXFP8BlockScaling(wgrad_with_hp=True),
    "one_copy": MXFP8BlockScaling(one_copy_weights=True),
    "mxfp4": MXFP4BlockScaling(),
    "float8_block": Float8BlockScaling(),
    "off": None,
}


class Grouped(nn.Module):
    """A GroupedLinear that is called like the others."""

    def __init__(self, size: int = OUT, **arguments: Any) -> None:
        super().__init__()
        self.inner = te_mx.GroupedLinear(3, IN, size, **arguments)

    def forward(self, x: Tensor) -> Any:
        rows = x.numel() // IN
        return self.inner(x, [rows // 3, 0, rows - rows // 3])


class GroupedFunction(nn.Module):
    """te_mx.grouped_linear on parameters of its own; high precision outside of te_mx.autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, OUT, IN) / 8)

    def forward(self, x: Tensor) -> Tensor:
        if te_mx.context.region.current_settings() is None:
            return torch.cat([x[:2] @ self.weight[0].t(), x[2:] @ self.weight[1].t()])
        return te_mx.grouped_linear(x, self.weight, offs=torch.tensor([2, ROWS]))


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda size=OUT, **k: te_mx.Linear(IN, size, **k),
    "LayerNormLinear": lambda size=OUT, **k: te_mx.LayerNormLinear(IN, size, **k),
    "LayerNormMLP": lambda size=OUT, **k: te_mx.LayerNormMLP(IN, size, **k),
    "GroupedLinear": Grouped,
    "grouped_linear": GroupedFunction,
}
MODULES = [family for family in FAMILIES if family != "grouped_linear"]


def layer(family: str, **arguments: Any) -> nn.Module:
    """A layer whose parameters all differ from 0."""
    made = FAMILIES[family](**arguments)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return made


def region(recipe: str) -> te_mx.autocast:
    chosen = RECIPES[recipe]
    return te_mx.autocast(enabled=chosen is not None, recipe=chosen)


def in_region(recipe: str, module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The module in a region of its own at every call."""

    def run(x: Tensor) -> Tensor:
        with region(recipe):
            return module(x)

    return run
