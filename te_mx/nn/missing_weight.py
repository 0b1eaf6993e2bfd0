"""What other libraries read as `weight` of a te_mx.Linear that has none: only codes of it are left,
or it is split into several parameters.

nn.Module would give None, on which torchao's quantize_, torch's RowwiseParallel, Transformers where
it resizes a head and modules that compute with it themselves fail without a word about the layer.
So who reads it from there gets an error that names the layer and the remedy.

peft finds what `target_parameters` names among the parameters of modules: experts list those that
they have no more when a config asks that te_mx's adapters are registered with.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from te_mx.nn.weight_readers import weights_read

# Code that does something to the weight of any nn.Linear: modules, and functions of some.
_READERS = (
    "torchao", "torch.distributed.tensor.parallel", "torch.nn.modules.transformer",
    "torch.nn.modules.activation", "transformers.modeling_utils._get_resized_lm_head",
)  # fmt: skip


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
            frame = sys._getframe(1)
            reader = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}."
            for known in _READERS:
                if reader.startswith(f"{known}."):
                    raise TypeError(_why(module, known))
            for owner in frame.f_locals.values():
                if isinstance(owner, nn.Module) and any(
                    m is module for _, m in weights_read(owner)
                ):
                    raise TypeError(_why(module, f"the forward of {type(owner).__name__}"))
        return weight


def is_asked_for_targets() -> bool:
    """Whether a generator that calls this is read by peft, which looks for target_parameters of a
    config that te_mx.integrations.peft registered something with."""
    frame = sys._getframe(2)
    if frame.f_code.co_name != "_inject_parameters":
        return False
    known = getattr(frame.f_locals.get("peft_config"), "_custom_modules", None) or ()
    return any(kind.__module__.startswith("te_mx.") for kind in known)


def _why(module: Any, reader: str) -> str:
    if module._is_dropped():
        why = "only codes of its weight are left (drop_master=True)"
        remedy = "get it back first by te_mx.unfreeze_weights(model, dequantize=True)"
    else:
        why, remedy = "its weight is split (parameters_split)", "build it in one piece"
    return (
        f"{module._label()}: {why}, so {reader} has no weight to work on. Leave this layer out "
        f"there, or {remedy}"
    )
