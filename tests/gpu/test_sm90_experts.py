"""Converted experts of Transformers on Hopper: bits, waiting for the device, graphs, Inductor."""

from __future__ import annotations

import pytest
import torch
from others_experts import loop_of_linears, stand_alone
from torch import nn

import te_mx

pytest.importorskip("transformers", minversion="5.0")
TOKENS, WIDTH, INNER, EXPERTS = 500, 256, 192, 6


def experts_of(kind: str) -> nn.Module:
    return stand_alone(kind, "silu", WIDTH, INNER, EXPERTS, 0.1).to("cuda", torch.bfloat16)


def routed(seed: int, among: int = EXPERTS) -> list[torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=draw, device="cuda").bfloat16().requires_grad_()
    index = torch.rand(TOKENS, among, generator=draw, device="cuda").topk(2).indices
    scores = torch.rand(TOKENS, 2, generator=draw, device="cuda").requires_grad_()
    return [x, index, scores]


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
