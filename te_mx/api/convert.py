"""convert_model: nn.Linear layers of a model become te_mx.Linear, and the layers of other libraries
that te_mx/integrations knows run in MXFP8 too.

A layer is converted by changing its class, not by building a new module. So everything that belongs
to it stays by construction: the module's identity (shared modules, references in user code), its
parameters (tied weights, optimizer state, device, dtype, requires_grad, meta tensors), its hooks
and its training mode.

revert_model: what te_mx.convert_model changed gets the class back that it had."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from te_mx.conversion.decisions import (
    Decisions,
    Wanted,
    bind,
    decide,
    fusion_row,
    layers_of,
    row,
    seam_of,
    unbind,
)
from te_mx.conversion.report import REVERTED, SKIPPED, ConversionReport
from te_mx.fusion.class_swap import Reclassed, give, take_back, why_not_back
from te_mx.fusion.in_place import fuse_in_place, unfuse_in_place
from te_mx.fusion.sequences import fuse_all, unfuse
from te_mx.nn.base import MXModule
from te_mx.nn.converted import ConversionWarning, unwatch, watch
from te_mx.nn.linear import Linear
from te_mx.recipe import Recipe, resolve_recipe
from te_mx.runtime.arguments import check_flag, check_module, check_size, is_one_of, shown
from te_mx.runtime.kernel_log import end_tags


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
    with the reason, and so is what a model of Transformers keeps in fp32 (its
    ``_keep_in_fp32_modules`` and ``_keep_in_fp32_modules_strict``). Output heads over a vocabulary
    and routers of mixtures stay too, as published recipes have it, unless `filter_fn` asks for
    them: what ``get_output_embeddings()`` returns, layers named lm_head or embed_out, those that
    share the weight of an embedding, or have its shape and the name output or head; layers named
    router, and gates beside experts.
    A layer of another library keeps its class, as a subclass of it, and outside of te_mx.autocast
    the forward that it had. docs/integrations.md has more.

    Modules that multiply in other ways stay as they are; the report says how much that is. A
    `ConversionWarning` is given where nothing was converted, once in a process where a converted
    layer trains although no te_mx.autocast was entered yet, and when a region is entered after
    something else replaced converted layers.

    Args:
        model: may itself be an nn.Linear.
        filter_fn: ``filter_fn(module, fqn) -> bool`` for each nn.Linear, Conv1D and experts module;
            True converts it, heads and routers too, False keeps the layer. A module that has
            several names is kept if it says False to any of them. It is asked about every layer
            before the first one changes. "auto" keeps the
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
            run as one step; so do RMSNorm and LayerNorm of any class, which also quantize their
            result for the converted layers that read it; the output projection of sdpa and flash
            attention keeps the tensor that attention keeps for backward anyway; the loss of
            Transformers' language models goes over parts of the tokens, with the same bits; in
            compiled code the tables of rotary embeddings are written once, and attention gets no
            mask where eager code makes none. What a module computes is found out by running its
            forward on stand-ins for its layers. A block whose layers something replaces, hooks or
            freezes later runs its own forward again, and `te_mx.audit` says so.

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
            backward: what is recomputed there would run with the new one. Of a
            `te_mx.recipe.CustomRecipe`, or `te_mx.recipe.overrides` by names, each layer gets its
            own, and one that it leaves in high precision stays what it is; the report says so. A
            pattern of overrides that names a head or router asks for it.

    Returns:
        A `ConversionReport`; print it.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value, or a pattern of overrides
            matches no layer. Whatever is raised, also by
            `filter_fn`: the model is unchanged then.
        NotImplementedError: `recipe` is one that te_mx does not have.
    """
    _check(model, filter_fn, dry_run=dry_run, fuse=fuse)
    tokens = check_size("tokens", tokens, 1)
    resolved = None if recipe is None else copy.copy(resolve_recipe(recipe))
    # First decide about everything, which may raise; then change.
    wanted = Wanted(filter_fn, tokens, resolve_recipe(recipe), fuse, resolved is not None, dry_run)
    decisions = decide(model, wanted)
    if dry_run:
        return ConversionReport(model, decisions.rows, decisions.layers(), resolved)
    _change(model, decisions, resolved)
    report = ConversionReport(model, decisions.rows, recipe=resolved)
    if not any(isinstance(module, MXModule) for module in model.modules()):
        warnings.warn(
            f"te_mx.convert_model converted nothing: {_why_nothing(report)}",
            ConversionWarning,
            stacklevel=2,
        )
    return report


def _change(model: nn.Module, decisions: Decisions, recipe: Recipe | None) -> None:
    """Do what was decided."""
    made = fuse_all(decisions.sequences)
    for module, name, gate in decisions.chosen:
        if (seam := seam_of(module)) is not None:
            give(module, seam.mixin)
        else:
            module.__class__ = Linear
        module.__dict__["name"] = name
        if gate is not None:
            module.__dict__["_gate"] = gate
    converted = [(one.module, one.name) for one in decisions.chosen]
    for module, name in [*((m, m.name or "") for m in made), *converted]:
        module.__dict__["_converted"] = True
        watch(model, name, module)
    fuse_in_place(decisions.in_place)
    if recipe is not None:
        fused = [
            (module, plan.linears) for module, plan in zip(made, decisions.sequences, strict=True)
        ]
        others = [*converted, *((one.module, one.name) for one in decisions.present)]
        bind([*fused, *((module, module._names(name)) for module, name in others)], recipe)


def _check(model: Any, filter_fn: Any, **flags: Any) -> None:
    check_module(model)
    if not callable(filter_fn) and not is_one_of(filter_fn, ("auto", None)):
        wrong = ValueError if isinstance(filter_fn, str) else TypeError
        raise wrong(
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
    return "; ".join(filter(None, [why, *report.totals.splitlines()]))


# What a converted layer keeps on its instance beyond what it had.
_OWN_ATTRIBUTES = (
    "name", "return_bias", "init_method", "fuse_wgrad_accumulation", "save_original_input",
    "keeps_given_input", "delay_wgrad_compute", "_converted", "_bound", "_bound_plain", "_seen",
    "_ran", "_source", "_claim", "_split", "_tag", "_delayed", "_wgrad_hooks", "_gate",
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
    stay, with the reason. Bound recipes are removed, also from modules that stay."""
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
    if state := module._source.standing:
        return f"{state}: call te_mx.unfreeze_weights first"
    if in_place:
        return ""
    if module._parts_of("weight") != ("weight",):
        return "nn.Linear has no parameters_split"
    if module._shared is not None:
        return "nn.Linear has no process group (tp_group, parallel_mode)"
    own = [name for name in _ONLY_OURS if getattr(module, name)]
    return f"nn.Linear has no {' and no '.join(own)}" if own else ""
