"""Output projections of attentions that keep their result: they keep the same tensor."""

from __future__ import annotations

import pytest
import torch
from hf_models import keep_head, model_of
from mlp_blocks import BF16
from torch._dynamo.testing import AotEagerAndRecordGraphs

import te_mx


def step(call, x):
    """Forward and backward; of every tensor that is kept whether it is x."""
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with te_mx.autocast(), hooks:
        y = call(x)
    y.sum().backward()
    return [t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in kept]


@pytest.mark.parametrize("attribute", ["keeps_given_input", "save_original_input"])
def test_kept_as_it_is(attribute):
    torch.compiler.reset()
    layer = te_mx.Linear(64, 32, dtype=BF16)
    setattr(layer, attribute, True)
    x = torch.randn(48, 64, dtype=BF16, requires_grad=True)
    assert any(step(layer, x))
    graphs = AotEagerAndRecordGraphs()
    step(torch.compile(layer, fullgraph=True, backend=graphs), x)
    nodes = [n for g in (graphs.fw_graphs[0], graphs.bw_graphs[0]) for n in g.graph.nodes]
    reads = sum(node.target is torch.ops.te_mx.quantize.default for node in nodes)
    assert reads == 5  # w and x twice, the gradient


def test_found_and_given_back():
    pytest.importorskip("transformers")
    model = model_of("Llama")
    te_mx.convert_model(model, fuse=True, filter_fn=keep_head)
    attention = model.model.layers[0].self_attn
    assert attention.o_proj.keeps_given_input and not attention.o_proj.save_original_input
    assert not attention.q_proj.keeps_given_input
    te_mx.revert_model(model)
    assert "keeps_given_input" not in vars(attention.o_proj)
