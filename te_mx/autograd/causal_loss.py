"""Cross entropy of many tokens over a large vocabulary, in fp32 of logits of fewer bits: what
``F.cross_entropy(logits.float(), labels)`` is, bit for bit, without a tensor of all logits in fp32.
Forward and backward go over parts of the tokens; logits are kept as they are, and their softmax is
computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_PART = 1 << 24  # logits that are in fp32 at a time
_ALIGNED = 16  # tokens: every row of a part lies as it would in all of them, for kernels that look


def _parts(logits_TV: Tensor) -> Iterator[slice]:
    tokens, words = logits_TV.shape
    step = max(_PART // words // _ALIGNED, 1) * _ALIGNED
    return (slice(i, i + step) for i in range(0, tokens, step))


def _picked(logits: Tensor, words: Tensor) -> Tensor:
    return F.log_softmax(logits.float(), 1).gather(1, words)


def _loss(picked_T1: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """The sum over tokens as cross_entropy makes it, of the logarithms that it picks."""
    return F.nll_loss(picked_T1, torch.where(counted, 0, -1), ignore_index=-1, reduction=reduction)


class CausalLoss(torch.autograd.Function):
    """The sum or mean, fp32, of logits [T, V] and int64 labels [T]; ignored are those that are
    `ignore`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore: int, reduction: str) -> Tensor:
        counted = labels != ignore
        words = torch.where(counted, labels, 0).unsqueeze(1)
        picked = torch.cat([_picked(logits[part], words[part]) for part in _parts(logits)])
        ctx.save_for_backward(logits, words, counted, picked)
        ctx.reduction = reduction
        return _loss(picked, counted, reduction)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, words, counted, picked = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody differentiates twice
            loss = _loss(_picked(logits, words), counted, ctx.reduction)
            return *torch.autograd.grad(loss, logits, grads, create_graph=True), None, None, None
        made = torch.empty_like(logits)
        with torch.enable_grad():
            leaf = picked.detach().requires_grad_()
            (each,) = torch.autograd.grad(_loss(leaf, counted, ctx.reduction), leaf, grads)
            for part in _parts(logits):
                own = logits[part].detach().requires_grad_()
                made[part] = torch.autograd.grad(_picked(own, words[part]), own, each[part])[0]
        return made, None, None, None
