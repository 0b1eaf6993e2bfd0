"""freeze_weights and unfreeze_weights: weights that stand still, for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_mx.autograd.operands import quantize_weight, standing_weight
from te_mx.context import current_recipe
from te_mx.nn.frozen_weight import FrozenWeight, mark_frozen, restore_master
from te_mx.nn.frozen_weight import drop_master as drop
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.nn.linear import Linear
from te_mx.ops import dequantize_2d
from te_mx.recipe import resolve_recipe


def _layers(model: nn.Module) -> list[tuple[str, Linear | GroupedLinear]]:
    found = [
        (name or "(root)", m)
        for name, m in model.named_modules()
        if isinstance(m, Linear | GroupedLinear)
    ]
    if not found:
        raise ValueError(
            f"no te_mx.Linear in {type(model).__name__}: build it with te_mx.Linear or call "
            "te_mx.convert_model first"
        )
    return found


@torch.no_grad()
def freeze_weights(model: nn.Module, drop_master: bool = False, *, recipe: Any = None) -> int:
    """Quantize the weights of every te_mx.Linear and te_mx.GroupedLinear in `model` once, for
    inference, and use them from now on.

    The layers stop training (requires_grad of their parameters is set to False, and restored by
    `unfreeze_weights`); gradients still flow through them to their inputs. Changes of a weight are
    no longer seen, except by load_state_dict; unfreeze first.

    Args:
        model: the layers in it that are frozen already stay so.
        drop_master: False keeps the parameter beside the quantized copy and, where the kernel of
            the device profits,
            a packed form of it: outside autocast the layer is nn.Linear as ever. True keeps the
            codes and scales only, 1.03 bytes a parameter, in memory and in the state_dict
            (``weight`` float8_e4m3fn [out, in] and ``weight_scale`` uint8 [out, ceil(in/32)]; such
            a state_dict loads into a new te_mx.Linear). Such a layer runs in MXFP8 outside autocast
            too, and cannot be differentiated.
        recipe: its scale rule quantizes the weights; None means the active recipe, or the default
            one.

    Returns:
        The number of layers that are frozen now.

    Raises:
        ValueError: there is no te_mx.Linear, a weight has no values yet (meta device), or
            `drop_master` meets a weight that is computed (parametrized) or split into parameters,
            and so has no place of its own.
        NotImplementedError: `drop_master` meets a te_mx.GroupedLinear.
    """
    settings = resolve_recipe(recipe if recipe is not None else current_recipe()).settings
    layers = _layers(model)
    for name, module in layers:
        if module._frozen is not None and module._frozen.dropped:
            continue
        if isinstance(module, GroupedLinear):
            if drop_master:
                raise NotImplementedError(
                    f"{name}: te_mx.GroupedLinear keeps its master weights; use drop_master=False"
                )
            if module.weights()[0].is_meta:
                raise ValueError(f"{name}: the weights are on the meta device; load values first")
            continue
        if module.whole_weight().is_meta:
            raise ValueError(
                f"{name}: the weight is on the meta device and has no values; load the weights "
                "first"
            )
        if drop_master and module._parameters.get("weight") is None:
            raise ValueError(
                f"{name}: the weight is computed by a parametrization or split into parameters, so "
                "there is no one master to drop; use drop_master=False"
            )
    for _, module in layers:
        if isinstance(module, GroupedLinear):
            module.freeze(settings)
            continue
        frozen = module._frozen or mark_frozen(module, settings)
        module.__dict__.pop("_microbatch", None)
        if frozen.dropped:
            continue
        if drop_master:
            row = quantize_weight(module.weight.detach(), frozen.settings, False, packed=False)[0]
            drop(module, row.codes, row.scales)
        elif frozen.weight is None:
            frozen.weight = standing_weight(module.whole_weight(), frozen.settings, False)
    return len(layers)


@torch.no_grad()
def unfreeze_weights(model: nn.Module, *, dequantize: bool = False) -> int:
    """Undo `freeze_weights`: weights are quantized at every forward again, and parameters train as
    before.

    Args:
        model: layers that are not frozen are left alone.
        dequantize: what to do where the master weight was dropped. False refuses; True makes a
            parameter of the original dtype from the codes (the values that the frozen layer
            computed with, not the original ones).

    Returns:
        The number of layers that were frozen.

    Raises:
        RuntimeError: a master weight was dropped and `dequantize` is False. Nothing is changed
            then.
    """
    layers = [(name, module) for name, module in _layers(model) if module._frozen is not None]
    dropped = [name for name, module in layers if module._frozen and module._frozen.dropped]
    if dropped and not dequantize:
        raise RuntimeError(
            f"the high-precision weights of {len(dropped)} layers were dropped by "
            f"freeze_weights(drop_master=True), first {dropped[0]!r}: pass dequantize=True to "
            "make parameters from the codes, or load a checkpoint into a new model"
        )
    for _, module in layers:
        frozen = module._frozen
        assert frozen is not None
        if isinstance(module, Linear) and isinstance(frozen, FrozenWeight) and frozen.dropped:
            row = frozen.operand(module)
            restore_master(
                module, dequantize_2d(row.codes, row.scales, row.fmt, row.order, frozen.dtype)
            )
        module._frozen = None
        for name, trained in frozen.trained.items():
            getattr(module, name).requires_grad_(trained)
    return len(layers)
