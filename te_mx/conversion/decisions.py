"""What convert_model is going to do to a model, decided before the first layer changes."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from te_mx.context import region
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
from te_mx.dispatch.cost import costs_of, predict
from te_mx.dispatch.fused import Activation
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import choose
from te_mx.fusion.in_place import NOTHING, InPlace, plan_in_place
from te_mx.fusion.sequences import Fusion, Plan, plan_fusions
from te_mx.integrations import conv1d, torchtitan, transformers_experts
from te_mx.integrations.seam import Seam
from te_mx.nn.base import MXModule, names_of
from te_mx.nn.checks import FLOATS
from te_mx.nn.linear import Linear
from te_mx.recipe import Recipe, Settings
from te_mx.recipes.custom import ByPattern, settings_of
from te_mx.recipes.settings import Mixed
from te_mx.weights.missing import weights_read
from te_mx.weights.ranks import is_spread

# ------------------------------------------------------------------------------------------ layers
# The layers that convert_model turns to: which, why one stays, and rows of the report.
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


PLAIN = "high precision, as the recipe says"
LEAST_GAIN = 1.05  # of filter_fn="auto": the error of the predictions is about as large


class Binding(NamedTuple):
    """A te_mx module that was there before, with the first of its names."""

    name: str
    module: Any


class Wanted(NamedTuple):
    """What a call of convert_model asks for. `recipe` is bound where `binds` says so."""

    filter_fn: Callable[[nn.Module, str], bool] | str | None
    tokens: int
    recipe: Recipe
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
        auto = self.filter_fn == "auto" and type(module) is nn.Linear
        return auto and self.auto(module, name)[0]  # type: ignore[arg-type]

    def auto(self, layer: nn.Linear, name: str) -> tuple[bool, str]:
        """Whether "auto" excludes a layer, and what the report says of it."""
        settings = self.settings((name,), "linear")
        return too_small(layer, self.tokens, settings)  # type: ignore[arg-type]

    def settings(self, names: tuple[str, ...], kind: str) -> Settings | Mixed | None:
        """Those of a module whose weights have these names."""
        return settings_of(self.recipe.chosen, names, kind)

    def unlike(self, names: Sequence[str]) -> str:
        """Why linear layers of these names do not run with one recipe, or an empty string."""
        each = {self.settings((name,), "linear") for name in names} if self.recipe.custom() else ()
        return "its layers run with different recipes" if len(each) > 1 else ""

    def said(self, names: tuple[str, ...], kind: str) -> str:
        """What the report says of the formats of a module, where the recipe decides by name."""
        if not self.recipe.custom():
            return ""
        settings = self.settings(names, kind)
        how = PLAIN if settings is None else settings.formats
        function = self.recipe.qfactory  # type: ignore[attr-defined]
        patterns = [function.pattern(n) for n in names] if isinstance(function, ByPattern) else []
        by = [repr(pattern) for pattern in dict.fromkeys(patterns) if pattern is not None]
        return f"{how} by {', '.join(by)}" if by else how


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
    kept = {**_published(model, wanted), **_plain_in(model, wanted), **protected_in(model)}
    wanted = wanted._replace(protected=kept)
    rows: list[LayerReport] = []
    sequences: list[Plan] = []
    in_place = NOTHING
    if wanted.fuse:
        fusions, sequences = plan_fusions(model, wanted.why_not, wanted.keeps, wanted.unlike)
        taken = {layer for plan in sequences for layer in plan.layers}
        others, in_place = plan_in_place(model, wanted.why_not, wanted.keeps, wanted.unlike, taken)
        done = WOULD_FUSE if wanted.dry_run else FUSED
        rows = [fusion_row(fusion, done) for fusion in [*fusions, *others]]
    present = bindings(model, wanted.keeps) if wanted.binds else []
    for name, module in present:
        status = WOULD_BIND if wanted.dry_run else BOUND
        note = f"already a te_mx.{type(module).__name__}"
        if said := wanted.said(module._names(name), module._module_type):
            note += f"; {said}"
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
    said = wanted.auto(module, names[0])[1] if asked else ""
    if not reason and any(wanted.keeps(module, name) for name in names):
        reason = said or "excluded by filter_fn"
    if reason:
        return None, row(module, names, SKIPPED, reason)
    how = wanted.said(*asked_about(module, names[0])) if wanted.binds else ""
    note = "; ".join(part for part in (how, said, read.get(id(module), "")) if part)
    gate: Activation | str = ""
    if wanted.fuse and seam is not None and seam.gate is not None:
        gate = seam.gate(module)
        done = f"gate not fused: {gate}" if isinstance(gate, str) else f"gate fused: {gate.name}"
        note = f"{how}; {done}" if how else done
    made = row(module, names, WOULD_CONVERT if wanted.dry_run else CONVERTED, note)
    return Chosen(module, names[0], None if isinstance(gate, str) else gate), made


def _published(model: nn.Module, wanted: Wanted) -> dict[int, str]:
    """The nn.Linear that nobody asked for and published recipes keep, by id; a pattern of overrides
    that names one asks for it, when the recipe is bound."""
    if callable(wanted.filter_fn):
        return {}
    kept = kept_in(model)
    function = wanted.recipe.qfactory if wanted.recipe.custom() else None  # type: ignore[attr-defined]
    if wanted.binds and isinstance(function, ByPattern):
        for module, names in layers_of(model):
            if any(function.pattern(name) is not None for name in names):
                kept.pop(id(module), None)
    return kept


def _plain_in(model: nn.Module, wanted: Wanted) -> dict[int, str]:
    """The layers that a recipe which is to be bound leaves in high precision, by id.

    Raises:
        ValueError: a pattern of overrides matches no layer.
    """
    if not (wanted.binds and wanted.recipe.custom()):
        return {}
    found: dict[int, str] = {}
    known: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, MXModule):
            known += module._names(name)
    for module, names in layers_of(model):
        asked, kind = asked_about(module, names[0])
        known += asked
        if not isinstance(module, MXModule) and wanted.settings(asked, kind) is None:
            found[id(module)] = wanted.said(asked, kind)
    function = wanted.recipe.qfactory  # type: ignore[attr-defined]
    if isinstance(function, ByPattern):
        function.check_used(dict.fromkeys(known))
    return found


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


# --------------------------------------------------------------------------------- filter_fn="auto"
def too_small(layer: nn.Linear, tokens: int, settings: Settings) -> tuple[bool, str]:
    """Whether a layer is left out, and what the report says of it."""
    device = layer.weight.device
    if device.type == "meta":
        # One that torch was built for need not be there: a machine where models are prepared.
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    n, k = layer.out_features, layer.in_features
    problem = Problem(
        "gemm", place_of(device), f"{settings.x}@any", f"{settings.w}@any", tokens, n, k,
        precision=settings.precision, spread=settings.spread, rule=settings.scale_rule,
    )  # fmt: skip
    kernel = choose(problem)[0].name
    costs, where = costs_of(kernel), f"{kernel} on {device.type}"
    if costs is None or settings.backward is not None:
        return True, f'no gain is known: of {where} nothing was measured for filter_fn="auto"'
    found = predict(costs, tokens, n, k, torch.get_num_threads())
    said = f"{found.ratio:.2f}x of bf16 predicted at {tokens} tokens ({where})"
    if found.ratio < LEAST_GAIN:
        return True, f"too small to gain: {said}"
    return False, said


# ------------------------------------------------------------------------------------ bound recipes
# A module holds the settings of a bound recipe as an attribute: they are copied, pickled and moved
# with it, torch.compile guards on them, and no state_dict has them.
def bindings(model: nn.Module, keeps: Callable[[nn.Module, str], bool]) -> list[Binding]:
    """The te_mx modules of a model, each once, but those excluded under one of their names."""
    found: dict[int, Binding] = {}
    excluded = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, MXModule):
            found.setdefault(id(module), Binding(name, module))
            if keeps(module, name):  # type: ignore[arg-type]
                excluded.add(id(module))
    return [binding for key, binding in found.items() if key not in excluded]


def bind(modules: Iterable[tuple[Any, tuple[str, ...]]], recipe: Recipe) -> None:
    """Have modules, whose weights have these names, run with a recipe from now on."""
    region.install()  # what runs again did not run in a region, but must know that it did not
    for module, names in modules:
        settings = settings_of(recipe.chosen, names, module._module_type)
        module.__dict__["_bound"] = settings
        module.__dict__["_bound_plain"] = settings is None


def unbind(model: nn.Module) -> None:
    """Take bound recipes from all modules."""
    for module in model.modules():
        if isinstance(module, MXModule):
            module.__dict__.pop("_bound", None)
            module.__dict__.pop("_bound_plain", None)


# --------------------------------------------------------------------------------------- published
# What published recipes leave in high precision: the output head over a vocabulary, and what
# chooses the experts of a mixture, as DeepSeek-V3 does (arXiv 2412.19437, section 3.3.1).
_HEADS = {"lm_head", "embed_out"}
_HEADS_OF_EMBEDDINGS = {"output", "head"}  # names of other things too
_GATES = {"gate", "shared_expert_gate"}  # routers where experts are beside them
_WHY = "{}: kept in high precision as published recipes do; pass filter_fn to convert it"


def kept_in(model: nn.Module) -> dict[int, str]:
    """Why an nn.Linear stays where no filter_fn was asked, by id."""
    found: dict[int, str] = {}
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    heads = []
    for owner in model.modules():
        if callable(find := getattr(owner, "get_output_embeddings", None)):
            with contextlib.suppress(NotImplementedError):
                heads.append(find())
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is not nn.Linear:  # others stay anyway, or are te_mx's, which was asked for
            continue
        head = any(module is one for one in heads)
        if what := "head" if head else _what(model, name, module, tables):
            found.setdefault(id(module), _WHY.format(what))
    return found


def _what(model: nn.Module, name: str, layer: nn.Linear, tables: list[Tensor]) -> str:
    """ "head", "router", or an empty string."""
    path = name.split(".")
    if not _HEADS.isdisjoint(path) or any(layer.weight is table for table in tables):
        return "head"
    if path[-1] in _HEADS_OF_EMBEDDINGS and any(layer.weight.shape == t.shape for t in tables):
        return "head"
    for index, part in enumerate(path):
        if part in _GATES:
            above = model.get_submodule(".".join(path[:index]))
            if any("expert" in child and child != part for child, _ in above.named_children()):
                return "router"
    return "router" if "router" in path else ""
