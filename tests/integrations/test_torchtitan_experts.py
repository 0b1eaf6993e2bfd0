"""torchtitan's GroupedExperts, by stand-ins with its parameters and forward."""

from __future__ import annotations

import copy
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_mx
from te_mx.recipe import MXFP8BlockScaling

E, DIM, HIDDEN = 4, 64, 40
SHAPES = (HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN)


class GroupedExperts(nn.Module):
    """With its loop over the experts as the plain form."""

    names = ("w1", "w3", "w2")

    def __init__(self) -> None:
        super().__init__()
        for name, shape in zip(self.names, SHAPES, strict=True):
            self.register_parameter(name, nn.Parameter(torch.randn(E, *shape) / 8))

    def forward(self, x, num_tokens_per_expert):
        w1, w3, w2 = (getattr(self, name) for name in self.names)
        counts = num_tokens_per_expert.long().tolist()
        made = []
        for e, rows in enumerate(x[: sum(counts)].split(counts)):
            h = F.silu(rows @ w1[e].t()) * (rows @ w3[e].t())
            made.append(h @ w2[e].t())
        out = torch.cat(made)
        return torch.vstack((out, out.new_zeros(len(x) - len(out), out.shape[1])))


class Suffixed(GroupedExperts):
    """As later versions name them."""

    names = ("w1_EFD", "w3_EFD", "w2_EDF")

    def forward(self, x_RD, num_tokens_per_expert_E):
        return super().forward(x_RD, num_tokens_per_expert_E)


class OneParameter(GroupedExperts):
    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(E, 2 * HIDDEN, DIM))


class Dispatching(GroupedExperts):
    def forward(self, x, scores, indices, num_tokens_per_expert):
        return x


@pytest.fixture
def titan(monkeypatch):
    """Makes a stand-in a class of torchtitan."""

    def made(kind: type[nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        for name in ("torchtitan", "torchtitan.models", f"torchtitan.models.{kind.__name__}"):
            module = types.ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        own = type("GroupedExperts", (kind,), {"__module__": module.__name__})
        own.__qualname__, module.GroupedExperts = "GroupedExperts", own
        return own()

    return made


def loop_of_linears(experts: nn.Module, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    def linear(rows, weight):
        layer = te_mx.Linear(weight.shape[1], weight.shape[0], bias=False)
        return torch.func.functional_call(layer, {"weight": weight}, (rows,))

    w1, w3, w2 = (getattr(experts, name) for name in experts.names)
    made = []
    for e, rows in enumerate(x[: sum(counts)].split(counts)):
        made.append(linear(F.silu(linear(rows, w1[e])) * linear(rows, w3[e]), w2[e]))
    out = torch.cat(made)
    return torch.vstack((out, out.new_zeros(len(x) - len(out), DIM)))


def test_rows_under_precision_invariant(titan, monkeypatch):
    monkeypatch.setattr(F, "silu", None)  # it gives rows other bits, which quantizers hide mostly
    experts, x = titan(GroupedExperts), torch.randn(100, DIM)
    te_mx.convert_model(experts, recipe=MXFP8BlockScaling(precision="invariant"))
    whole = experts(x, torch.tensor([99, 0, 1, 0]))
    for rows in (1, 7, 17, 98):
        assert torch.equal(experts(x[:rows], torch.tensor([rows, 0, 0, 0])), whole[:rows])


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("kind", [GroupedExperts, Suffixed])
@pytest.mark.parametrize("counted", [torch.int64, torch.float32])  # as torch.histc counts
def test_bits_of_a_loop_of_linears(titan, kind, counted):
    experts = titan(kind)
    x = torch.randn(100, DIM, requires_grad=True)
    counts = torch.tensor([50, 0, 33, 10], dtype=counted)  # and 7 rows of padding
    held = (x, *experts.parameters())
    plain = experts(x, counts)
    with te_mx.autocast():
        expected = loop_of_linears(experts, x, counts.long().tolist())
    wanted = torch.autograd.grad(expected.square().sum(), held)
    state = list(experts.state_dict())
    report = te_mx.convert_model(experts)
    assert report.layers == [("(root)", "converted", "4 x 64 -> 40 -> 64", "GroupedExperts")]
    assert report.share == 1 and list(experts.state_dict()) == state
    assert torch.equal(experts(x, counts), plain)
    with te_mx.autocast():
        out = experts(x, counts)
    assert torch.equal(out, expected) and out[93:].count_nonzero() == 0
    for a, b in zip(torch.autograd.grad(out.square().sum(), held), wanted, strict=True):
        assert torch.equal(a, b)
    rows = te_mx.audit(experts)
    assert [row.name for row in rows] == [f"(root).{name}" for name in experts.names]
    assert not any("never ran" in row for row in rows)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        with te_mx.autocast():
            assert torch.equal(other(x, counts), out)
    with torch.no_grad(), te_mx.autocast():
        te_mx.freeze_weights(experts, drop_master=True)
        assert torch.equal(experts(x, counts), out)
        (row,) = te_mx.convert_model(experts, recipe=te_mx.get_default_recipe())
        assert row[1:3] == ("bound", "4 x 64 -> 40 -> 64")  # of what is left
    assert torch.equal(experts(x.detach(), counts), out)
    with torch.no_grad():
        te_mx.unfreeze_weights(experts, dequantize=True)
    te_mx.revert_model(experts)
    assert type(experts).__mro__[1] is kind


def test_what_is_not_converted(titan):
    other = titan(GroupedExperts)
    other.w2 = nn.Parameter(torch.randn(E, DIM, HIDDEN + 1))
    model = nn.ModuleDict(
        {
            "one": titan(OneParameter),
            "dispatching": titan(Dispatching),
            "unfit": other,
            "not_torchtitan": GroupedExperts(),
            "linear": nn.Linear(4, 4),
        }
    )
    reasons = te_mx.convert_model(model).skipped
    assert "of another form" in reasons["one"]
    assert "its forward takes ['x', 'scores'" in reasons["dispatching"]
    assert "which do not fit" in reasons["unfit"]
    assert "not_torchtitan" not in reasons and type(model["not_torchtitan"]) is GroupedExperts


def test_malformed_calls(titan):
    experts = titan(GroupedExperts)
    te_mx.convert_model(experts)
    x = torch.randn(8, DIM)
    with te_mx.autocast():
        with pytest.raises(ValueError, match="num_tokens_per_expert must be a tensor of 4"):
            experts(x, torch.tensor([8]))
        with pytest.raises(ValueError, match="offs must be end offsets"):
            experts(x, torch.tensor([8, 0, 0, 1]))
        with pytest.raises(TypeError, match="takes x and num_tokens_per_expert, got 1"):
            experts(x)
