"""Converted experts of Transformers on Hopper: bits, waiting for the device, graphs, Inductor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import te_mx

pytest.importorskip("transformers", minversion="5.0")
TOKENS, WIDTH, INNER, EXPERTS = 500, 256, 192, 6


def experts_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = SimpleNamespace(
        hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS, hidden_act="silu",
        swiglu_alpha=1.7, swiglu_limit=7.0, _experts_implementation="grouped_mm",
    )  # fmt: skip
    if kind == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Experts
    else:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts
    made = Experts(config).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.1)
    return made


def routed(seed: int, among: int = EXPERTS) -> list[torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=draw, device="cuda").bfloat16().requires_grad_()
    index = torch.rand(TOKENS, among, generator=draw, device="cuda").topk(2).indices
    scores = torch.rand(TOKENS, 2, generator=draw, device="cuda").requires_grad_()
    return [x, index, scores]


def loop_of_linears(experts, x, index, scores):
    out = torch.zeros(*index.shape, WIDTH, dtype=x.dtype, device="cuda")
    for e in range(EXPERTS):
        token, slot = torch.where(index == e)
        h = x[token]
        for key in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, key)[e]
            weight = (weight.t() if experts.is_transposed else weight).contiguous()
            layer = te_mx.Linear(weight.shape[1], weight.shape[0], experts.has_bias, "meta")
            held = {"weight": weight}
            if experts.has_bias:
                held["bias"] = getattr(experts, f"{key}_bias")[e]
            h = torch.func.functional_call(layer, held, (h,))
            h = experts._apply_gate(h) if key == "gate_up_proj" else h
        out = out.index_put((token, slot), h)
    return (out * scores.unsqueeze(-1)).sum(1).to(x.dtype)


def step(run, given, held):
    with te_mx.autocast():
        y = run(*given)
    return y, *torch.autograd.grad(y.float().square().sum(), held)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_bits_of_a_loop_of_linears(kind):
    experts = experts_of(kind)
    given = routed(1, among=EXPERTS - 1)  # one has no tokens
    held = [given[0], given[2], *experts.parameters()]
    want = step(lambda *g: loop_of_linears(experts, *g), given, held)
    te_mx.convert_model(experts)
    got = step(experts, given, held)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_nothing_waits_and_a_graph_takes_other_routes(kind):
    experts = experts_of(kind)
    te_mx.convert_model(experts)
    given, other = routed(1), routed(2, among=3)
    other[1][:100, 1] = EXPERTS  # pairs of other ranks
    held = [given[0], given[2], *experts.parameters()]
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step(experts, given, held)
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(experts, given, held)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step(experts, given, held)
    want = step(experts, other, [other[0], other[2], *experts.parameters()])
    with torch.no_grad():
        for mine, theirs in zip(given, other, strict=True):
            mine.copy_(theirs)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_compiled_by_inductor(kind):
    experts = experts_of(kind)
    te_mx.convert_model(experts)
    given = routed(3)
    held = [given[0], given[2], *experts.parameters()]
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True)
    for a, b in zip(step(compiled, given, held), step(experts, given, held), strict=True):
        # Inductor rounds the gate once where eager rounds each of its steps.
        assert (a.float() - b.float()).norm() <= 0.03 * b.float().norm()
