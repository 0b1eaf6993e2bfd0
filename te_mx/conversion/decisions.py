"""What convert_model is going to do to a model, decided about every layer before the first one
changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from te_mx.conversion import auto_filter
from te_mx.conversion.bound import Binding, bindings
from te_mx.conversion.layers import (
    fusion_row,
    layers_of,
    protected_in,
    row,
    seam_of,
    shape_of,
    why_not_linear,
)
from te_mx.conversion.report import (
    BOUND,
    CONVERTED,
    FAST_PATH,
    FUSED,
    SKIPPED,
    WOULD_BIND,
    WOULD_CONVERT,
    WOULD_FUSE,
    LayerReport,
)
from te_mx.dispatch.fused import Activation
from te_mx.fusion.in_place import NOTHING, InPlace, plan_in_place
from te_mx.fusion.sequences import Plan, plan_fusions
from te_mx.recipe import Settings
from te_mx.weights.weight_readers import weights_read


class Wanted(NamedTuple):
    """What a call of convert_model asks for. `settings`: those of the recipe, which is bound where
    `binds` says so."""

    filter_fn: Callable[[nn.Module, str], bool] | str | None
    tokens: int
    settings: Settings
    fuse: bool
    binds: bool
    dry_run: bool
    protected: Mapping[int, str] = MappingProxyType({})  # why the model keeps a layer, by id

    def why_not(self, layer: nn.Linear) -> str:
        """Why an nn.Linear stays, whatever the user says, or an empty string."""
        return why_not_linear(layer) or self.protected.get(id(layer), "")

    def keeps(self, module: nn.Module, name: str) -> bool:
        """Whether the user excluded a module under this name, or the model protects it."""
        if id(module) in self.protected:
            return True
        if callable(self.filter_fn):
            return not self.filter_fn(module, name)
        return self.filter_fn == "auto" and type(module) is nn.Linear and self.auto(module)[0]

    def auto(self, layer: nn.Linear) -> tuple[bool, str]:
        """Whether "auto" excludes a layer, and what the report says of it."""
        return auto_filter.too_small(layer, self.tokens, self.settings)


class Chosen(NamedTuple):
    """A layer that is converted, with the first of its names; of experts perhaps the gate that is
    computed in one step."""

    module: Any
    name: str
    gate: Activation | None


class Decisions(NamedTuple):
    """The rows of the report, and what there is to do: what is fused, the te_mx modules of before
    that get the recipe, and the layers that are converted."""

    rows: list[LayerReport]
    sequences: list[Plan]
    in_place: InPlace
    present: list[Binding]
    chosen: list[Chosen]

    def layers(self) -> set[nn.Module]:
        """The layers that te_mx will hold."""
        fused = {layer for plan in self.sequences for layer in plan.layers}
        return fused | {one.module for one in self.chosen}


def decide(model: nn.Module, wanted: Wanted) -> Decisions:
    """Decide, which may raise, for one in `filter_fn`, and changes nothing."""
    wanted = wanted._replace(protected=protected_in(model))
    rows: list[LayerReport] = []
    sequences: list[Plan] = []
    in_place = NOTHING
    if wanted.fuse:
        fusions, sequences = plan_fusions(model, wanted.why_not, wanted.keeps)
        taken = {layer for plan in sequences for layer in plan.layers}
        others, in_place = plan_in_place(model, wanted.why_not, wanted.keeps, taken)
        done = WOULD_FUSE if wanted.dry_run else FUSED
        rows = [fusion_row(fusion, done) for fusion in [*fusions, *others]]
    present = bindings(model, wanted.keeps) if wanted.binds else []
    for name, module in present:
        status, note = (
            WOULD_BIND if wanted.dry_run else BOUND,
            f"already a te_mx.{type(module).__name__}",
        )
        rows.append(LayerReport(name or "(root)", status, shape_of(module), note))
    decided = {id(layer) for plan in sequences for layer in plan.layers}
    decided |= {id(binding.module) for binding in present}
    chosen: list[Chosen] = []
    read = _read_by_others(model)
    for module, names in layers_of(model):
        if id(module) not in decided:
            one, made = _decide(module, names, wanted, read)
            rows.append(made)
            chosen += [] if one is None else [one]
    return Decisions(rows, sequences, in_place, present, chosen)


def _decide(
    module: Any, names: list[str], wanted: Wanted, read: dict[int, str]
) -> tuple[Chosen | None, LayerReport]:
    """About one layer; None where it stays as it is. `read`: what is said of layers whose weight
    something reads itself."""
    seam = seam_of(module)
    reason = seam.why_not(module) if seam is not None else wanted.why_not(module)
    reason = reason or wanted.protected.get(id(module), "")
    asked = wanted.filter_fn == "auto" and seam is None and not reason
    said = wanted.auto(module)[1] if asked else ""
    if not reason and any(wanted.keeps(module, name) for name in names):
        reason = said or "excluded by filter_fn"
    if reason:
        return None, row(module, names, SKIPPED, reason)
    note = "; ".join(part for part in (said, read.get(id(module), "")) if part)
    gate: Activation | str = ""
    if wanted.fuse and seam is not None and seam.gate is not None:
        gate = seam.gate(module)
        note = f"gate not fused: {gate}" if isinstance(gate, str) else f"gate fused: {gate.name}"
    made = row(module, names, WOULD_CONVERT if wanted.dry_run else CONVERTED, note)
    return Chosen(module, names[0], None if isinstance(gate, str) else gate), made


def _read_by_others(model: nn.Module) -> dict[int, str]:
    """What is said of each layer whose weight the forward of a module above reads itself."""
    said: dict[int, str] = {}
    for owner in model.modules():
        for _, layer in weights_read(owner):
            if isinstance(owner, nn.TransformerEncoderLayer):
                said[id(layer)] = FAST_PATH
            else:
                kind = type(owner).__name__
                said[id(layer)] = f"the forward of {kind} reads its weight too, in high precision"
    return said
