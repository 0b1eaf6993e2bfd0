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
    assign = local_metadata.get("assign_to_params_buffers", False)
    _check(module, state_dict, prefix, codes.names, assign, error_msgs)
    if len(error_msgs) > before:
        for key in [k for k in state_dict if k.startswith(prefix) and "." in k[len(prefix) :]]:
            del state_dict[key]  # of parametrizations, which load by themselves after this
        return
    # Codes last: nothing of them can fail any more, and nn.Module knows no codes.
    plain = {key: value for key, value in state_dict.items() if key not in codes.names}
    known, undo = len(missing_keys), _way_back(module, plain, prefix)
    module.__dict__["_load_state_dict_pre_hooks"] = OrderedDict()
    try:
        load_plain(plain, prefix, *rest)
        failed = len(error_msgs) > before
    except BaseException:
        undo()
        raise
    finally:
        module.__dict__["_load_state_dict_pre_hooks"] = hooks
    replaced = {prefix + name for key in codes.made for name in module._held_by(key)}
    missing_keys[known:] = [key for key in missing_keys[known:] if key not in replaced]
    if failed:
        undo()
        return
    take_codes(module, codes)
    if prefix + "_extra_state" in unexpected_keys:  # Transformer Engine saves it
        unexpected_keys.remove(prefix + "_extra_state")
    module._forget_copies()


def _way_back(module: Any, state_dict: Any, prefix: str) -> Callable[[], None]:
    """What gives the module's parameters back what they hold now. Values are kept only where
    copying into one may fail, which dense tensors of floating point numbers do not."""
    held = dict(module._parameters)
    given = {name: state_dict.get(prefix + name) for name, old in held.items() if old is not None}
    given = {name: value for name, value in given.items() if value is not None}
    if all(_copies(held[name], value) for name, value in given.items()):
        kept = []
    else:
        olds = [held[name] for name in given]
        olds = [old for old in olds if not (old.is_meta or old.is_inference())]
        kept = [(old, old.detach().clone()) for old in olds]

    def undo() -> None:
        module._parameters.update(held)
        with torch.no_grad():
            for old, value in kept:
                old.copy_(value)

    return undo


def _copies(parameter: Any, value: Any) -> bool:
    """Whether a value surely can be copied into a parameter of its shape."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return (
        type(parameter) in plain
        and type(value) in plain
        and value.is_floating_point()
        and parameter.is_contiguous()
        and not parameter.is_inference()
    )


def _check(
    module: Any, state_dict: Any, prefix: str, done: tuple[str, ...], assign: bool,
    error_msgs: list[str],
) -> None:  # fmt: skip
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
            error_msgs.append(codes_alone(key, value, state_dict))
        elif value.is_meta and not (assign or parameter.is_meta):
            error_msgs.append(f"{key} is on the meta device and has no values")
        elif value.shape != parameter.shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from "
                f"checkpoint, the shape in current model is {tuple(parameter.shape)}"
            )
