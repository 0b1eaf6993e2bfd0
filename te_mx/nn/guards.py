"""Whether a module that runs fused where it stands still is what was found when it was fused: its
attributes, functions, hooks and layers."""

from typing import Any

import torch
from torch import Tensor, nn

from te_mx.autograd import node
from te_mx.nn.checks import FLOATS
from te_mx.nn.linear import Linear

VALUES = (nn.Parameter, Tensor)  # the classes of tensors that fused modules take
_PLAIN = (bool, int, float, str, type(None))
_OF_MODULES = {*nn.Module().__dict__, "name"}
# Marks that libraries put on modules, come and go and change no forward.
_MARKS = ("_is_hf_", "_hf_", "_fsdp", "_ddp", "_te_mx")
# What the last forward did, kept on the instance: FUSED, why its own forward ran, or "" in high
# precision.
RAN, FUSED = "_te_mx_ran", "fused"
ON_FROZEN = "fused, on frozen weights"


def fusion_guard(module: nn.Module, but: tuple[str, ...] = ()) -> tuple[tuple[str, Any], ...]:
    """What the forward of a module may read beside parameters and the submodules `but`: its plain
    attributes, functions and other submodules, by name."""
    found: list[tuple[str, Any]] = []
    for name, value in module.__dict__.items():
        if name in _OF_MODULES or name.startswith(_MARKS):
            continue
        if isinstance(value, _PLAIN) or callable(value):
            found.append((name, value))
    found += [(name, child) for name, child in module._modules.items() if name not in but]
    return tuple(found)


def changed(module: nn.Module, before: tuple[tuple[str, Any], ...]) -> str:
    """Which of `fusion_guard` is another one now, or an empty string. Numbers are compared,
    everything else is the same object or changed."""
    attributes, children = module.__dict__, module._modules
    for name, value in before:
        now = children[name] if name in children else attributes.get(name)
        if now is not value and not (isinstance(value, (int, float, str)) and now == value):
            return name
    return ""


def hooked(module: nn.Module) -> bool:
    """Whether calling a module does more than run its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def why_not_given(x: Any) -> str:
    """Why a module does not run fused on this input, or an empty string."""
    if node.active():
        return "a transform of torch.func, or forward-mode AD, is active"
    if type(x) not in VALUES or x.dtype not in FLOATS or x.layout is not torch.strided:
        return "its input is no dense tensor in float32, bfloat16 or float16"
    return ""


def why_not_plain(name: str, layer: Any) -> str:
    """Why what is in the place of a converted layer is not just act(x @ w^T + b) on parameters of
    its own that train as usual, or an empty string."""
    if type(layer) is Linear and hooked(layer):
        return f"{name} has hooks or a forward of its own"
    return why_not_usual(name, layer)


def why_not_usual(name: str, layer: Any) -> str:
    """The same but for hooks."""
    if type(layer) is Linear and (state := layer._source.standing):
        return f"{name} is {state}"
    return _why_not_whole(name, layer)


def why_not_single(name: str, layer: Any) -> str:
    """The same as `why_not_plain`, of layers that may be frozen."""
    if type(layer) is Linear and hooked(layer):
        return f"{name} has hooks or a forward of its own"
    return _why_not_whole(name, layer)


def _why_not_whole(name: str, layer: Any) -> str:
    if type(layer) is not Linear:
        return f"{name} was replaced by a {type(layer).__name__}"
    if layer._shared is not None:
        return f"{name} is shared by a process group"
    if layer.return_bias or layer.delay_wgrad_compute or layer._parts_of("weight") != ("weight",):
        return f"{name} has return_bias, parameters_split or delay_wgrad_compute"
    return ""
