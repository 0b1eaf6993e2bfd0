"""Attention masks that say nothing: compiled code makes none where eager code makes none."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hf_models import keep_head, model_of, tokens
from torch._dynamo.testing import AotEagerAndRecordGraphs

import te_mx

pytest.importorskip("transformers")
NONE, SOME = (True, False), (False, True)  # is_causal, a mask


@pytest.fixture(autouse=True)
def compiles_anew():
    torch.compiler.reset()


def attentions(graphs):
    """Of every attention of the forward graphs whether it is causal, and whether it has a mask."""
    return [
        (len(node.args) > 4 and node.args[4], node.kwargs.get("attn_mask") is not None)
        for graph in graphs.fw_graphs for node in graph.graph.nodes
        if "scaled_dot_product" in str(node.target) and node.op == "call_function"
    ]  # fmt: skip


def run(model, ids=None, enabled=True, **more):
    """The attentions of a compiled step, its loss and its gradients."""
    graphs = AotEagerAndRecordGraphs()
    made = torch.compile(model, fullgraph=True, backend=graphs)
    model.zero_grad(set_to_none=True)
    ids = tokens() if ids is None else ids
    with te_mx.autocast(enabled=enabled):
        loss = made(ids, labels=ids, **{"use_cache": False, **more}).loss
    loss.backward()
    return attentions(graphs), loss, [p.grad for p in model.parameters()]


def fused(name="Llama", **more):
    model = model_of(name, **more)
    return model, te_mx.convert_model(model, fuse=True, filter_fn=keep_head)


def eager(model, **more):
    with te_mx.autocast():
        return model(tokens(), labels=tokens(), use_cache=False, **more).loss


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Qwen3"])
def test_none_is_made(name):
    model, report = fused(name)
    assert "model" in report.fused
    found, loss, grads = run(model)
    assert found == [NONE]
    assert abs(loss - eager(model)) < 1e-3 * loss and all(g is not None for g in grads)


def packed():
    return torch.cat([torch.arange(6), torch.arange(10)])[None].expand(2, -1)


def padded():
    return (torch.arange(16) < torch.tensor([[16], [9]])).long()


GIVEN = {"position_ids": packed, "attention_mask": padded}


@pytest.mark.parametrize("name", GIVEN)
def test_masks_that_say_more_are_made(name):
    model, _ = fused()
    more = {name: GIVEN[name]()}
    found, loss, _ = run(model, **more)
    assert found == [SOME]
    want = eager(model, **more)
    assert abs(loss - want) < 0.1 * abs(eager(model) - want)


def test_in_a_region_alone():
    model, _ = fused()
    assert run(model, enabled=False)[0] == [SOME]


def test_windows_are_kept():
    """Where tokens fit in a window nothing is left out; four do."""
    model, report = fused("Mistral", sliding_window=8)
    assert "model" in report.fused
    assert run(model)[0] == [SOME]
    torch.compiler.reset()
    assert run(model, tokens()[:, :4].contiguous())[0] == [NONE]
    assert abs(run(model)[1] - eager(model)) < 1e-3 * eager(model)


def test_attentions_that_add_the_mask_are_left():
    assert "model" not in fused(attn_implementation="eager")[1].fused
    model, _ = fused()
    model.set_attn_implementation("eager")
    assert abs(run(model)[1] - eager(model)) < 1e-3 * eager(model)
    model, _ = fused()
    model.config.is_causal = False  # as it was not when the model was looked at
    _, loss, _ = run(model)
    assert abs(loss - eager(model)) < 1e-3 * loss


def test_layers_that_were_replaced_get_their_mask():
    class Other(torch.nn.Module):
        def forward(self, hidden_states, attention_mask=None, **others):
            got.append((attention_mask.shape, [*others]))
            return hidden_states

    model, _ = fused(num_hidden_layers=2)
    model.model.layers[1], got = Other(), []
    assert run(model)[0] == [SOME]
    assert got and all(s == (2, 1, 16, 16) and "te_mx_no_mask" not in names for s, names in got)


def test_copies_and_the_way_back():
    model, _ = fused()
    own = type(model_of("Llama").model)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert run(twin)[0] == [NONE]
    te_mx.revert_model(model)
    assert type(model.model) is own
    assert type(model.model.layers[0]) is type(model_of("Llama").model.layers[0])
    assert not vars(model.model).get("_te_mx_traced")


def test_checkpointed_layers():
    model, _ = fused()
    want = run(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    _, loss, grads = run(model)
    assert torch.equal(loss, want[1])
    assert all(torch.equal(*pair) for pair in zip(grads, want[2], strict=True))


def test_sizes_that_are_not_known_keep_it():
    model, _ = fused()
    graphs = AotEagerAndRecordGraphs()
    made = torch.compile(model, dynamic=True, backend=graphs)
    with te_mx.autocast():
        for length in (16, 24):
            ids = tokens(length=length)
            loss = made(ids, labels=ids, use_cache=False).loss
            want = model(ids, labels=ids, use_cache=False).loss
            assert abs(loss - want) < 1e-3 * want
