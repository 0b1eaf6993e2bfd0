"""parallel_cross_entropy against torch's, and over two processes against one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import te_mx.pytorch as te
from te_mx.pytorch import cross_entropy

B, S, V = 3, 5, 16


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    logits = (torch.randn(B, S, V, generator=gen) * 4).to(dtype).requires_grad_()
    target = torch.randint(0, V, (B, S), generator=gen)
    target[1, 2] = target[0, 0] = -100
    return logits, target


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchs(smoothing, reduced, dtype):
    logits, target = problem(dtype)
    loss = te.parallel_cross_entropy(logits, target, smoothing, reduced)
    expected = F.cross_entropy(
        logits.float().view(-1, V), target.view(-1), label_smoothing=smoothing,
        reduction="mean" if reduced else "none",
    )  # fmt: skip
    expected = expected if reduced else expected.view(B, S)
    assert loss.dtype == torch.float32 and torch.allclose(loss, expected, atol=1e-5)
    got, wanted = (torch.autograd.grad(one.sum(), logits)[0] for one in (loss, expected))
    bound = 1e-6 if dtype is torch.float32 else 2.0**-8
    assert got.dtype == dtype and (got - wanted).abs().max() < bound


@pytest.mark.parametrize("word", [V, -1])
def test_words_outside_of_the_vocabulary(word, monkeypatch):
    """An error where the host may look at targets, else NaN, not the loss of another word."""
    logits, target = problem()
    target[2, 1] = word
    with pytest.raises(ValueError, match=f"target must be 0 to {V - 1}, or ignore_idx, got {word}"):
        te.parallel_cross_entropy(logits, target)
    monkeypatch.setattr(cross_entropy, "readable", lambda words: False)
    loss = te.parallel_cross_entropy(logits, target)
    assert loss.isnan().nonzero().tolist() == [[2, 1]]


def _one_of_two(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    try:
        logits, target = problem()
        share = logits.detach()[..., rank * V // 2 : (rank + 1) * V // 2].clone().requires_grad_()
        group = torch.distributed.group.WORLD
        for smoothing in (0.0, 0.3):
            share.grad = None
            loss = te.parallel_cross_entropy(share, target, smoothing, True, group)
            loss.backward()
            torch.save((loss.detach(), share.grad), Path(folder, f"{rank}-{smoothing}.pt"))
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_with_half_of_the_words_each(tmp_path):
    torch.multiprocessing.spawn(_one_of_two, (str(tmp_path),), nprocs=2)
    logits, target = problem()
    for smoothing in (0.0, 0.3):
        logits.grad = None
        whole = te.parallel_cross_entropy(logits, target, smoothing, True)
        whole.backward()
        halves = [torch.load(tmp_path / f"{rank}-{smoothing}.pt") for rank in range(2)]
        assert all(torch.allclose(loss, whole) for loss, _ in halves)
        assert torch.allclose(torch.cat([grad for _, grad in halves], -1), logits.grad, atol=1e-7)
