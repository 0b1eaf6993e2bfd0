"""The layers that convert_model turns to: which, why one stays, and rows of the report."""

import inspect
import re
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from te_mx.conversion.report import SKIPPED, LayerReport
from te_mx.fusion.sequences import Fusion
from te_mx.integrations import conv1d, torchtitan, transformers_experts
from te_mx.integrations.seam import Seam
from te_mx.nn.base import MXModule, names_of
from te_mx.nn.checks import FLOATS
from te_mx.nn.linear import Linear
from te_mx.weights.ranks import is_spread

_SEAMS = (conv1d.SEAM, transformers_experts.SEAM, torchtitan.SEAM)
_KEPT_IN_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def seam_of(module: nn.Module) -> Seam | None:
    """What knows a layer of another library; None for an nn.Linear and for all others."""
    if isinstance(module, nn.Linear):
        return None
    return next((seam for seam in _SEAMS if seam.takes(module)), None)


def layers_of(model: nn.Module) -> list[tuple[Any, list[str]]]:
    """Every nn.Linear and layer that a seam knows, once, with all its names; the root is ""."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) or seam_of(module) is not None:
            found.setdefault(id(module), (module, []))[1].append(name)
    return list(found.values())


def asked_about(module: Any, name: str) -> tuple[tuple[str, ...], str]:
    """The names of the weights of a layer, and its module type, that a recipe is asked about: those
    of the te_mx module that it is or will be."""
    if isinstance(module, MXModule):
        return module._names(name), module._module_type
    seam = seam_of(module)
    if seam is None:
        return (name,), "linear"
    keys = inspect.getattr_static(seam.mixin, "_weight_keys")
    if isinstance(keys, property):
        assert keys.fget is not None
        keys = keys.fget(module)
    kind: str = seam.mixin._module_type
    return names_of(name, keys), kind


def why_not_linear(module: Any) -> str:
    """Why this nn.Linear is not converted, or an empty string."""
    kind = type(module)
    if isinstance(module, Linear):
        return "already a te_mx.Linear"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "its owner (nn.MultiheadAttention) computes with its weight and never calls it"
    if isinstance(module, nn.LazyLinear):
        return "lazy: its shape is not known yet; run a forward first"
    if parametrize.is_parametrized(module):
        return "parametrized, which made its class a subclass: convert first, then parametrize"
    if kind is not nn.Linear:
        return f"its class is {kind.__module__}.{kind.__qualname__}, a subclass of nn.Linear"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance: convert first, then wrap"
    weight = module.weight
    plain = type(weight) in (nn.Parameter, torch.Tensor) or is_spread(weight)
    if not isinstance(weight, torch.Tensor) or not plain:
        return f"its weight is a {type(weight).__name__}, not a plain parameter"
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}; te_mx takes float32, bfloat16 and float16"
    return ""


# --------------------------------------------------------------------------------- rows of a report
def row(module: Any, names: list[str], status: str, note: str) -> LayerReport:
    """The row of a layer with all of its names."""
    kind = "" if seam_of(module) is None else type(module).__name__
    shared = f"shared: also {', '.join(names[1:])}" if len(names) > 1 else ""
    notes = "; ".join(part for part in (kind, note, shared) if part)
    return LayerReport(names[0] or "(root)", status, shape_of(module), notes)


def fusion_row(fusion: Fusion, done: str) -> LayerReport:
    """The row of a fusion that was done, or the reason why not."""
    name, shape, kinds, reason = fusion
    note = f"{kinds} not fused: {reason}" if reason else kinds
    return LayerReport(name, SKIPPED if reason else done, shape, note)


def shape_of(module: Any) -> str:
    """The widths of a layer, or of a te_mx module of any family."""
    if (seam := seam_of(module)) is not None:
        return seam.shape(module)
    if hasattr(module, "ffn_hidden_size"):
        return f"{module.hidden_size} -> {module.ffn_hidden_size} -> {module.hidden_size}"
    return f"{module.in_features} -> {module.out_features}"


def protected_in(model: nn.Module) -> dict[int, str]:
    """Why a module of a model of Transformers stays in fp32, whatever dtype that is loaded in, by
    id: one of its own parameters is among those that the model, or a model inside of it, names in
    ``_keep_in_fp32_modules`` or ``_keep_in_fp32_modules_strict``. A name stands for whole parts of
    a parameter's path, as Transformers reads it."""
    found: dict[int, str] = {}
    for owner in model.modules():
        for attribute in _KEPT_IN_FP32:
            for entry in getattr(owner, attribute, None) or ():
                words = re.escape(str(entry)).replace(r"\*", ".*")
                pattern = re.compile(rf"(^|\.){words}($|\.)")
                for path, module in owner.named_modules(remove_duplicate=False):
                    names = [f"{path}.{name}" for name in module._parameters]
                    if any(pattern.search(name) for name in names):
                        kind = type(owner).__name__
                        found.setdefault(
                            id(module), f"{kind} keeps it in fp32 ({attribute}: {entry!r})"
                        )
    return found
