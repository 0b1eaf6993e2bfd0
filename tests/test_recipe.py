"""Recipes: values, validation, names of Transformer Engine."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

import te_mx
from te_mx.recipe import Format, MXFP8BlockScaling, Settings, resolve_recipe


def test_defaults_are_those_of_transformer_engine():
    recipe = MXFP8BlockScaling()
    assert recipe.fp8_format is Format.E4M3
    names = [field.name for field in dataclasses.fields(recipe)]
    assert names[:6] == [
        "margin",
        "fp8_format",
        "fp8_dpa",
        "fp8_mha",
        "backward_override",
        "enable_2d_quantization",
    ]
    assert te_mx.get_default_recipe() == recipe


def test_format_ranges():
    assert (Format.E4M3.value.max_fwd, Format.E4M3.value.max_bwd) == (448, 448)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    assert len({Format.E4M3, Format.E5M2, Format.HYBRID}) == 3


def test_settings():
    assert MXFP8BlockScaling().settings == Settings("e4m3", "e4m3", "rceil")
    hybrid = MXFP8BlockScaling(fp8_format=Format.HYBRID, scale_rule="floor")
    assert hybrid.settings == Settings("e4m3", "e5m2", "floor")


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"fp8_format": Format.E5M2}, ValueError, "fp8_format=Format.E5M2"),
        ({"fp8_format": "E4M3"}, TypeError, "fp8_format must be a te_mx.recipe.Format"),
        ({"scale_rule": "even"}, ValueError, "scale_rule must be one of 'rceil', 'floor'"),
        ({"backward_override": "bf16"}, ValueError, "backward_override must be None"),
        ({"margin": 1}, NotImplementedError, "margin=1"),
        ({"fp8_dpa": True}, NotImplementedError, "fp8_dpa"),
        ({"fp8_mha": True}, NotImplementedError, "fp8_mha"),
        ({"enable_2d_quantization": True}, NotImplementedError, "enable_2d_quantization"),
    ],
)
def test_refused_fields_are_named(kwargs, error, says):
    with pytest.raises(error, match=says):
        MXFP8BlockScaling(**kwargs)


def test_is_an_immutable_value():
    recipe = MXFP8BlockScaling(scale_rule="floor")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.scale_rule = "rceil"
    assert recipe == MXFP8BlockScaling(scale_rule="floor") != MXFP8BlockScaling()
    assert hash(recipe) == hash(copy.deepcopy(recipe))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert dataclasses.replace(recipe, scale_rule="rceil") == MXFP8BlockScaling()


def test_repr_shows_what_matters():
    assert repr(MXFP8BlockScaling()) == "MXFP8BlockScaling(fp8_format=E4M3, scale_rule='rceil')"
    assert "HYBRID" in repr(MXFP8BlockScaling(fp8_format=Format.HYBRID))


def test_resolve_recipe():
    recipe = MXFP8BlockScaling(scale_rule="floor")
    assert resolve_recipe(recipe) is recipe
    assert resolve_recipe(None) == te_mx.get_default_recipe()
    with pytest.raises(TypeError, match=r"recipe must be a te_mx.recipe.MXFP8BlockScaling"):
        resolve_recipe("mxfp8")
    with pytest.raises(TypeError, match=r"pass an instance: MXFP8BlockScaling\(\)"):
        resolve_recipe(MXFP8BlockScaling)


def test_availability():
    assert te_mx.is_mxfp8_available() is True
    assert te_mx.is_mxfp8_available(return_reason=True) == (True, "")
