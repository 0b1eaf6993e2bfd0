"""convert_model(fuse=True): which modules are MLP blocks, what stays of them, what is noticed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from mlp_blocks import Gated, given, run, seeded
from torch import nn
from torch.nn.utils import parametrizations, prune

import te_mx
from te_mx.nn.guards import RAN


def test_what_stays_and_the_way_back():
    block, x = seeded(Gated), given()
    before, names, ids = block(x), list(block.state_dict()), [id(p) for p in block.parameters()]
    calls = []
    block.register_forward_hook(lambda *_: calls.append(1))
    dry = te_mx.convert_model(block, fuse=True, dry_run=True)
    assert dry.count("would fuse") == 1 and type(block) is Gated
    te_mx.convert_model(block, fuse=True)
    assert isinstance(block, Gated) and type(block).__name__ == "Gated"
    assert torch.equal(block(x), before) and len(calls) == 1
    assert list(block.state_dict()) == names and [id(p) for p in block.parameters()] == ids
    copies = copy.deepcopy(block), copy.copy(block)
    del block._forward_hooks[next(iter(block._forward_hooks))]
    copies = (*copies, pickle.loads(pickle.dumps(block)))
    y, grads = run(block, x)
    for other in copies:
        got = run(other, x)
        assert other.__dict__[RAN] == "fused" and torch.equal(got[0], y)
        assert all(torch.equal(got[1][name], grads[name]) for name in grads)
    for layer in (block.gate_proj, block.up_proj, block.down_proj):
        assert te_mx.audit(block)[layer.name].wgrad not in ("never ran", "high precision")
    back = te_mx.revert_model(block)
    assert back.count("reverted") == 4 and type(block) is Gated
    assert type(block.up_proj) is nn.Linear and torch.equal(block(x), before)
    assert te_mx.revert_model(copies[0]).count("reverted") == 4


class Adapter(nn.Module):
    """What adapters put in the place of a layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) * 2


def replaced(block):
    block.up_proj = Adapter(block.up_proj)


def hooked(block):
    block.gate_proj.register_forward_hook(lambda *args: args[2] * 2)


def wrapped(block):
    old = block.down_proj.forward
    block.down_proj.forward = lambda x: old(x) * 2


def pruned(block):
    prune.l1_unstructured(block.gate_proj, "weight", 0.5)


def normed(block):
    parametrizations.weight_norm(block.down_proj)


def other_activation(block):
    block.act_fn = nn.ReLU()


def frozen(block):
    te_mx.freeze_weights(block.up_proj)


def delayed(block):
    block.up_proj.delay_wgrad_compute = True


def own_class(block):
    block.gate_proj.__class__ = type("Sub", (te_mx.Linear,), {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, "up_proj was replaced by a Adapter"),
        (hooked, "gate_proj has hooks"),
        (wrapped, "down_proj has hooks or a forward of its own"),
        (pruned, "gate_proj has hooks"),
        (normed, "down_proj was replaced"),
        (other_activation, "act_fn was changed"),
        (frozen, "up_proj is frozen"),
        (delayed, "up_proj has return_bias"),
        (own_class, "gate_proj was replaced by a Sub"),
    ],
)
def test_changes_after_the_fusion_are_noticed(change, reason):
    fused, plain, x = seeded(Gated), seeded(Gated), given()
    te_mx.convert_model(fused, fuse=True)
    te_mx.convert_model(plain)
    for block in (fused, plain):
        change(block)
    with te_mx.autocast(), torch.no_grad():
        assert torch.equal(fused(x), plain(x))
        assert fused.__dict__[RAN].startswith(reason)
        assert reason in str(te_mx.audit(fused))


def test_a_forward_that_is_replaced_later_runs(monkeypatch):
    block, x = seeded(Gated), given()
    te_mx.convert_model(block, fuse=True)
    monkeypatch.setattr(Gated, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    with te_mx.autocast(), torch.no_grad():
        assert torch.equal(block(x), block.down_proj(block.up_proj(x)))


class Scaled(Gated):
    def forward(self, x):
        return super().forward(x) * 0.5


class Shifted(Gated):
    def forward(self, x):
        return super().forward(x + 1)


class Twice(Gated):
    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x) + 0 * self.gate_proj(x))


class Dropped(Gated):
    def forward(self, x):
        h = F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.1, self.training)
        return self.down_proj(h)


class WithNorm(Gated):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(96)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Scaled, "changes or adds to the result of its last layer"),
        (Shifted, "changes its input"),
        (Twice, "does not call each of its layers once"),
        (Dropped, "no activation that te_mx has in training"),
        (lambda: Gated(nn.Tanh()), "no activation that te_mx has"),
        (lambda: Gated(nn.GELU()), "no activation that te_mx has"),
        (lambda: Gated(nn.ReLU6()), "no activation that te_mx has"),
        (WithNorm, "holds more than the layers"),
    ],
)
def test_blocks_that_are_none_stay_with_a_reason(make, reason):
    block = seeded(make)
    generator = torch.get_rng_state()
    report = te_mx.convert_model(block.eval(), fuse=True)
    assert "(root)" not in report.fused and reason in report.skipped["(root)"]
    assert len(report.converted) == 3
    assert type(block).__name__ in ("Gated", "Scaled", "Shifted", "Twice", "Dropped", "WithNorm")
    assert torch.equal(torch.get_rng_state(), generator)
    excluded = te_mx.convert_model(Gated(), fuse=True, filter_fn=lambda _, name: name != "up_proj")
    assert excluded.fused == [] and "up_proj is excluded by filter_fn" in str(excluded)
