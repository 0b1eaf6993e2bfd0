"""The loss of Transformers' language models over parts of the tokens: the library's bits."""

from __future__ import annotations

import pytest
import torch
from hf_models import model_of
from transformers.loss.loss_utils import ForCausalLMLoss

import te_mx
from te_mx.fusion import in_place
from te_mx.fusion.in_place import causal_lm_loss


@pytest.mark.parametrize("words", [1003, 32000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": torch.tensor(100)}, {"other": 1}])
def test_bits_of_the_library(words, dtype, more, monkeypatch):
    monkeypatch.setattr(in_place, "_PART", 16 * words)
    parts, run = [], in_place.loss_in_parts
    monkeypatch.setattr(in_place, "loss_in_parts", lambda *args: parts.append(args) or run(*args))
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
    assert len(parts) == ("other" not in more)


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
