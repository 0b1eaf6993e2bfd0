"""Warnings for models that were converted and do not run in MXFP8 after all: trained outside of
te_mx.autocast, or with layers that something else replaced."""

import warnings
import weakref
from typing import Any

import torch
from torch import nn

from te_mx.context import region
from te_mx.weights.freezing import Freezable


class ConversionWarning(UserWarning):
    """A model was converted, or was to be, and does not run in MXFP8."""


_warned = False
_watched: dict[int, weakref.ref[nn.Module]] = {}
_lost: list[tuple[weakref.ref[nn.Module], str]] = []


def __getattr__(name: str) -> Any:
    # As in weights/gradients.py: what Dynamo needs is made when it reads the attribute.
    if name == "warn_plain_traced":
        globals()[name] = torch.compiler.assume_constant_result(warn_plain)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def warn_plain(name: str | None) -> None:
    """A converted layer trains, and no region of autocast was ever entered: say so once in this
    process. Compiled code says it when it is compiled."""
    global _warned
    if _warned or region.was_entered():
        return
    _warned = True
    warnings.warn(
        f"the layer {name!r}, which te_mx.convert_model converted, runs with gradients outside of "
        "te_mx.autocast, as every layer of this process so far: in high precision, as nn.Linear. "
        "Run the forward inside `with te_mx.autocast():`, or, if that is meant, inside "
        "te_mx.autocast(enabled=False)",
        ConversionWarning,
        stacklevel=2,
    )


# ------------------------------------------------------------------------------- replaced by others
def watch(model: nn.Module, name: str, module: nn.Module) -> None:
    """Notice when a converted layer of a model that lives on is gone."""
    owner, key = weakref.ref(model), id(module)

    def gone(_: Any) -> None:
        _watched.pop(key, None)
        if owner() is not None:
            _lost.append((owner, name))
            if _say_what_is_lost not in region.notices:
                region.notices.append(_say_what_is_lost)

    _watched[key] = weakref.ref(module, gone)


def unwatch(module: nn.Module) -> None:
    """For a layer that te_mx itself gives back."""
    _watched.pop(id(module), None)


def _say_what_is_lost() -> None:
    """Called when a region is entered: what is in the place of layers that are gone?"""
    replaced = []
    while _lost:
        owner, name = _lost.pop(0)
        model = owner()
        try:
            now = None if model is None else model.get_submodule(name)
        except AttributeError:  # removed
            continue
        if now is not None and not isinstance(now, Freezable) and list(now.parameters()):
            replaced.append((name, type(now)))
    if not replaced:
        return
    name, kind = replaced[0]
    warnings.warn(
        f"{len(replaced)} layers that te_mx.convert_model converted were replaced since, first "
        f"{name!r} by a {kind.__module__}.{kind.__qualname__}, and are not quantized. Whatever "
        "replaces nn.Linear layers (accelerate's fp8, torchao's conversions) takes te_mx.Linear "
        "for one: use one of the two, or leave te_mx.Linear out with its filter function",
        ConversionWarning,
        stacklevel=3,
    )
