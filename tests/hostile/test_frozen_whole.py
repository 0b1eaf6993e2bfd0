"""freeze_weights does all that it was asked for, or nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_mx


def state_of(model):
    """Everything that freezing changes."""
    flags = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    return flags, [m._source for m in model.modules() if hasattr(m, "_source")], str(model)


def mixed_groups(**options):
    layer = te_mx.GroupedLinear(3, 8, 8, bias=False)
    layer.weight2 = nn.Parameter(layer.weight2.detach().to(**options))
    return layer


class Foreign(torch.Tensor):
    pass


def foreign_weight():
    layer = te_mx.Linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Foreign))
    return layer


@pytest.mark.parametrize("drop_master", [False, True])
@pytest.mark.parametrize(
    ("last", "says"),
    [
        (
            lambda: te_mx.Linear(8, 8, dtype=torch.float64),
            r"^1: weight is torch.float64; te_mx",
        ),
        (lambda: mixed_groups(dtype=torch.float64), r"^1: weight is torch.float64"),
        (lambda: mixed_groups(device="meta"), r"^1: weight is on the meta device"),
        (lambda: te_mx.LayerNormMLP(8, 8, dtype=torch.float64), r"^1: fc1_weight is torch.float64"),
        (foreign_weight, r"^1: weight is a Foreign"),
    ],
)
def test_one_module_that_cannot_be_frozen(last, says, drop_master):
    model = nn.Sequential(te_mx.Linear(8, 8), last())
    model[0].bias.requires_grad_(False)
    before = state_of(model)
    with pytest.raises(ValueError, match=says):
        te_mx.freeze_weights(model, drop_master)
    assert state_of(model) == before


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("drop_master", [False, True])
def test_an_error_half_way(drop_master, at, monkeypatch):
    model = nn.Sequential(*(te_mx.LayerNormMLP(8, 8) for _ in range(2)))
    calls = []

    def fails(name, original):
        def call(self, key, *args):
            calls.append(key)
            if len(calls) == at * 2:  # at the second weight of a module
                raise torch.OutOfMemoryError("not enough memory")
            return original(self, key, *args)

        monkeypatch.setattr(te_mx.LayerNormMLP, name, call)

    fails("_make_kept", te_mx.LayerNormMLP._make_kept)
    fails("_plain_codes", te_mx.LayerNormMLP._plain_codes)
    before = state_of(model)
    with pytest.raises(torch.OutOfMemoryError):
        te_mx.freeze_weights(model, drop_master)
    if drop_master and at == 2:  # what was dropped stays so, and the rest is as it was
        assert [m._source.dropped for m in model] == [True, False]
        assert not model[1]._source.standing and all(p.requires_grad for p in model[1].parameters())
        assert te_mx.freeze_weights(model, drop_master) == 2
    else:
        assert state_of(model) == before


def test_unfreezing_one_module_is_whole(monkeypatch):
    model, x = te_mx.LayerNormMLP(8, 8), torch.randn(3, 8)
    te_mx.freeze_weights(model, drop_master=True)
    expected, before, masters = model(x), state_of(model), te_mx.LayerNormMLP._masters

    def fails(self, key, *args):
        if key == "fc2_weight":
            raise torch.OutOfMemoryError("not enough memory")
        return masters(self, key, *args)

    with monkeypatch.context() as patch:
        patch.setattr(te_mx.LayerNormMLP, "_masters", fails)
        with pytest.raises(torch.OutOfMemoryError):
            te_mx.unfreeze_weights(model, dequantize=True)
    assert state_of(model) == before and torch.equal(model(x), expected)


@pytest.mark.parametrize("value", ["no", 0, 1, None, torch.tensor(True)])
def test_words_are_no_bools(value):
    layer = te_mx.Linear(8, 8)
    with pytest.raises(TypeError, match="drop_master must be a bool, got"):
        te_mx.freeze_weights(layer, drop_master=value)
    with pytest.raises(TypeError, match="dequantize must be a bool, got"):
        te_mx.unfreeze_weights(layer, dequantize=value)
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got OrderedDict"):
        te_mx.freeze_weights(layer.state_dict())
    with pytest.raises(
        TypeError, match=r"got 'mxfp4'; pass .* freeze_weights\(model, fmt=\.\.\.\)"
    ):
        te_mx.freeze_weights(layer, "mxfp4")
    assert not layer._source.standing
