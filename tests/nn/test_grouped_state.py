"""state_dicts of GroupedLinear: separate and stacked parameters load into each other."""

from __future__ import annotations

import io

import pytest
import torch
from grouped_cases import equal, parameters
from torch import nn

import te_mx

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # NVFP4 on the CPU


def layer(weight: bool, bias: bool | None = None, groups: int = 3) -> te_mx.GroupedLinear:
    return te_mx.GroupedLinear(groups, 8, 5, single_grouped_weight=weight, single_grouped_bias=bias)


FORMS = [(False, False), (True, True), (True, False), (False, True)]


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("nested", [False, True])
def test_every_form_loads_every_form(source: tuple, target: tuple, nested: bool) -> None:
    torch.manual_seed(1)
    ours, theirs = layer(*target), layer(*source)
    state = theirs.state_dict()
    if nested:
        state = {f"block.{key}": value for key, value in state.items()}
        nn.ModuleDict({"block": ours}).load_state_dict(state)
    else:
        ours.load_state_dict(state)
    for kind in ("weight", "bias"):
        equal(parameters(ours, kind), parameters(theirs, kind))
    assert set(ours.state_dict()) == {name for name, _ in ours.named_parameters()}


def test_loading_leaves_the_callers_dict_alone() -> None:
    state = layer(False).state_dict()
    names = list(state)
    layer(True).load_state_dict(state)
    assert list(state) == names


def test_extra_state_of_transformer_engine_is_ignored() -> None:
    state = layer(False).state_dict()
    state["_extra_state"] = torch.empty(0, dtype=torch.uint8)
    layer(True).load_state_dict(state)


def test_what_does_not_fit_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"weight holds 4 groups, got a layer of 3"):
        layer(False).load_state_dict(layer(True, groups=4).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer(True).load_state_dict(layer(True, groups=4).state_dict())
    state = layer(False).state_dict()
    del state["weight1"]
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        layer(True).load_state_dict(state)
    with pytest.raises(RuntimeError, match="weight1"):
        layer(False).load_state_dict(state)
    state["weight1"] = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="must have one shape to be stacked"):
        layer(True).load_state_dict(state)


def test_a_loaded_weight_replaces_what_was_kept() -> None:
    ours, x = layer(False), torch.randn(6, 8)
    with te_mx.autocast():
        before = ours(x, [2, 2, 2], is_first_microbatch=True)
        te_mx.freeze_weights(ours)
        ours.load_state_dict(layer(True).state_dict())
        assert not torch.equal(ours(x, [2, 2, 2]), before)


def test_saved_and_loaded_through_a_file() -> None:
    ours, file = layer(True), io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    other = layer(False)
    other.load_state_dict(torch.load(file, weights_only=True))
    equal(parameters(other, "weight"), parameters(ours, "weight"))
