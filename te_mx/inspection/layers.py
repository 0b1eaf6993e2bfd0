"""The linear layers of a model that are looked at, and a model that is the same afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from te_mx.api.memory import is_layer
from te_mx.context.region import Region, active_region, entered_again
from te_mx.fusion.transposed_linear import TransposedLinear
from te_mx.nn.base import MXModule
from te_mx.nn.checks import FLOATS
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.runtime.arguments import is_dense

# What a forward of a te_mx module leaves on it: as if nothing ran before. And what is off while it
# is looked at: a place of its own for the weight gradient changes no number.
_LEFT = ("_seen", "_ran")
_OFF = ("_converted", "fuse_wgrad_accumulation", "delay_wgrad_compute")


class Layer(NamedTuple):
    """A module with linear steps: their names, "name", or "name.fc1" and "name.fc2"."""

    module: nn.Module
    kind: str
    steps: tuple[str, ...]

    @property
    def grouped(self) -> bool:
        """Whether each of its products is one of the same step."""
        return isinstance(self.module, GroupedLinear)

    @property
    def transposed(self) -> bool:
        """Whether its weight is [in, out]."""
        return isinstance(self.module, TransposedLinear)


def layers_of(
    model: nn.Module, keep: Callable[[nn.Module, str], bool]
) -> tuple[list[Layer], dict[str, str]]:
    """Every nn.Linear and every linear te_mx module, once; and the names of those that cannot be
    looked at, with the reason.

    Raises:
        RuntimeError: a te_mx module holds codes only.
        ValueError: a parameter is on the meta device, or not initialized.
    """
    found: list[Layer] = []
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if not is_layer(module) or not keep(module, name):
            continue
        name = name.replace("_orig_mod.", "") or "(root)"  # torch.compile's
        reason = _why_not(module, name)
        if reason:
            skipped[name] = reason
            continue
        steps: tuple[str, ...] = (name,)
        keys = module._weight_keys if isinstance(module, MXModule) else ()
        if len(keys) > 1:
            steps = tuple(f"{name}.{key.removesuffix('_weight')}" for key in keys)
        kind = f"{type(module).__module__.split('.')[0]}.{type(module).__name__}"
        found.append(Layer(module, kind, steps))
    return found, skipped


def _why_not(module: nn.Module, name: str) -> str:
    if isinstance(module, MXModule):
        module._source.needs_values(
            RuntimeError,
            f"inspect: the layer {name!r} of model holds codes and no high-precision weight; call "
            "te_mx.unfreeze_weights(model, dequantize=True) first, or inspect before weights are "
            "frozen",
        )
    for key, value in module.named_parameters(recurse=False):
        if is_lazy(value) or value.is_meta:
            raise ValueError(
                f"inspect: parameter {key} of {name!r} in model has no values (it is lazy or on "
                "the meta device); load the model first"
            )
        if type(value) not in (nn.Parameter, Tensor) or not is_dense(value):
            return f"its {key} is a {type(value).__name__}, not a plain dense tensor"
        if value.dtype not in FLOATS:
            return f"its {key} is {value.dtype}, not float32, bfloat16 or float16"
    return ""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A model whose buffers, and what te_mx modules remember, are what they were afterwards; random
    numbers of torch and of Python go on as if nothing had run. te_mx modules run in high precision
    inside.
    """
    places = {t.device for t in (*model.parameters(), *model.buffers())}
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        for place in places:
            if place.type not in ("cpu", "meta"):
                stack.callback(*_generator(place))
        for module in model.modules():
            stack.callback(_restore_buffers, module, dict(module._buffers), _copies(module))
            if isinstance(module, MXModule):
                words = module.__dict__
                held = {key: words[key] for key in (*_LEFT, *_OFF) if key in words}
                stack.callback(_restore_words, words, held)
                _restore_words(words, dict.fromkeys(_OFF, False))
        # A region where MXFP8 is off wins over recipes that are bound.
        stack.enter_context(entered_again(Region(None, None, active_region())))
        yield


def _copies(module: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        return {k: b.clone() for k, b in module._buffers.items() if b is not None}


def _restore_buffers(module: nn.Module, held: dict[str, Any], copies: dict[str, Tensor]) -> None:
    """The same tensors, with the values that they had."""
    module._buffers.clear()
    module._buffers.update(held)
    with torch.no_grad():
        for key, value in copies.items():
            now = held[key]
            if now.shape != value.shape:
                now.resize_(value.shape)
            if not _same(now, value):
                now.copy_(value)


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape have the same bytes. What did not change is not written,
    because someone else's backward may be waiting for it."""
    if not is_dense(x):
        return False
    one, other = (t.resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (x, y))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _generator(place: torch.device) -> tuple[Any, ...]:
    """What to call to have the random numbers of a device go on from here."""
    module = torch.get_device_module(place)
    if not signature(module.get_rng_state).parameters:  # kinds of which there is only one
        return module.set_rng_state, module.get_rng_state()
    return module.set_rng_state, module.get_rng_state(place), place


def _restore_words(words: dict[str, Any], held: dict[str, Any]) -> None:
    for key in (*_LEFT, *_OFF):
        words.pop(key, None)
    words.update(held)
