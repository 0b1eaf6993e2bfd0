"""revert_model: what te_mx.convert_model changed gets the class back that it had."""

from __future__ import annotations

from typing import Any

from torch import nn

from te_mx.arguments import check_module
from te_mx.conversion.bound import unbind
from te_mx.conversion.layers import fusion_row, layers_of, row
from te_mx.conversion.report import REVERTED, SKIPPED, ConversionReport
from te_mx.fusion.in_place import unfuse_in_place
from te_mx.fusion.sequences import unfuse
from te_mx.nn.converted import unwatch
from te_mx.nn.linear import Linear
from te_mx.nn.reclassed import Reclassed, take_back, why_not_back
from te_mx.runtime.ran import end_tags

# What a converted layer keeps on its instance beyond what it had.
_OWN_ATTRIBUTES = (
    "name", "return_bias", "init_method", "fuse_wgrad_accumulation", "save_original_input",
    "keeps_given_input", "delay_wgrad_compute", "_converted", "_bound", "_seen", "_ran",
    "_microbatch", "_frozen", "_claim", "_split", "_tag", "_delayed", "_wgrad_hooks", "_gate",
)  # fmt: skip
# Arguments that nn.Linear has nothing for.
_ONLY_OURS = ("return_bias", "fuse_wgrad_accumulation", "delay_wgrad_compute")


def revert_model(model: nn.Module) -> ConversionReport:
    """Turn every te_mx.Linear of `model` into an nn.Linear, in place, and give layers of other
    libraries their own class back; the counterpart of `convert_model`.

    Layers that were built as te_mx.Linear are turned too. Skipped with the reason: layers that
    nn.Linear cannot stand in for (frozen weights, return_bias, parameters_split, a process group,
    fuse_wgrad_accumulation, delay_wgrad_compute). Blocks and normalizations that ``fuse=True``
    fused where they stand get their own class back, modules that it made become the layers that
    they were made of; te_mx.LayerNormLinear and te_mx.LayerNormMLP that were built as such
    stay, with the reason. Bound recipes are removed, also from modules that stay.
    """
    check_module(model)
    unbind(model)
    given_back = [*unfuse_in_place(model), *unfuse(model)]
    rows = [fusion_row(fusion, REVERTED) for fusion in given_back]
    for module, names in layers_of(model):
        if not isinstance(module, (Reclassed, Linear)):
            continue
        reason = _why_not(module)
        if not reason:
            _give_back(module)
        rows.append(row(module, names, SKIPPED if reason else REVERTED, reason))
    return ConversionReport(model, rows)


def _give_back(module: Any) -> None:
    end_tags(module._tag)
    if isinstance(module, Reclassed):
        take_back(module, *_OWN_ATTRIBUTES)
    else:
        for attribute in _OWN_ATTRIBUTES:
            module.__dict__.pop(attribute, None)
        module.__class__ = nn.Linear
    unwatch(module)


def _why_not(module: Any) -> str:
    """Why a converted layer stays as it is, or an empty string."""
    in_place = isinstance(module, Reclassed)
    if in_place and (reason := why_not_back(module)):
        return reason
    if not in_place and type(module) is not Linear:
        return f"its class is {type(module).__name__}, a subclass of te_mx.Linear"
    if module._frozen is not None:
        return "frozen: call te_mx.unfreeze_weights first"
    if in_place:
        return ""
    if module._split is not None:
        return "nn.Linear has no parameters_split"
    if module._shared is not None:
        return "nn.Linear has no process group (tp_group, parallel_mode)"
    own = [name for name in _ONLY_OURS if getattr(module, name)]
    return f"nn.Linear has no {' and no '.join(own)}" if own else ""
