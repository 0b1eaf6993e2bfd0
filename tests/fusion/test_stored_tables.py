"""Tables of rotary embeddings in compiled code: written once, the same numbers, gone where nobody
asked for them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hf_models import keep_head, model_of, tokens
from mlp_blocks import BF16
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

import te_mx
from te_mx.fusion.in_place import StoredTables

STORED = torch.ops.te_mx.stored.default


class Rotary(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 100.0 ** torch.linspace(0, 1, width // 2))

    @torch.no_grad()
    def forward(self, x):
        turns = torch.arange(x.shape[0], device=x.device)[:, None] * self.inv_freq
        turns = torch.cat([turns, turns], -1)
        return turns.cos().to(x.dtype), turns.sin().to(x.dtype)


class OneTable(Rotary):
    def forward(self, x):
        return super().forward(x)[1]


class Model(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.rotary, self.layer = rotary, nn.Linear(16, 16, dtype=BF16)

    def forward(self, x):
        tables, y = self.rotary(x), self.layer(x)
        return y * tables[0] + y.flip(-1) * tables[1] if type(tables) is tuple else y * tables


@pytest.fixture(autouse=True)
def compiles_anew():
    torch.compiler.reset()


def fused(rotary=Rotary):
    torch.manual_seed(0)
    model = Model(rotary())
    return model, te_mx.convert_model(model, fuse=True)


def given():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(BF16)


def compiled(model):
    graphs = AotEagerAndRecordGraphs()
    return torch.compile(model, fullgraph=True, backend=graphs), graphs


def count(graphs):
    return [sum(node.target is STORED for node in graph.graph.nodes) for graph in graphs]


@pytest.mark.parametrize(("rotary", "tables"), [(Rotary, 2), (OneTable, 1)])
def test_stored_once_in_compiled_code(rotary, tables):
    model, report = fused(rotary)
    assert isinstance(model.rotary, StoredTables) and "rotary" in report.fused
    made, graphs = compiled(model)
    with te_mx.autocast():
        y, want = made(given()), model(given())
    assert torch.equal(y, want)
    y.sum().backward()
    assert count(graphs.fw_graphs) == [tables] and count(graphs.bw_graphs) == [0]


def test_in_a_region_alone():
    model, _ = fused()
    made, graphs = compiled(model)
    assert torch.equal(made(given()), model(given()))
    with te_mx.autocast(enabled=False):
        made(given())
    assert not any(count(graphs.fw_graphs))
    te_mx.convert_model(model, recipe=te_mx.recipe.MXFP8BlockScaling())  # bound: no region needed
    made, graphs = compiled(model)
    made(given())
    assert count(graphs.fw_graphs) == [2]


def test_eager_code_computes_as_ever():
    model, _ = fused()
    with te_mx.autocast():
        tables = model.rotary(given())
    assert all(torch.equal(a, b) for a, b in zip(tables, Rotary()(given()), strict=True))


def with_parameter():
    rotary = Rotary()
    rotary.scale = nn.Parameter(torch.ones(1))
    return rotary


def with_hook():
    rotary = Rotary()
    rotary.register_forward_hook(lambda *_: None)
    return rotary


@pytest.mark.parametrize("rotary", [with_parameter, with_hook])
def test_what_does_more_than_tables_stays(rotary):
    model, report = fused(rotary)
    assert type(model.rotary) is Rotary and "rotary" not in report.fused


def test_what_is_differentiated_is_not_stored():
    class Learned(Rotary):
        def forward(self, x):
            return x * self.inv_freq.sum(), x + 1

    model, _ = fused(Learned)
    made, graphs = compiled(model)
    x = given().requires_grad_()
    with te_mx.autocast():
        made(x).sum().backward()
    assert count(graphs.fw_graphs) == [0] and x.grad is not None


def test_copies_and_the_way_back():
    model, _ = fused()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        made, graphs = compiled(twin)
        with te_mx.autocast():
            made(given())
        assert count(graphs.fw_graphs) == [2]
    te_mx.revert_model(model)
    assert type(model.rotary) is Rotary and not vars(model.rotary).get("_te_mx_tables")


def test_layers_of_llama_read_the_same_tables():
    pytest.importorskip("transformers")
    model = model_of("Llama", num_hidden_layers=2)
    report = te_mx.convert_model(model, fuse=True, filter_fn=keep_head)
    assert "model.rotary_emb" in report.fused
    made, graphs = compiled(model)
    ids = tokens()
    with te_mx.autocast():
        made(ids, labels=ids, use_cache=False).loss.backward()
    assert count(graphs.fw_graphs) == [2]
    sines = [
        n for graph in graphs.fw_graphs for n in graph.graph.nodes if "aten.sin" in str(n.target)
    ]
    assert len(sines) == 1
    assert not any("aten.sin" in str(n.target) for g in graphs.bw_graphs for n in g.graph.nodes)
