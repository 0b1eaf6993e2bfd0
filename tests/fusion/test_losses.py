"""The loss of Transformers' language models over parts of the tokens: the library's bits."""

from __future__ import annotations

import pytest
import torch
from hf_models import model_of
from transformers.loss.loss_utils import ForCausalLMLoss

import te_mx
from te_mx.autograd import causal_loss
from te_mx.fusion.losses import causal_lm_loss


@pytest.mark.parametrize("words", [1003, 32000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": torch.tensor(100)}, {"other": 1}])
def test_bits_of_the_library(words, dtype, more, monkeypatch):
    monkeypatch.setattr(causal_loss, "_PART", 16 * words)
    torch.manual_seed(0)
    logits = (4 * torch.randn(2, 41, words)).to(dtype)
    labels = torch.randint(words, (2, 41))
    labels[0, 5:9] = -100
    made = []
    for function in (ForCausalLMLoss, causal_lm_loss):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, labels, words, **more)
        made.append((loss, *torch.autograd.grad(loss, leaf)))
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))
    nodes = [made[1][0].grad_fn, *(node for node, _ in made[1][0].grad_fn.next_functions)]
    assert ("CausalLossBackward" in [type(node).__name__ for node in nodes]) == (
        "other" not in more
    )


def test_it_has_second_derivatives():
    torch.manual_seed(0)
    logits, labels = torch.randn(1, 5, 11, requires_grad=True), torch.randint(11, (1, 5))
    made = []
    for function in (ForCausalLMLoss, causal_lm_loss):
        (grad,) = torch.autograd.grad(function(logits, labels, 11), logits, create_graph=True)
        made.append(torch.autograd.grad(grad.square().sum(), logits)[0])
    assert torch.equal(*made)


def test_models_get_it_and_give_it_back():
    model = model_of("Llama")
    report = te_mx.convert_model(model, fuse=True)
    assert "its loss goes over parts of the tokens" in str(report)
    assert model.loss_function is causal_lm_loss
    tokens = torch.randint(model.config.vocab_size, (2, 8))
    with te_mx.autocast(enabled=False):
        loss = model(input_ids=tokens, labels=tokens).loss
    te_mx.revert_model(model)
    assert model.loss_function is ForCausalLMLoss
    assert torch.equal(loss, model(input_ids=tokens, labels=tokens).loss)
