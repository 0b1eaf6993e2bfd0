"""The table of malformed calls has every public callable of te_mx, with each of its arguments."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
from public_calls import CALLS

import te_mx

# Public by name, and not called by users with values of their own.
EXEMPT = {
    "te_mx.ConversionReport": "made by te_mx.convert_model",
    "te_mx.Explanation": "made by te_mx.explain",
    "te_mx.GroupedExplanation": "made by te_mx.explain_grouped",
    "te_mx.InspectionReport": "made by te_mx.inspect",
    "te_mx.GemmOutput": "made by te_mx.gemm",
    "te_mx.ConversionWarning": "a warning",
    "te_mx.FallbackWarning": "a warning",
    "te_mx.MXTensor.kept_operand": "called by te_mx.gemm",
    "te_mx.formats.Element": "for those who write formats: tests/formats",
    "te_mx.formats.Format": "for those who write formats: tests/formats",
    "te_mx.formats.Scaling": "for those who write formats: tests/formats",
    "te_mx.formats.register": "for those who write formats: tests/formats",
    "te_mx.recipe.Format": "an enumeration: Python refuses what is no member",
    "te_mx.recipe.FormatRange": "the value of a Format",
    "te_mx.recipe.Quantizer": "read where a factory returned it: tests/recipes",
    "te_mx.recipe.QuantizerRole": "made by te_mx: tests/recipes",
    "te_mx.recipe.Settings": "made by a recipe",
    "te_mx.recipe.check_precision": "called by recipes, te_mx.gemm and te_mx.explain",
    "te_mx.workspace.Slot": "made by te_mx.workspace",
    "te_mx.workspace.acquire": "called by ops with sizes that a backend computed",
    "te_mx.workspace.release": "called by ops with what acquire returned",
    "te_mx.workspace.grown_size": "called by Slot",
    "te_mx.moe.AlignedBlocks": "made by te_mx.moe.align_block_size",
    "te_mx.distributed.quantized_all_gather": "needs several ranks: tests/ranks",
    "te_mx.autocast.__exit__": "called by the with statement",
}
# Arguments of Transformer Engine's that have no effect, whatever their value.
UNUSED = {
    "te_mx.autocast": {"amax_reduction_group", "_graph"},
    "te_mx.fp8_autocast": {"fp8_group", "_graph"},
    "te_mx.LayerNormMLP": {"seq_length", "micro_batch_size"},
}
# Methods of what te_mx returns that take an argument.
PUBLIC_METHODS = ("count", "quantize", "dequantize", "worst", "to_json")
# Methods of modules that others of te_mx call, with what they checked, or torch does.
INTERNAL = {
    "freeze": "te_mx.freeze_weights", "unfreeze": "te_mx.unfreeze_weights",
    "why_not_frozen": "te_mx.freeze_weights",
    "register_load_state_dict_post_hook": "torch's", "named_buffers": "torch's",
}  # fmt: skip
# Entries for what torch.nn.Module gives to te_mx's modules.
BESIDE = tuple(f"te_mx.{family}.load_state_dict" for family in te_mx.nn.__all__)
DUNDERS = ("__call__", "__enter__", "__exit__", "__getitem__")


def functions(owner: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, function) of everything that is called through a public value."""
    if isinstance(value, types.ModuleType):
        for name in getattr(value, "__all__", None) or _defined_in(value):
            yield from functions(f"{owner}.{name}", getattr(value, name))
    elif inspect.isclass(value):
        yield owner, value
        for name, inner in inspect.getmembers(value, inspect.isfunction):
            ours = inner.__module__.startswith("te_mx.")
            if ours and (not name.startswith("_") or name in DUNDERS):
                yield f"{owner}.{name}", inner
    elif callable(value):
        yield owner, value


def _defined_in(module: types.ModuleType) -> list[str]:
    own = (name for name in vars(module) if not name.startswith("_"))
    return [n for n in own if getattr(vars(module)[n], "__module__", "") == module.__name__]


def is_exempt(name: str) -> bool:
    owner, _, method = name.rpartition(".")
    return (
        name in EXEMPT or (owner in EXEMPT and method not in PUBLIC_METHODS) or method in INTERNAL
    )


EVERYTHING = {
    name: function
    for public in te_mx.__all__
    for name, function in functions(f"te_mx.{public}", getattr(te_mx, public))
}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# Under the first of its names: te_mx.get_default_recipe is te_mx.recipe.get_default_recipe too.
FOUND = {id(f): name for name, f in reversed(EVERYTHING.items()) if not is_exempt(name)}.values()


@pytest.mark.parametrize("name", sorted(FOUND))
def test_every_argument_is_in_the_table(name):
    calls = [call for call in CALLS if (call.covers or call.name) == name]
    wanted = {
        parameter.name
        for parameter in inspect.signature(EVERYTHING[name]).parameters.values()
        if parameter.name != "self" and parameter.kind not in VARIADIC
    }
    wanted -= UNUSED.get(name, set())
    tried = {argument for call in calls for argument in call.kinds}
    assert wanted <= tried, f"{name}: no malformed {', '.join(sorted(wanted - tried))}"


def test_exemptions_and_entries_are_of_something():
    assert set(EXEMPT) <= set(EVERYTHING)
    covered = {call.covers or call.name for call in CALLS}
    assert {name for name in covered if name not in EVERYTHING} == set(BESIDE)
