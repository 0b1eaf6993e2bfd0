"""The names that Megatron-LM takes from Transformer Engine: there, refused with the reason, or said
to be not planned."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

import te_mx
import te_mx.common.recipe
import te_mx.pytorch

HERE = Path(__file__).resolve().parents[1]
NAMES = json.loads(HERE.joinpath("compat", "megatron.json").read_text())
PAGE = HERE.parent / "docs" / "transformer_engine.md"


def read(name: str) -> object:
    """What te_mx has under a name of Transformer Engine's."""
    found: object = te_mx
    path = "te_mx"
    for part in name.split(".")[1:]:
        path += "." + part
        try:
            found = getattr(found, part)
        except AttributeError as error:
            try:
                found = importlib.import_module(path)
            except ImportError:
                raise error from None
    return found


@pytest.mark.parametrize("name", NAMES["there"])
def test_what_there_is(name):
    assert read(name) is not None


@pytest.mark.parametrize("name", NAMES["refused"])
def test_what_is_refused_says_why(name):
    with pytest.raises(AttributeError, match=r"^te_mx.* has no \w+: \w.* \w"):
        read(name)


def test_what_is_not_planned_is_said():
    assert {name.partition(".")[0] for name in NAMES["not planned"]} == {"transformer_engine_torch"}
    if not PAGE.is_file():
        pytest.skip("docs are not here: the tests run on an installed wheel")
    assert "`transformer_engine_torch`" in PAGE.read_text()


def test_an_import_path_as_megatron_gives_it():
    """fp8_recipe="custom" with fp8_quantizer_factory="pkg.module.name"."""
    made = te_mx.common.recipe.CustomRecipe(qfactory=f"{__name__}.factory")
    assert made.qfactory is factory
    layer = te_mx.pytorch.Linear(64, 64, device="cpu", name="decoder.layers.0.mlp.linear_fc1")
    with te_mx.pytorch.fp8_autocast(fp8_recipe=made):
        y = layer(torch.ones(4, 64))
    with te_mx.autocast(recipe="mxfp8"):
        assert torch.equal(layer(torch.ones(4, 64)), y)


def factory(role: te_mx.pytorch.QuantizerRole) -> str | None:
    assert role.module_type == "linear" and role.name == "decoder.layers.0.mlp.linear_fc1"
    return "mxfp8"
