"""A conversion is whole or not at all, says how much of the model it reached, and does not pass in
silence when nothing comes of it.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import te_mx
from te_mx.context import region
from te_mx.nn import converted


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)
    )


@pytest.fixture
def first_time(monkeypatch):
    """As in a process that has done nothing yet, with every warning an error."""
    monkeypatch.setattr(converted, "_warned", False)
    monkeypatch.setattr(region, "_started", False)
    monkeypatch.setattr(region, "_start", lambda: setattr(region, "_started", True))
    with warnings.catch_warnings():
        warnings.simplefilter("error", te_mx.ConversionWarning)
        yield


# ---------------------------------------------------------------------------------- all or nothing
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_filter_that_raises(fuse, at):
    model, asked = mlp(), []
    before = {name: (id(m), type(m)) for name, m in model.named_modules()}

    def keep(module, name):
        asked.append(name)
        if len(asked) > at:
            raise KeyError(name)
        return True

    if at < 3:
        with pytest.raises(KeyError):
            te_mx.convert_model(model, filter_fn=keep, fuse=fuse)
        assert {name: (id(m), type(m)) for name, m in model.named_modules()} == before
    else:
        assert len(te_mx.convert_model(model, filter_fn=keep, fuse=fuse)) >= 2


def test_a_fusion_that_raises(monkeypatch):
    from te_mx.fusion import sequences

    model = nn.Sequential(mlp(), mlp())
    before = {name: (id(m), type(m)) for name, m in model.named_modules()}
    made, original = [], sequences._fused

    def fails(plan):
        if made:
            raise MemoryError
        made.append(original(plan))
        return made[0]

    monkeypatch.setattr(sequences, "_fused", fails)
    with pytest.raises(MemoryError):
        te_mx.convert_model(model, fuse=True)
    assert {name: (id(m), type(m)) for name, m in model.named_modules()} == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fuse": "no"}, "fuse must be a bool, got 'no'"),
        ({"dry_run": None}, "dry_run must be a bool, got None"),
        (
            {"filter_fn": ["lm_head"]},
            "filter_fn must be .auto. or a function of .module, name., got",
        ),
    ],
)
def test_malformed_calls(arguments, says):
    model = mlp()
    with pytest.raises(TypeError, match=says):
        te_mx.convert_model(model, **arguments)
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got list"):
        te_mx.convert_model([model])
    assert type(model[1]) is nn.Linear


# --------------------------------------------------------------------------------- what it reached
class Conv1D(nn.Module):
    """GPT-2's linear layer in transformers."""

    def __init__(self, rows, cols):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, cols))
        self.bias = nn.Parameter(torch.ones(cols))


class Experts(nn.Module):
    """Mixtral's: matrices stacked in two parameters."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(4, 64, 16))
        self.down_proj = nn.Parameter(torch.ones(4, 16, 32))


def test_a_model_without_linear_layers():
    model = nn.ModuleDict({"wte": nn.Embedding(100, 16), "c_attn": Conv1D(16, 48)})
    says = r"GPT-2|converted nothing: ModuleDict has no nn.Linear; .* 0 % of 768 elements.*1 others"
    with pytest.warns(te_mx.ConversionWarning, match=says):
        report = te_mx.convert_model(model)
    assert report.share == 0
    assert report.left == [("c_attn.weight", "Conv1D", (16, 48), 768, False)]
    assert "1 others: c_attn.weight [16, 48] (Conv1D)\n1 embedding stays, " in str(report)
    te_mx.convert_model(model, dry_run=True)  # which prints, and does not warn
    everything_excluded = nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(te_mx.ConversionWarning, match="all 1 nn.Linear .* excluded by filter_fn"):
        te_mx.convert_model(everything_excluded, filter_fn=lambda module, name: None)


def test_the_share_of_the_matrices(first_time):
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(50, 16),
            "conv": nn.Conv1d(4, 8, 3),
            "norm": nn.LayerNorm((4, 16)),
            "gate": nn.Linear(16, 4),
            "experts": Experts(),
            "head": nn.Linear(16, 50, bias=False),
        }
    )
    model["head"].weight = model["embed"].weight  # tied: counts once, as a matrix
    model.position = nn.Parameter(torch.ones(1, 32, 16))
    reached, total = 16 * 4 + 16 * 50, 16 * 4 + 16 * 50 + 4 * 64 * 16 + 4 * 16 * 32
    for dry_run in (True, False):
        report = te_mx.convert_model(model, dry_run=dry_run, filter_fn=lambda *_: True)
        assert report.share == pytest.approx(reached / total)
        assert [m.name for m in report.left] == ["experts.gate_up_proj", "experts.down_proj"]
    assert str(report).splitlines()[-1] == (
        "1 convolution stays, 1.2 % of all parameters: conv.weight [8, 4, 3] (Conv1d)"
    )
    every = sum(parameter.numel() for parameter in model.parameters())
    assert report.parameters == every and str(report).splitlines()[-2] == (
        "matrix parameters: 12.3 % of 7,008 elements are in te_mx layers, 11.1 % of all "
        f"{every:,} parameters; 2 others: experts.gate_up_proj [4, 64, 16] (Experts), "
        "experts.down_proj [4, 16, 32] (Experts)"
    )
    te_mx.freeze_weights(model["gate"], drop_master=True)
    again = te_mx.convert_model(model)  # without a warning: there are te_mx layers
    assert again.parameters == every
    assert again.share == pytest.approx(reached / total)
    assert te_mx.revert_model(nn.Sequential(te_mx.Linear(4, 4))).share == 0


def test_all_of_it_and_nearly_all():
    model = nn.Sequential(nn.Linear(1000, 1000), *(Conv1D(2, 2) for _ in range(6)))
    line = str(te_mx.convert_model(model)).splitlines()[-1]
    assert "99.9 % of 1,000,024 elements" in line and "6 others, the largest 5: 1.weight" in line
    line = str(te_mx.convert_model(nn.Sequential(nn.Linear(4, 4)))).splitlines()[-1]
    assert line.endswith("100 % of 16 elements are in te_mx layers, 80 % of all 20 parameters")


def test_what_a_share_is_a_share_of():
    """All matrices of a network of convolutions are next to nothing of it."""
    blocks = [nn.Conv2d(256, 256, 3, bias=False) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256, 10))
    report = te_mx.convert_model(model)
    assert report.share == 1 and len(report.convolutions) == 6
    matrices, convolutions = str(report).splitlines()[-2:]
    assert "100 % of 2,560 elements are in te_mx layers, 0.072 % of all 3,541,514" in matrices
    assert convolutions.startswith("6 convolutions stay, 99.9 % of all parameters, the largest 5: ")
    assert "0.weight [256, 256, 3, 3] (Conv2d)" in convolutions
    with pytest.warns(te_mx.ConversionWarning, match="no nn.Linear; 1 convolution stays, 100 %"):
        te_mx.convert_model(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False)))


# ------------------------------------------------------------------------ trained without a region
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_without_autocast_warns_once(first_time, fuse, compiled):
    model, x = mlp(), torch.randn(3, 8)
    te_mx.convert_model(model, fuse=fuse)
    run = model
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        run(x)
    model.eval()
    run(x)
    model.train()
    expected = r"layer '\d', which te_mx.convert_model converted, runs with gradients outside of"
    with pytest.warns(te_mx.ConversionWarning, match=expected) as caught:
        for _ in range(3):
            run(x).sum().backward()
    assert len([w for w in caught if w.category is te_mx.ConversionWarning]) == 1


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_no_warning_for_who_knows_autocast(first_time, enabled, inside):
    model, x = mlp(), torch.randn(3, 8)
    te_mx.convert_model(model)
    with te_mx.autocast(enabled=enabled):
        if inside:
            model(x).sum().backward()
    model(x).sum().backward()


def test_no_warning_for_layers_that_were_built_as_such(first_time):
    te_mx.Linear(8, 8)(torch.randn(3, 8)).sum().backward()
    model = mlp()
    te_mx.convert_model(model)
    te_mx.revert_model(model)
    model(torch.randn(3, 8)).sum().backward()


# ------------------------------------------------------------------------------ replaced by others
def entered() -> None:
    with te_mx.autocast():
        pass


def replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


@pytest.mark.parametrize("fuse", [False, True])
def test_layers_that_somebody_replaced(first_time, fuse):
    model = nn.Sequential(mlp(), nn.Linear(16, 4))
    te_mx.convert_model(model, fuse=fuse)
    entered()
    replace(model, "0.1" if not fuse else "0.0", nn.Linear(8, 16))
    replace(model, "1", Conv1D(16, 4))
    says = r"^2 layers .*replaced since, first '0.\d' by a torch.nn.modules.linear.Linear.*torchao"
    with pytest.warns(te_mx.ConversionWarning, match=says):
        entered()
    entered()  # said once


@pytest.mark.parametrize("fuse", [False, True])
def test_what_is_no_replacement(first_time, fuse):
    model = nn.Sequential(mlp(), nn.Linear(16, 4), nn.Linear(4, 4))
    te_mx.convert_model(model, fuse=fuse)
    replace(model, "1", te_mx.Linear(16, 4))
    replace(model, "2", nn.Identity())
    entered()
    te_mx.revert_model(model)
    replace(model, "1", nn.Linear(16, 4))
    replace(model, "0", nn.Identity())
    entered()
    del model
    entered()
