"""convert_model(fuse=True): what is fused, what is not, and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from norm_modules import filled, relative
from torch import nn
from torch.nn.utils import parametrizations

import te_mx

BF16 = torch.bfloat16


def block(activation=None, width=64, bias=True):
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 96, bias),
        activation or nn.GELU(),
        nn.Linear(96, width),
    )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(32, 64)
        self.mlp = block(nn.GELU("tanh"))
        self.head = nn.Sequential(nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 10), nn.Dropout(0.0))

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.mlp(x))


def kept(module):
    return [*module.parameters()]


@pytest.mark.usefixtures("family")
def test_fused_and_back():
    model = Model().to(BF16)
    x = torch.randn(40, 32, dtype=BF16)
    before, parameters, keys = model(x), kept(model), list(model.state_dict())
    original = copy.deepcopy(model)
    dry = te_mx.convert_model(model, fuse=True, dry_run=True)
    assert dry.fused == ["mlp.0", "head.0"] and dry.count("would fuse") == 2
    assert type(model.mlp[0]) is nn.LayerNorm and dry.converted == ["embed"]

    report = te_mx.convert_model(model, fuse=True)
    assert report.fused == ["mlp.0", "head.0"] and report.converted == ["embed"]
    assert "LayerNorm + Linear + GELU + Linear" in str(report) and "64 -> 96 -> 64" in str(report)
    assert type(model.mlp[0]) is te_mx.LayerNormMLP and model.mlp[0].name == "mlp.0"
    assert type(model.head[0]) is te_mx.LayerNormLinear and model.head[0].eps == 1e-6
    assert [type(m) for m in model.mlp[1:]] == [nn.Identity] * 3
    assert {id(p) for p in kept(model)} == {id(p) for p in parameters}
    assert "mlp.0.fc1_weight" in model.state_dict()
    assert torch.equal(model(x), before)
    with te_mx.autocast():
        assert relative(model(x), before) < 0.1
        te_mx.convert_model(original)
        # As without fusing, up to bf16's rounding of what is no longer rounded.
        assert relative(model(x), original(x)) < 0.02

    model.mlp[0].fc1_weight = nn.Parameter(model.mlp[0].fc1_weight * 2)
    back = te_mx.revert_model(model)
    assert back.count("reverted") == 3
    assert list(model.state_dict()) == keys and type(model.mlp[1]) is nn.Linear
    model.mlp[1].weight.data /= 2
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    ("activation", "name"),
    [(nn.GELU(), "gelu_erf"), (nn.GELU("tanh"), "gelu"), (nn.SiLU(), "silu"), (nn.ReLU(), "relu")],
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_every_pattern(activation, name, bias, norm):
    model = block(activation, bias=bias).to(BF16)
    if not norm:
        model = nn.Sequential(*model[1:])
    x = torch.randn(3, 5, 64, dtype=BF16)
    before = model(x)
    (row,) = te_mx.convert_model(model, fuse=True)
    assert row.status == "fused" and row.name == "0"
    fused = model[0]
    assert fused.activation == name and fused.normalization == ("LayerNorm" if norm else None)
    assert (fused.fc1_bias is not None) == bias and fused.fc2_bias is not None
    torch.testing.assert_close(model(x), before, rtol=2**-8, atol=1e-6)
    with te_mx.autocast():
        model(x).sum().backward()
    assert fused.fc2_bias.grad is not None
    te_mx.revert_model(model)
    assert torch.equal(model(x), before)


@pytest.mark.usefixtures("family")
def test_a_deep_copy_goes_back_too():
    model = block()
    te_mx.convert_model(model, fuse=True)
    twin = copy.deepcopy(model)
    te_mx.revert_model(twin)
    assert type(twin[0]) is nn.LayerNorm and twin[1].weight is not model[0].fc1_weight
    assert torch.equal(twin[1].weight, model[0].fc1_weight)


def with_hook(model):
    model[1].register_forward_hook(lambda *_: None)


def changed(model):
    model[1].forward = lambda x: x


def parametrized(model):
    parametrizations.weight_norm(model[1])


def converted_before(model):
    te_mx.convert_model(model)


def shared(model):
    model.add_module("again", model[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_hook, "has hooks"),
        (changed, "changed on the instance"),
        (parametrized, "changed on the instance"),
        (converted_before, "already a te_mx.Linear"),
        (shared, "is shared"),
    ],
)
def test_what_is_not_certain_is_not_fused(change, reason):
    model = block()
    change(model)
    report = te_mx.convert_model(model, fuse=True, dry_run=True)
    assert report.fused == [] and reason in str(report)


def test_a_normalization_that_cannot_go_along_stays():
    model = block()
    model[0].forward = lambda x: x
    report = te_mx.convert_model(model, fuse=True)
    assert report.fused == ["1"] and "0" in report.skipped
    assert type(model[0]) is nn.LayerNorm and model[1].normalization is None


def test_reasons_of_sizes_and_arguments():
    for model, reason in (
        (nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8)), "eps=None"),
        (nn.Sequential(nn.LayerNorm((2, 8)), nn.Linear(8, 8)), "normalizes over"),
        (nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 8)), "no weight"),
        (nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(10, 8)), "do not fit"),
    ):
        report = te_mx.convert_model(model, fuse=True)
        assert report.fused == [] and reason in str(report)
        assert type(model[len(model) - 1]) is te_mx.Linear


def test_what_is_no_pattern_is_left_alone():
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4),  # changes its width
        nn.LayerNorm(4), nn.Dropout(0.1), nn.Linear(4, 4),
    )  # fmt: skip
    report = te_mx.convert_model(model, fuse=True)
    assert report.fused == [] and len(report.converted) == 3
    names = te_mx.convert_model(block(), fuse=True, filter_fn=lambda _, name: name != "3")
    assert names.fused == [] and "excluded by filter_fn" in str(names)


def test_fused_by_hand_stays():
    model = nn.Sequential(filled(te_mx.LayerNormMLP(8, 8)), nn.Linear(8, 8))
    report = te_mx.revert_model(model)
    assert "built as such" in str(report) and type(model[0]) is te_mx.LayerNormMLP
    model = block()
    te_mx.convert_model(model, fuse=True)
    model[2] = nn.Dropout(0.5)
    assert "its place in the model changed" in str(te_mx.revert_model(model))
