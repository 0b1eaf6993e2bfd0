"""What other libraries read as `weight` of a te_mx.Linear that has none: only codes of it are left,
or it is split into several parameters.

nn.Module would give None, on which torchao's quantize_ fails without a word about the layer. So who
reads it from there gets an error that names the layer and the remedy.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_READERS = ("torchao",)  # packages that quantize the weight of any nn.Linear


class Weight:
    """The attribute `weight` of a class of modules: the parameter, wherever nn.Module has it. It
    has no __set__, so nn.Module sets and removes it as any other."""

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        parameters = None if module is None else module.__dict__.get("_parameters")
        if parameters is None or "weight" not in parameters:
            # Python goes on to nn.Module.__getattr__: it may be a buffer.
            raise AttributeError("weight")
        weight = parameters["weight"]
        if weight is None and not torch.compiler.is_compiling():
            reader = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if reader in _READERS:
                raise TypeError(_why(module, reader))
        return weight


def _why(module: Any, reader: str) -> str:
    if module._is_dropped():
        why = "only codes of its weight are left (drop_master=True)"
        remedy = "get it back first, by te_mx.unfreeze_weights(model, dequantize=True)"
    else:
        why, remedy = "its weight is split (parameters_split)", "build it in one piece"
    return (
        f"{module._label()}: {why}, so {reader} has no weight to quantize. Leave this layer out "
        f"there (filter_fn), or {remedy}"
    )
