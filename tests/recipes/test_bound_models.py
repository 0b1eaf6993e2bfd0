"""convert_model(model, recipe=...) on models of other libraries: experts, Conv1D and fused blocks
run with it outside of every region, are shown and bound again, and reverted."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hf_models import keep_head, model_of, tokens

import te_mx
from te_mx.nn.base import MXModule
from te_mx.recipe import Format, MXFP8BlockScaling

pytest.importorskip("transformers", minversion="5.0")

RECIPE = MXFP8BlockScaling(scale_rule="floor", fp8_format=Format.HYBRID)
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# By model: what it is made with, and layers with their shapes in the report.
MODELS = {
    "Llama": ({}, {"model.layers.0.mlp.gate_proj": "64 -> 96"}),
    "GPT2": (NO_DROPOUT, {"transformer.h.0.attn.c_attn": "64 -> 192"}),
    "Mixtral": (EXPERTS, {"model.layers.0.mlp.experts": "2 x 64 -> 192 -> 64"}),
    "GptOss": (EXPERTS | {"head_dim": 16}, {"model.layers.0.mlp.experts": "2 x 64 -> 192 -> 64"}),
}


def step(model) -> list[torch.Tensor]:
    """Loss, logits and gradients."""
    model.zero_grad()
    ids = tokens()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    held = dict(model.named_parameters()).values()
    return [out.loss.detach(), out.logits.detach(), *(p.grad for p in held if p.grad is not None)]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_without_a_region_and_back(name, fuse):
    more, shapes = MODELS[name]
    plain = model_of(name, **more)
    classes = {n: type(m) for n, m in plain.named_modules()}
    bound, converted = copy.deepcopy(plain), copy.deepcopy(plain)
    report = te_mx.convert_model(bound, recipe=RECIPE, fuse=fuse, filter_fn=keep_head)
    te_mx.convert_model(converted, fuse=fuse, filter_fn=keep_head)
    assert shapes.items() <= {row.name: row.shape for row in report}.items()
    with te_mx.autocast(recipe=RECIPE):
        want = step(converted)
    assert same(step(bound), want)
    if fuse and name == "Llama":
        rows = te_mx.audit(bound)
        for part in ("mlp", "input_layernorm", "post_attention_layernorm"):
            assert rows[f"model.layers.0.{part}"].kind.endswith(": fused")
    for other in (copy.deepcopy(bound), pickle.loads(pickle.dumps(bound))):
        assert same(step(other), want)
    with te_mx.autocast(enabled=False):
        off = step(bound)
    assert not same(off, want)

    again = te_mx.convert_model(bound, recipe=te_mx.get_default_recipe(), filter_fn=keep_head)
    assert shapes.items() <= {row.name: row.shape for row in again}.items()
    assert again.count("bound") == sum(isinstance(m, MXModule) for m in bound.modules())
    with te_mx.autocast(recipe=RECIPE):
        assert same(step(bound), want)
    with te_mx.autocast():
        want = step(converted)
    assert same(step(bound), want)

    te_mx.revert_model(bound)
    assert {n: type(m) for n, m in bound.named_modules()} == classes
    assert not any("te_mx" in key or key in ("_bound", "_gate") for m in bound.modules()
                   for key in m.__dict__)  # fmt: skip
    assert same(step(bound), step(plain))
