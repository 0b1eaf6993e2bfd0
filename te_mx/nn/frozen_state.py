"""Frozen weights in a state_dict.

A module without masters saves, for each weight, ``<name>`` (float8_e4m3fn [out, in]) and
``<name>_scale`` (uint8 [out, ceil(in/32)], E8M0): the names and layouts of MXFP8 checkpoints of
compressed-tensors and ModelOpt. What such a state_dict is loaded into becomes frozen without
masters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.nn.frozen_weight import Freezable
from te_mx.recipe import get_default_recipe


def save_codes(module: Freezable, destination: Any, prefix: str) -> None:
    """state_dict entries of a module without masters."""
    for key in module._weight_keys:
        codes, scales = module._codes(key)
        names = module._held_by(key)
        # Weights of several parameters are stacked: one part for each.
        parts = ([codes], [scales]) if len(names) == 1 else (codes.unbind(0), scales.unbind(0))
        for name, code, scale in zip(names, *parts, strict=True):
            destination[prefix + name] = code.view(torch.float8_e4m3fn)
            destination[f"{prefix}{name}_scale"] = scale


def load_codes(
    module: Freezable, state_dict: Any, prefix: str, local_metadata: Any, error_msgs: list[str]
) -> tuple[str, ...]:
    """Load quantized weights if the state_dict has them, which makes the module frozen without
    masters.

    Returns the keys that were dealt with here; what is wrong is appended to `error_msgs`.
    """
    names = {key: (prefix + key, f"{prefix}{key}_scale") for key in module._weight_keys}
    found = [key for key, (_, scale) in names.items() if scale in state_dict]
    if not found:
        return _without_codes(module, state_dict, names, error_msgs)
    ours = tuple(name for pair in names.values() for name in pair)
    if len(found) < len(names):
        missing = [scale for key, (_, scale) in names.items() if key not in found]
        error_msgs.append(
            f"{', '.join(missing)}: missing beside {names[found[0]][1]}; the weights of a module "
            "are frozen together"
        )
        return ours
    dropped = module._is_dropped()
    loaded = {}
    for key, (weight_name, scale_name) in names.items():
        codes, scales = state_dict.get(weight_name), state_dict[scale_name]
        if not dropped and not module._is_held(key):
            error_msgs.append(
                f"{scale_name}: a quantized weight does not load into a layer with "
                "parameters_split or a parametrized weight; build it without"
            )
            return ours
        held = module._codes(key)[0] if dropped else module._sample(key)
        shape = tuple(held.shape) if dropped else module._shape_of(key)
        problem = _problem(codes, scales, shape)
        if problem:
            error_msgs.append(f"{weight_name}, {scale_name}: {problem}")
            return ours
        codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
        if not (local_metadata.get("assign_to_params_buffers", False) or held.is_meta):
            codes, scales = (t.to(held.device, copy=True) for t in (codes, scales))
        loaded[key] = codes.detach().contiguous(), scales.detach().contiguous()
    if module._frozen is None:
        module._mark_frozen(get_default_recipe().settings)
    module._drop_masters(loaded)
    return ours


def _without_codes(
    module: Freezable, state_dict: Any, names: dict[str, tuple[str, str]], error_msgs: list[str]
) -> tuple[str, ...]:
    """A state_dict in high precision loads into anything but a module without masters."""
    if not module._is_dropped():
        return ()
    for weight_name, scale_name in names.values():
        if weight_name in state_dict:
            error_msgs.append(
                f"{weight_name} is in high precision, but the layer is frozen without its master "
                "weight; call te_mx.unfreeze_weights(model, dequantize=True) before loading"
            )
        else:
            error_msgs.append(f"{weight_name} and {scale_name} of a frozen layer are missing")
    return tuple(weight for weight, _ in names.values())


def _problem(codes: Tensor | None, scales: Tensor, shape: tuple[int, ...]) -> str:
    """What is wrong with a quantized weight in a state_dict, or an empty string."""
    if codes is None:
        return "a weight_scale needs a weight of codes beside it"
    if codes.dtype != torch.float8_e4m3fn:
        return f"codes must be float8_e4m3fn, got {codes.dtype}"
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return f"scales must be uint8 (E8M0 bytes), got {scales.dtype}"
    expected = [shape, (*shape[:-1], -(-shape[-1] // 32))]
    got = [tuple(codes.shape), tuple(scales.shape)]
    if got != expected:
        return (
            f"shapes must be {expected[0]} and {expected[1]} (one scale per 32 columns), got "
            f"{got[0]} and {got[1]}"
        )
    return ""
