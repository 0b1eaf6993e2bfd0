"""convert_model and revert_model: nn.Linear layers of a model become te_mx.Linear, and back.

A layer is converted by changing its class, not by building a new module. So everything that belongs
to it stays by
construction: the module's identity (shared modules, references in user code), its parameters (tied
weights, optimizer state, device, dtype, requires_grad, meta tensors), its hooks and its training
mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from te_mx.fuse import Fusion
from te_mx.fuse import fuse as fuse_layers
from te_mx.fuse import unfuse as unfuse_layers
from te_mx.nn.checks import FLOATS
from te_mx.nn.linear import Linear
from te_mx.report import table

CONVERTED, WOULD_CONVERT, REVERTED, SKIPPED = "converted", "would convert", "reverted", "skipped"
FUSED, WOULD_FUSE = "fused", "would fuse"

# What te_mx.Linear keeps on an instance beyond nn.Linear.
_OWN_ATTRIBUTES = (
    "name", "return_bias", "init_method", "fuse_wgrad_accumulation", "save_original_input",
    "delay_wgrad_compute", "_seen", "_microbatch", "_frozen", "_split", "_tag",
    "_delayed", "_wgrad_hooks",
)  # fmt: skip
# Arguments that nn.Linear has nothing for.
_ONLY_OURS = ("return_bias", "fuse_wgrad_accumulation", "delay_wgrad_compute")


class LayerReport(NamedTuple):
    """One layer: `status` is "converted", "would convert" (dry run), "fused", "would
    fuse", "reverted" or "skipped";
    `note` says why."""

    name: str
    status: str
    shape: str
    note: str


class ConversionReport:
    """What `convert_model` or `revert_model` did: iterable over `LayerReport`, printable as a
    table.

    `model` is the model itself: layers change in place, also when the model is a single nn.Linear.
    """

    def __init__(self, model: nn.Module, layers: list[LayerReport]) -> None:
        self.model = model
        self.layers = layers

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def count(self, status: str) -> int:
        """How many layers have this status."""
        return sum(layer.status == status for layer in self.layers)

    @property
    def converted(self) -> list[str]:
        """Names of the layers that were converted (or would be, in a dry run)."""
        return [layer.name for layer in self.layers if layer.status in (CONVERTED, WOULD_CONVERT)]

    @property
    def fused(self) -> list[str]:
        """Names of the modules that layers were fused into (or would be, in a dry run)."""
        return [layer.name for layer in self.layers if layer.status in (FUSED, WOULD_FUSE)]

    @property
    def skipped(self) -> dict[str, str]:
        """Names of the layers that stay as they are, with the reason."""
        return {layer.name: layer.note for layer in self.layers if layer.status == SKIPPED}

    def __str__(self) -> str:
        counts = Counter(layer.status for layer in self.layers)
        summary = ", ".join(f"{n} {status}" for status, n in counts.items()) or "none"
        head = f"{type(self.model).__name__}: linear layers: {summary}"
        return head if not self.layers else f"{head}\n{table(LayerReport._fields, self.layers)}"

    __repr__ = __str__


def convert_model(
    model: nn.Module,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    dry_run: bool = False,
    fuse: bool = False,
) -> ConversionReport:
    """Turn every nn.Linear of `model` into a te_mx.Linear, in place.

    Exact nn.Linear instances are converted; subclasses have behaviour of their own and are skipped
    with the reason. Layers such as lm_head are converted too, unless `filter_fn` says otherwise.

    Args:
        model: may itself be an nn.Linear.
        filter_fn: ``filter_fn(module, fqn) -> bool`` for each nn.Linear; False keeps the layer. A
            module that has several names is kept if it says False to any of them.
        dry_run: report only.
        fuse: first turn layers that follow each other in an nn.Sequential into one module each:
            normalization + Linear into te_mx.LayerNormLinear; Linear + GELU, SiLU or ReLU + Linear
            back to the first width, with a normalization in front or without, into
            te_mx.LayerNormMLP. nn.LayerNorm and nn.RMSNorm count as normalizations. The parameters
            stay the same objects, but their names in the state_dict change; `revert_model` goes
            back. Every fusion, and every one that was not done with the reason, is in the report.

    Returns:
        A `ConversionReport`; print it.
    """
    layers: list[LayerReport] = []
    fused: set[int] = set()
    if fuse:
        fusions, fused = fuse_layers(
            model,
            why_not,
            lambda module, name: filter_fn is not None and not filter_fn(module, name),
            dry_run,
        )
        done = WOULD_FUSE if dry_run else FUSED
        layers = [_fusion_row(fusion, done) for fusion in fusions]
    for module, names in _linears(model):
        if id(module) in fused:
            continue
        reason = why_not(module)
        if (
            not reason
            and filter_fn is not None
            and not all(filter_fn(module, name) for name in names)
        ):
            reason = "excluded by filter_fn"
        if reason:
            layers.append(_row(module, names, SKIPPED, reason))
            continue
        if not dry_run:
            module.__class__ = Linear
            module.__dict__["name"] = names[0]
        note = _fast_path_note(model, names[0])
        layers.append(_row(module, names, WOULD_CONVERT if dry_run else CONVERTED, note))
    return ConversionReport(model, layers)


def revert_model(model: nn.Module) -> ConversionReport:
    """Turn every te_mx.Linear of `model` into an nn.Linear, in place; the counterpart of
    `convert_model`.

    Layers that were built as te_mx.Linear are turned too. Skipped with the reason: layers that
    nn.Linear cannot stand in for (frozen weights, return_bias, parameters_split,
    fuse_wgrad_accumulation, delay_wgrad_compute). Modules that ``fuse=True`` made become the layers
    that they were made of; te_mx.LayerNormLinear and te_mx.LayerNormMLP that were built as such
    stay, with the reason.
    """
    layers = [_fusion_row(fusion, REVERTED) for fusion in unfuse_layers(model)]
    for module, names in _linears(model):
        if not isinstance(module, Linear):
            continue
        if type(module) is not Linear:
            reason = f"its class is {type(module).__name__}, a subclass of te_mx.Linear"
        elif module._frozen is not None:
            reason = "frozen: call te_mx.unfreeze_weights first"
        elif module._split is not None:
            reason = "nn.Linear has no parameters_split"
        elif own := [name for name in _ONLY_OURS if getattr(module, name)]:
            reason = f"nn.Linear has no {' and no '.join(own)}"
        else:
            for attribute in _OWN_ATTRIBUTES:
                module.__dict__.pop(attribute, None)
            module.__class__ = nn.Linear  # type: ignore[assignment]
            reason = ""
        layers.append(_row(module, names, SKIPPED if reason else REVERTED, reason))
    return ConversionReport(model, layers)


def why_not(module: nn.Linear) -> str:
    """Why this layer is not converted, or an empty string."""
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
    if not isinstance(weight, torch.Tensor) or type(weight) not in (nn.Parameter, torch.Tensor):
        return f"its weight is a {type(weight).__name__}, not a plain parameter"
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}; MXFP8 takes float32, bfloat16 and float16"
    return ""


def _linears(model: nn.Module) -> list[tuple[nn.Linear, list[str]]]:
    """Every nn.Linear once, with all of its names; the root is named ""."""
    found: dict[int, tuple[nn.Linear, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            found.setdefault(id(module), (module, []))[1].append(name)
    return list(found.values())


def _row(module: nn.Linear, names: list[str], status: str, note: str) -> LayerReport:
    shared = f"shared: also {', '.join(names[1:])}" if len(names) > 1 else ""
    notes = "; ".join(part for part in (note, shared) if part)
    return LayerReport(
        names[0] or "(root)", status, f"{module.in_features} -> {module.out_features}", notes
    )


def _fusion_row(fusion: Fusion, done: str) -> LayerReport:
    name, shape, kinds, reason = fusion
    note = f"{kinds} not fused: {reason}" if reason else kinds
    return LayerReport(name, SKIPPED if reason else done, shape, note)


def _fast_path_note(model: nn.Module, name: str) -> str:
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.TransformerEncoderLayer):
        return (
            "nn.TransformerEncoderLayer skips it in eval mode without grad, unless "
            "torch.backends.mha.set_fastpath_enabled(False)"
        )
    return ""
