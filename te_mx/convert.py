"""convert_model and revert_model: nn.Linear layers of a model become te_mx.Linear, and back, and so
do the layers of other libraries that te_mx/integrations knows.

A layer is converted by changing its class, not by building a new module. So everything that belongs
to it stays by
construction: the module's identity (shared modules, references in user code), its parameters (tied
weights, optimizer state, device, dtype, requires_grad, meta tensors), its hooks and its training
mode.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from te_mx import auto_filter
from te_mx.arguments import check_flag, check_module, check_size, shown
from te_mx.bound import Binding, bind, bindings, shape_of, unbind
from te_mx.conversion_report import (
    BOUND,
    CONVERTED,
    FUSED,
    REVERTED,
    SKIPPED,
    WOULD_BIND,
    WOULD_CONVERT,
    WOULD_FUSE,
    ConversionReport,
    LayerReport,
)
from te_mx.dispatch.fused import Activation
from te_mx.fuse import Fusion, Plan, fuse_all, plan_fusions
from te_mx.fuse import unfuse as unfuse_layers
from te_mx.fuse_in_place import NOTHING, fuse_in_place, plan_in_place, unfuse_in_place
from te_mx.integrations import conv1d, torchtitan, transformers_experts
from te_mx.integrations.seam import InPlace, Seam, class_of
from te_mx.matrices import describe
from te_mx.nn.checks import FLOATS
from te_mx.nn.converted import ConversionWarning, unwatch, watch
from te_mx.nn.linear import Linear
from te_mx.nn.mx_module import MXModule
from te_mx.recipe import resolve_recipe

# What te_mx.Linear keeps on an instance beyond nn.Linear.
_OWN_ATTRIBUTES = (
    "name", "return_bias", "init_method", "fuse_wgrad_accumulation", "save_original_input",
    "delay_wgrad_compute", "_converted", "_bound", "_seen", "_ran", "_microbatch", "_frozen",
    "_split", "_tag", "_delayed", "_wgrad_hooks", "_gate",
)  # fmt: skip
# Arguments that nn.Linear has nothing for.
_ONLY_OURS = ("return_bias", "fuse_wgrad_accumulation", "delay_wgrad_compute")
_SEAMS = (conv1d.SEAM, transformers_experts.SEAM, torchtitan.SEAM)


def convert_model(
    model: nn.Module,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | str | None = None,
    tokens: int = 8192,
    dry_run: bool = False,
    fuse: bool = False,
    recipe: Any = None,
) -> ConversionReport:
    """Turn every nn.Linear of `model` into a te_mx.Linear, in place, and have the Conv1D of GPT-2
    and stacked experts (those of Transformers, torchtitan's GroupedExperts) run in MXFP8.

    Exact nn.Linear instances are converted; subclasses have behaviour of their own and are skipped
    with the reason. Layers such as lm_head are converted too, unless `filter_fn` says otherwise.
    A layer of another library keeps its class, as a subclass of it, and outside of te_mx.autocast
    the forward that it had. docs/integrations.md has more.

    Modules that multiply in other ways stay as they are; the report says how much of the model that
    is. A `ConversionWarning` is given
    where nothing was converted, once in a process where a converted layer trains although no
    te_mx.autocast was entered yet, and when a region is entered after something else replaced
    converted layers.

    Args:
        model: may itself be an nn.Linear.
        filter_fn: ``filter_fn(module, fqn) -> bool`` for each nn.Linear, Conv1D and experts module;
            False keeps the layer. A module that has several names is kept if it says False to any
            of them. It is asked about every layer before the first one changes. "auto" keeps the
            nn.Linear layers that are too small to gain 1.05x over bf16 in a forward and backward
            pass of `tokens` tokens, as predicted from measured rates (te_mx/dispatch/cost.py) for
            the recipe and for the device where the weights lie now; and those for which nothing was
            measured. The report has the ratios.
        tokens: rows of the input of a layer in one step, for "auto".
        dry_run: report only.
        fuse: also fuse what surrounds the layers; `revert_model` goes back. Every fusion, and every
            one that was not done with the reason, is in the report.

            In models of any making nothing moves, and no name in the state_dict changes: MLP blocks
            (``down(act(gate(x)) * up(x))``, ``fc2(act(fc1(x)))``, whatever the layers are called)
            run as one step; so do, in eager mode, RMSNorm and LayerNorm of any class, which also
            quantize their result for the converted layers that read it; the output projection of
            sdpa and flash attention keeps the tensor that attention keeps for backward anyway. What
            a module computes is found out by running its forward on stand-ins for its layers. A
            block whose layers something replaces, hooks or freezes later runs its own forward
            again, and `te_mx.audit` says so.

            Layers that follow each other in an nn.Sequential become one module: normalization +
            Linear a te_mx.LayerNormLinear; Linear + GELU, SiLU or ReLU + Linear back to the first
            width, with a normalization in front or without, a te_mx.LayerNormMLP. nn.LayerNorm and
            nn.RMSNorm count as normalizations. The parameters stay the same objects, but their
            names in the state_dict change.

            Experts of Transformers compute their gate in one step that rounds once, and keep less
            for backward.
        recipe: bound to every te_mx module of the model, those that were there before included, but
            for those that a `filter_fn`, which is asked about them too, says False to. They run
            with it without te_mx.autocast; inside a region, enabled or not, that counts. It goes
            with the modules when they are copied, pickled or moved, and is in no state_dict. A
            later call with another recipe binds that one instead, one with None, the default,
            leaves what is bound; `revert_model` removes it. Not for between a forward and its
            backward: what is recomputed there would run with the new one.

    Returns:
        A `ConversionReport`; print it.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value. Whatever is raised, also by
            `filter_fn`: the model is unchanged then.
        NotImplementedError: `recipe` is one that te_mx does not have.
    """
    _check(model, filter_fn, dry_run=dry_run, fuse=fuse)
    tokens = check_size("tokens", tokens, 1)
    resolved = None if recipe is None else resolve_recipe(recipe)
    settings = resolve_recipe(recipe).settings

    def keeps(module: nn.Module, name: str) -> bool:
        if callable(filter_fn):
            return not filter_fn(module, name)
        return filter_fn == "auto" and type(module) is nn.Linear and auto(module)[0]

    def auto(module: nn.Linear) -> tuple[bool, str]:
        return auto_filter.too_small(module, tokens, settings)

    # First decide about everything, which may raise; then change.
    plans: list[Plan] = []
    in_place = NOTHING
    layers: list[LayerReport] = []
    if fuse:
        fusions, plans = plan_fusions(model, why_not, keeps)
        taken = {layer for plan in plans for layer in plan.layers}
        others, in_place = plan_in_place(model, why_not, keeps, taken)
        fusions += others
        done = WOULD_FUSE if dry_run else FUSED
        layers = [_fusion_row(fusion, done) for fusion in fusions]
    present: list[Binding] = []
    if resolved is not None:
        present = bindings(model, keeps)
        layers += [_bound_row(binding, WOULD_BIND if dry_run else BOUND) for binding in present]
    done_with = {id(layer) for plan in plans for layer in plan.layers}
    done_with |= {id(binding.module) for binding in present}
    chosen: list[tuple[nn.Module, str]] = []
    gates: dict[int, Activation | str] = {}  # of experts, by id
    for module, names in _layers(model):
        if id(module) in done_with:
            continue
        seam = _seam_of(module)
        reason = seam.why_not(module) if seam is not None else why_not(module)
        asked = filter_fn == "auto" and seam is None and not reason
        said = auto(module)[1] if asked else ""
        if not reason and any(keeps(module, name) for name in names):
            reason = said or "excluded by filter_fn"
        if reason:
            layers.append(_row(module, names, SKIPPED, reason))
            continue
        chosen.append((module, names[0]))
        note = "; ".join(part for part in (said, _fast_path_note(model, names[0])) if part)
        if fuse and seam is not None and seam.gate is not None:
            gates[id(module)] = seam.gate(module)
            note = _gate_note(gates[id(module)])
        layers.append(_row(module, names, WOULD_CONVERT if dry_run else CONVERTED, note))
    if dry_run:
        would = {module for module, _ in chosen} | {m for plan in plans for m in plan.layers}
        return ConversionReport(model, layers, would, resolved)
    made = fuse_all(plans)
    for module, name in chosen:
        seam = _seam_of(module)
        module.__class__ = class_of(seam.mixin, type(module)) if seam is not None else Linear
        module.__dict__["name"] = name
        if isinstance(gate := gates.get(id(module)), Activation):
            module.__dict__["_gate"] = gate
    for layer, name in [*((m, m.name or "") for m in made), *chosen]:
        layer.__dict__["_converted"] = True
        watch(model, name, layer)
    fuse_in_place(in_place)
    if resolved is not None:
        new: list[Any] = [*made, *(module for module, _ in chosen)]
        bind([*new, *(binding.module for binding in present)], resolved)
    report = ConversionReport(model, layers, recipe=resolved)
    if not any(isinstance(module, MXModule) for module in model.modules()):
        warnings.warn(
            f"te_mx.convert_model converted nothing: {_why_nothing(report)}",
            ConversionWarning,
            stacklevel=2,
        )
    return report


def _check(model: Any, filter_fn: Any, **flags: Any) -> None:
    check_module(model)
    if isinstance(filter_fn, str) and filter_fn != "auto":
        raise ValueError(
            f'filter_fn must be "auto" or a function of (module, name), got {shown(filter_fn)}'
        )
    if filter_fn is not None and not isinstance(filter_fn, str) and not callable(filter_fn):
        raise TypeError(
            f'filter_fn must be "auto" or a function of (module, name), got {shown(filter_fn)}'
        )
    for name, value in flags.items():
        check_flag(name, value)


def _why_nothing(report: ConversionReport) -> str:
    """Of a report without converted layers."""
    kind = type(report.model).__name__
    if reasons := Counter(report.skipped.values()).most_common(1):
        ((reason, _),) = reasons
        why = f"all {len(report)} nn.Linear of {kind} were skipped, most because: {reason}"
    else:
        why = f"{kind} has no nn.Linear"
    return f"{why}; {describe(report.matrices)}" if report.matrices else why


def revert_model(model: nn.Module) -> ConversionReport:
    """Turn every te_mx.Linear of `model` into an nn.Linear, in place, and give layers of other
    libraries their own class back; the counterpart of `convert_model`.

    Layers that were built as te_mx.Linear are turned too. Skipped with the reason: layers that
    nn.Linear cannot stand in for (frozen weights, return_bias, parameters_split,
    fuse_wgrad_accumulation, delay_wgrad_compute). Blocks and normalizations that ``fuse=True``
    fused where they stand get their own class back, modules that it made become the layers that
    they were made of; te_mx.LayerNormLinear and te_mx.LayerNormMLP that were built as such
    stay, with the reason. Bound recipes are removed, also from modules that stay.
    """
    check_module(model)
    unbind(model)
    given_back = [*unfuse_in_place(model), *unfuse_layers(model)]
    layers = [_fusion_row(fusion, REVERTED) for fusion in given_back]
    for module, names in _layers(model):
        in_place = isinstance(module, InPlace)
        if not (in_place or isinstance(module, Linear)):
            continue
        reason = _why_not_reverted(module)
        if not reason:
            for attribute in _OWN_ATTRIBUTES:
                module.__dict__.pop(attribute, None)
            module.__class__ = module._plain_class if in_place else nn.Linear
            unwatch(module)
        layers.append(_row(module, names, SKIPPED if reason else REVERTED, reason))
    return ConversionReport(model, layers)


def _why_not_reverted(module: Any) -> str:
    """Why a converted layer stays as it is, or an empty string."""
    in_place = isinstance(module, InPlace)
    made = class_of(module._mixin, module._plain_class) if in_place else Linear
    if type(module) is not made:
        return f"its class is {type(module).__name__}, a subclass of te_mx.{made.__name__}"
    if module._frozen is not None:
        return "frozen: call te_mx.unfreeze_weights first"
    if in_place:
        return ""
    if module._split is not None:
        return "nn.Linear has no parameters_split"
    own = [name for name in _ONLY_OURS if getattr(module, name)]
    return f"nn.Linear has no {' and no '.join(own)}" if own else ""


def why_not(module: Any) -> str:
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
    if not isinstance(weight, torch.Tensor) or type(weight) not in (nn.Parameter, torch.Tensor):
        return f"its weight is a {type(weight).__name__}, not a plain parameter"
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}; MXFP8 takes float32, bfloat16 and float16"
    return ""


def _seam_of(module: nn.Module) -> Seam | None:
    """What knows a layer of another library; None for an nn.Linear and for all others."""
    if isinstance(module, nn.Linear):
        return None
    return next((seam for seam in _SEAMS if seam.takes(module)), None)


def _layers(model: nn.Module) -> list[tuple[Any, list[str]]]:
    """Every nn.Linear and every layer that a seam knows once, with all of its names; the root is
    named ""."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) or _seam_of(module) is not None:
            found.setdefault(id(module), (module, []))[1].append(name)
    return list(found.values())


def _row(module: Any, names: list[str], status: str, note: str) -> LayerReport:
    seam = _seam_of(module)
    kind = "" if seam is None else type(module).__name__
    shape = f"{module.in_features} -> {module.out_features}" if seam is None else seam.shape(module)
    shared = f"shared: also {', '.join(names[1:])}" if len(names) > 1 else ""
    notes = "; ".join(part for part in (kind, note, shared) if part)
    return LayerReport(names[0] or "(root)", status, shape, notes)


def _bound_row(binding: Binding, status: str) -> LayerReport:
    kind = type(binding.module).__name__
    return LayerReport(
        binding.name or "(root)", status, shape_of(binding.module), f"already a te_mx.{kind}"
    )


def _fusion_row(fusion: Fusion, done: str) -> LayerReport:
    name, shape, kinds, reason = fusion
    note = f"{kinds} not fused: {reason}" if reason else kinds
    return LayerReport(name, SKIPPED if reason else done, shape, note)


def _gate_note(gate: Activation | str) -> str:
    return f"gate not fused: {gate}" if isinstance(gate, str) else f"gate fused: {gate.name}"


def _fast_path_note(model: nn.Module, name: str) -> str:
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.TransformerEncoderLayer):
        return (
            "nn.TransformerEncoderLayer skips it in eval mode without grad, unless "
            "torch.backends.mha.set_fastpath_enabled(False)"
        )
    return ""
