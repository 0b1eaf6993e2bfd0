"""Loading a state_dict into one module: all of it or, where something is wrong, nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from te_mx.arguments import is_dense, shown
from te_mx.nn import foreign_state
from te_mx.nn.frozen_state import codes_alone, read_codes, take_codes


def load_module(
    module: Any, load_plain: Callable[..., None], state_dict: Any, prefix: str,
    local_metadata: Any, strict: bool, missing_keys: list[str], unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:  # fmt: skip
    """nn.Module._load_from_state_dict, for codes too. `load_plain` is nn.Module's own, which
    overwrites one parameter after the other and only says what did not fit.

    Missing and unexpected keys are reported as ever and keep nothing else from being loaded:
    checkpoints in several files come in calls that each have a part.
    """
    before = len(error_msgs)
    rest = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
    hooks = module._load_state_dict_pre_hooks
    for hook in hooks.values():  # before the checks, because they may rename
        hook(state_dict, prefix, *rest)
    foreign_state.adapt(module, state_dict, prefix, error_msgs)
    module._adapt_state_dict(state_dict, prefix, error_msgs)
    codes = read_codes(module, state_dict, prefix, local_metadata, missing_keys, error_msgs)
    _check(module, state_dict, prefix, codes.names, error_msgs)
    if len(error_msgs) > before:
        for key in [k for k in state_dict if k.startswith(prefix) and "." in k[len(prefix) :]]:
            del state_dict[key]  # of parametrizations, which load by themselves after this
        return
    take_codes(module, codes)
    module.__dict__["_load_state_dict_pre_hooks"] = OrderedDict()
    try:
        load_plain(state_dict, prefix, *rest)
    finally:
        module.__dict__["_load_state_dict_pre_hooks"] = hooks
    for key in (*codes.names, prefix + "_extra_state"):  # Transformer Engine saves _extra_state
        if key in unexpected_keys:
            unexpected_keys.remove(key)
    module._forget_copies()


def _check(
    module: Any, state_dict: Any, prefix: str, done: tuple[str, ...], error_msgs: list[str]
) -> None:
    """Append what keeps an entry from being a parameter of the module."""
    for name, parameter in module.named_parameters():
        key = prefix + name
        if key in done or key not in state_dict:
            continue
        value = state_dict[key]
        if not torch.overrides.is_tensor_like(value):
            error_msgs.append(f"{key} must be a tensor, got {type(value).__name__}")
        elif isinstance(value, torch.Tensor) and not is_dense(value):
            error_msgs.append(f"{key} must be a dense tensor, got {shown(value)}")
        elif value.element_size() == 1:
            error_msgs.append(codes_alone(key, value))
        elif value.shape != parameter.shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from "
                f"checkpoint, the shape in current model is {tuple(parameter.shape)}"
            )
