"""Recipe objects of Transformer Engine in te_mx: look-alikes, and the real ones where its
pure-Python package is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import listing
import pytest
import torch
from beside_te import te_files

import te_mx
from te_mx.recipe import (
    Float8BlockScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    resolve_recipe,
)

DATA = listing.load()
FIELDS = DATA["recipe"]["MXFP8BlockScaling"]
OURS = {kind.__name__: kind for kind in (MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling)}
ROLES = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
NAME = "transformer_engine.common.recipe"


def look_alike() -> SimpleNamespace:
    """Classes of the names, module and fields of Transformer Engine's."""
    formats = {"E2M1": (6, 6), "E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344)}
    theirs = Enum("Format", formats, module=NAME)
    base = type("Recipe", (), {"__module__": NAME})
    params = {"power_2_scale": False, "amax_epsilon": 0.0}
    made = {
        "MMParams": _dataclass("MMParams", {"use_split_accumulator": True}, frozen=True),
        "QParams": _dataclass("QParams", params, frozen=True),
    }
    for name, entries in DATA["recipe"].items():
        fields = {e["name"]: e["default"] for e in entries} | {"fp8_format": theirs.E4M3}
        if "fp4_format" in fields:
            fields["fp4_format"] = theirs.E2M1
        for field, default in fields.items():
            if default == "MMParams(use_split_accumulator=True)":
                fields[field] = made["MMParams"]()
        made[name] = _dataclass(name, fields, bases=(base,))
    for name in DATA["refused_recipes"]:
        made[name] = _dataclass(name, {}, bases=(base,))
    for role in ROLES:
        setattr(made["Float8BlockScaling"], role, made["QParams"](power_2_scale=True))
    return SimpleNamespace(**made, Format=theirs, Recipe=base)


def _dataclass(name: str, defaults: dict[str, Any], **how: Any) -> type:
    fields = [(field, Any, dataclasses.field(default=value)) for field, value in defaults.items()]
    made = dataclasses.make_dataclass(name, fields, **how)
    made.__module__ = NAME
    return made


def real() -> ModuleType:
    """Its recipe file alone: importing the package loads its CUDA library."""
    files = te_files()
    if files is None or importlib.util.find_spec("pydantic") is None:
        pytest.skip("transformer_engine and pydantic are not installed")
    file = files / "common" / "recipe" / "__init__.py"
    spec = importlib.util.spec_from_file_location(NAME, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[NAME]
    return module


@pytest.fixture(scope="module", params=["look_alike", "real"])
def te(request):
    return look_alike() if request.param == "look_alike" else real()


@pytest.mark.parametrize("name", OURS)
def test_the_list_is_that_of_the_class(te, name):
    fields = dataclasses.fields(getattr(te, name))
    theirs = {field.name: field.default for field in fields}
    theirs |= {field: theirs[field].name for field in theirs if field.endswith("_format")}
    theirs = {
        field: f"MMParams(use_split_accumulator={default.use_split_accumulator})"
        if type(default).__name__ == "MMParams"
        else default
        for field, default in theirs.items()
    }
    assert theirs == {entry["name"]: entry["default"] for entry in DATA["recipe"][name]}
    assert list(theirs) == [f.name for f in dataclasses.fields(OURS[name])][: len(theirs)]
    assert listing.malformed(DATA["recipe"][name]) == []


def test_all_recipes_are_in_the_list(te):
    recipes = {
        name
        for name, value in vars(te).items()
        if isinstance(value, type) and issubclass(value, te.Recipe) and value is not te.Recipe
    }
    assert recipes == {*OURS, *DATA["refused_recipes"]}


def test_mxfp8_recipes_mean_the_same(te):
    assert resolve_recipe(te.MXFP8BlockScaling()) == te_mx.get_default_recipe()
    for name in ("E4M3", "HYBRID"):
        for override in (None, "high_precision", "dequantized"):
            recipe = te.MXFP8BlockScaling(
                fp8_format=getattr(te.Format, name), backward_override=override
            )
            ours = MXFP8BlockScaling(fp8_format=Format[name], backward_override=override)
            assert resolve_recipe(recipe) == ours
            with te_mx.autocast(recipe=recipe):
                assert te_mx.context.region.current_recipe() == ours
        assert MXFP8BlockScaling(fp8_format=getattr(te.Format, name)).fp8_format is Format[name]


def test_blockwise_recipes_mean_the_same(te):
    assert resolve_recipe(te.Float8BlockScaling()) == Float8BlockScaling()
    split = te.MMParams(use_split_accumulator=True)
    for changes in (
        {"w_block_scaling_dim": 1},
        {"backward_override": "high_precision"},
        {"fp8_format": "HYBRID", "fp8_gemm_wgrad": split},
    ):
        theirs, ours = dict(changes), dict(changes)
        if "fp8_format" in changes:
            theirs["fp8_format"], ours["fp8_format"] = te.Format.HYBRID, Format.HYBRID
        ours.pop("fp8_gemm_wgrad", None)
        assert resolve_recipe(te.Float8BlockScaling(**theirs)) == Float8BlockScaling(**ours)
    assert Float8BlockScaling(fp8_gemm_dgrad=split).fp8_gemm_dgrad == MMParams()


def test_the_parameters_of_its_quantizers_count(te):
    recipe = te.Float8BlockScaling()
    for role in ROLES:
        setattr(recipe, role, te.QParams(power_2_scale=False, amax_epsilon=1e-5))
    ours = Float8BlockScaling(use_f32_scales=True, amax_epsilon=1e-5)
    assert resolve_recipe(recipe) == ours and ours.settings.scale_rule == "fp32:1e-05"
    assert resolve_recipe(te.Float8BlockScaling(use_f32_scales=True)) == te_mx.recipe.DeepSeekV3()
    setattr(recipe, ROLES[1], te.QParams(power_2_scale=True))
    with pytest.raises(NotImplementedError, match="one power_2_scale and amax_epsilon for all"):
        resolve_recipe(recipe)


def test_nvfp4_recipes_mean_the_same(te):
    for changes in (
        {},
        {"disable_rht": True, "disable_2d_quantization": True},
        {"row_scaled_activation": True, "disable_stochastic_rounding": True},
        {"nvfp4_4over6": "weights", "nvfp4_4over6_err_mode": "MSE"},
        {"backward_override": "dequantized"},
    ):
        assert resolve_recipe(te.NVFP4BlockScaling(**changes)) == NVFP4BlockScaling(**changes)


@pytest.mark.parametrize("field", ["x_block_scaling_dim", "grad_block_scaling_dim"])
def test_square_blocks_of_tokens_are_refused(te, field):
    theirs = te.Float8BlockScaling(w_block_scaling_dim=1, **{field: 2})
    with pytest.raises(NotImplementedError, match=f"Float8BlockScaling.{field}=2 is not supported"):
        resolve_recipe(theirs)


def test_layers_run_with_them(te):
    layer, x, grad = te_mx.Linear(70, 33), torch.randn(5, 70), torch.randn(5, 33)
    results = []
    theirs = te.MXFP8BlockScaling(fp8_format=te.Format.HYBRID)
    for recipe in (theirs, MXFP8BlockScaling(fp8_format=Format.HYBRID)):
        layer.zero_grad()
        inp = x.clone().requires_grad_()
        with te_mx.fp8_autocast(fp8_recipe=recipe):
            y = layer(inp)
        y.backward(grad)
        results.append((y.detach(), inp.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    te_mx.freeze_weights(layer, recipe=te.MXFP8BlockScaling())


@pytest.mark.parametrize("name", DATA["refused_recipes"])
def test_other_recipes_are_refused(te, name):
    kind = getattr(te, name)
    recipe = kind(qfactory=lambda role: None) if "qfactory" in _names(kind) else kind()
    with pytest.raises(NotImplementedError, match=f"recipe {name} .*and NVFP4; use MXFP8Block"):
        te_mx.autocast(recipe=recipe)


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("entry", [e for e in FIELDS if e["status"] == "refused"], ids=str)
def test_refused_fields_are_named(te, entry):
    name = entry["name"]
    recipe = te.MXFP8BlockScaling(**{name: 3 if name == "margin" else True})
    with pytest.raises(NotImplementedError, match=f"MXFP8BlockScaling.{name}="):
        te_mx.autocast(recipe=recipe)


def test_formats_that_are_not_mxfp8(te):
    with pytest.raises(NotImplementedError, match=r"Format.E2M1 .*use E4M3 or HYBRID"):
        resolve_recipe(te.MXFP8BlockScaling(fp8_format=te.Format.E2M1))
    with pytest.raises(NotImplementedError, match="use E4M3 or HYBRID"):
        MXFP8BlockScaling(fp8_format=te.Format.E2M1)
    with pytest.raises(TypeError, match="recipe must be"):
        resolve_recipe(te.Format.E4M3)
    with pytest.raises(TypeError, match="pass an instance"):
        resolve_recipe(te.MXFP8BlockScaling)


def test_pure_e5m2_is_refused_here_too():
    te = look_alike()
    with pytest.raises(ValueError, match="E5M2 is not supported"):
        resolve_recipe(te.MXFP8BlockScaling(fp8_format=te.Format.E5M2))


def test_fields_of_a_newer_version_count_only_when_set():
    te = look_alike()
    newer = dataclasses.make_dataclass(
        "MXFP8BlockScaling", [("stochastic", bool, False)], bases=(te.MXFP8BlockScaling,)
    )
    assert resolve_recipe(newer()) == te_mx.get_default_recipe()
    with pytest.raises(NotImplementedError, match=r"MXFP8BlockScaling.stochastic=True of Trans"):
        resolve_recipe(newer(stochastic=True))


def test_classes_of_the_name_but_not_the_module_are_no_recipes():
    other = dataclasses.make_dataclass("MXFP8BlockScaling", [("margin", int, 0)])
    with pytest.raises(TypeError, match="recipe must be"):
        te_mx.autocast(recipe=other())
