"""Modules of other libraries that get a class of te_mx in place: the same for layers and for what
is fused."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from hf_models import model_of
from mlp_blocks import Gated, given, seeded
from torch import nn
from torch.nn.utils import parametrize

import te_mx

transformers = pytest.importorskip("transformers", minversion="5.0")


def block() -> nn.Module:
    return seeded(Gated)


def conv1d() -> nn.Module:
    torch.manual_seed(0)
    return transformers.pytorch_utils.Conv1D(48, 64).bfloat16()


def experts() -> nn.Module:
    more = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return model_of("Mixtral", num_hidden_layers=1, **more).model.layers[0].mlp.experts


KINDS = [block, conv1d, experts]


def arguments(module: nn.Module) -> tuple:
    x = given(20)
    if not hasattr(module, "num_experts"):
        return (x,)
    return x, torch.arange(20)[:, None] % 2, torch.ones(20, 1).bfloat16()


def run(module: nn.Module) -> torch.Tensor:
    with te_mx.autocast():
        return module(*arguments(module))


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@torch.no_grad()
def test_copies_and_the_way_back(make):
    module = make()
    own, exact = type(module), module(*arguments(module))
    signature, attributes = inspect.signature(module.forward), set(module.__dict__)
    te_mx.convert_model(module, fuse=True)
    made = type(module)
    assert made is not own and isinstance(module, own) and made.__name__ == own.__name__
    assert (made.__module__, made.__doc__) == (own.__module__, own.__doc__)
    assert inspect.signature(module.forward) == signature
    assert torch.equal(module(*arguments(module)), exact)
    y = run(module)
    assert not torch.equal(y, exact)
    made_again = [
        copy.copy(module), copy.deepcopy(module),
        *(pickle.loads(pickle.dumps(module, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)),
    ]  # fmt: skip
    for other in made_again:
        assert type(other) is made and torch.equal(run(other), y)
    for other in (module, *made_again[1:]):
        te_mx.revert_model(other)
        assert type(other) is own and set(other.__dict__) == attributes
        assert torch.equal(run(other), exact)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("make", [conv1d, experts], ids=lambda make: make.__name__)
def test_a_class_that_something_made_of_it_later_stays(make):
    module = make()
    te_mx.convert_model(module)
    name = next(name for name, p in module.named_parameters() if p.dim() > 1)
    parametrize.register_parametrization(module, name, Doubled())
    (row,) = te_mx.revert_model(module)
    assert row.status == "skipped" and "which something else made" in row.note
    parametrize.remove_parametrizations(module, name)
    assert te_mx.revert_model(module).count("reverted") == 1


class Helped(Gated):
    """A forward that calls another method of itself, of a usual name."""

    def forward(self, x):
        return self._forward(x)

    def _forward(self, x):
        return super().forward(x)


@torch.no_grad()
def test_names_of_methods_do_not_meet():
    module = seeded(Helped)
    assert te_mx.convert_model(module, fuse=True).fused == ["(root)"]
    same = seeded(Gated)
    te_mx.convert_model(same, fuse=True)
    assert torch.equal(run(module), run(same)) and torch.equal(module(given()), same(given()))
