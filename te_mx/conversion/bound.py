"""Recipes that convert_model binds to te_mx modules, which run with them outside of every autocast
region.

A module holds the recipe's settings as an attribute, so it is copied, pickled and moved with the
module, torch.compile guards on it, and no state_dict has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from te_mx.context import region
from te_mx.nn.base import MXModule
from te_mx.recipe import Recipe


class Binding(NamedTuple):
    """A te_mx module that was there before, with the first of its names."""

    name: str
    module: Any


def bindings(model: nn.Module, keeps: Callable[[nn.Module, str], bool]) -> list[Binding]:
    """The te_mx modules of a model, each once, but those that the user excluded under one of their
    names."""
    found: dict[int, Binding] = {}
    excluded = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, MXModule):
            found.setdefault(id(module), Binding(name, module))
            if keeps(module, name):  # type: ignore[arg-type]
                excluded.add(id(module))
    return [binding for key, binding in found.items() if key not in excluded]


def bind(modules: list[Any], recipe: Recipe) -> None:
    """Have the modules run with a recipe, whatever was bound to them before."""
    region.install()  # what runs again did not run in a region, but must know that it did not
    for module in modules:
        module.__dict__["_bound"] = recipe.settings


def unbind(model: nn.Module) -> None:
    """Take bound recipes from all modules."""
    for module in model.modules():
        if isinstance(module, MXModule):
            module.__dict__.pop("_bound", None)
