"""Zero-bubble pipelines: gradients of inputs first, those of weights later, as torch's schedules
compute them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import te_mx


def stage():
    return nn.Sequential(te_mx.LayerNormLinear(64, 64), te_mx.LayerNormMLP(64, 96), nn.ReLU())


def test_in_two_parts():
    """The bits of one backward pass; torch before 2.13 loses autograd functions in between."""
    model, x, grad = stage(), torch.randn(8, 64, requires_grad=True), torch.randn(8, 64)
    whole, inp = copy.deepcopy(model), x.detach().clone().requires_grad_()
    with te_mx.autocast():
        whole(inp).backward(grad)
        y = model(x)
    if torch.__version__ < "2.13":
        with pytest.raises(NotImplementedError, match=r"needs PyTorch 2.13 or newer.*Schedule1F1B"):
            stage_backward_input([y], [grad], [x], model.parameters())
        y.backward(grad)  # nothing has run yet
    else:
        _, groups = stage_backward_input([y], [grad], [x], model.parameters())
        assert all(p.grad is None for p in model.parameters())
        stage_backward_weight(model.parameters(), groups)
    assert torch.equal(x.grad, inp.grad)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_other_hooks_of_nodes_run():
    model, seen = stage(), []
    with te_mx.autocast():
        y = model[0](torch.randn(8, 64))
    y.grad_fn.register_prehook(seen.append)
    y.sum().backward()
    assert len(seen) == 1
