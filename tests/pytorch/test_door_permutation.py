"""Tokens in the order of their experts, and back: against loops."""

from __future__ import annotations

import pytest
import torch

import te_mx.pytorch as te

T, E, K, HIDDEN = 11, 4, 2, 6


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, the experts of each (one expert has none), and a mask of them."""
    torch.manual_seed(0)
    x = torch.randn(T, HIDDEN, dtype=torch.float64, requires_grad=True)
    experts = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])
    mask = torch.zeros(T, E, dtype=torch.int32)
    mask.scatter_(1, experts, 1)
    mask[3] = 0  # a token that goes nowhere
    return x, experts.int(), mask


def by_loop(mask: torch.Tensor) -> list[tuple[int, int]]:
    """(token, expert) of each permuted row."""
    return [(t, e) for e in range(E) for t in range(T) if mask[t, e]]


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Up to the rounding of sums in fp32."""
    return one.shape == other.shape and bool((one - other).abs().max() < 1e-6)


def test_a_mask_groups_tokens_by_expert():
    x, _, mask = routed()
    rows = by_loop(mask)
    permuted, row_map = te.moe_permute(x, mask, len(rows))
    assert torch.equal(permuted, x[[t for t, _ in rows]])
    probs = torch.rand(T, E, dtype=torch.float64, requires_grad=True)
    out = te.moe_unpermute(permuted, row_map, probs, x.shape)
    expected = x * (probs * mask).sum(1, keepdim=True)
    assert near(out, expected)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, probs), grad)
    wanted = torch.autograd.grad(expected, (x, probs), grad)
    assert all(near(a, b) for a, b in zip(got, wanted, strict=True))
    assert near(te.moe_unpermute(permuted, row_map), x * mask.sum(1, keepdim=True))
    with pytest.raises(ValueError, match="give one"):
        te.moe_unpermute(permuted, row_map, probs, probs=probs)


def test_fewer_rows_drop_the_last_and_more_are_zeros():
    x, _, mask = routed()
    rows = by_loop(mask)
    cut = 9
    permuted, row_map = te.moe_permute(x, mask, cut)
    assert torch.equal(permuted, x[[t for t, _ in rows[:cut]]])
    expected = torch.zeros(T, HIDDEN, dtype=torch.float64)
    for t, _ in rows[:cut]:
        expected[t] += x[t].detach()
    assert near(te.moe_unpermute(permuted, row_map), expected)
    longer, row_map = te.moe_permute(x, mask, len(rows) + 3)
    assert not longer[len(rows) :].any() and longer[: len(rows)].all()
    assert near(te.moe_unpermute(longer, row_map), x * mask.sum(1, keepdim=True))


def test_indices_group_tokens_too():
    x, experts, _ = routed()
    permuted, row_map = te.moe_permute(x, experts, 0, map_type="index")
    order = experts.view(-1).argsort(stable=True)
    assert torch.equal(permuted, x[order // K])
    probs = torch.rand(T, K)
    out = te.moe_unpermute(permuted, row_map, probs, map_type="index")
    assert near(out, x * probs.sum(1, keepdim=True))


def test_probabilities_go_along():
    x, _, mask = routed()
    rows = by_loop(mask)
    probs = torch.rand(T, E, requires_grad=True)
    permuted, picked, row_map = te.moe_permute_with_probs(x, probs, mask, len(rows))
    assert torch.equal(picked, torch.stack([probs[t, e] for t, e in rows]))
    picked.sum().backward()
    assert torch.equal(probs.grad, mask.float())
    plain, plain_map = te.moe_permute(x, mask, len(rows))
    assert torch.equal(plain_map, row_map) and torch.equal(permuted, plain)


@pytest.mark.parametrize("align", [1, 8])
def test_padding_between_experts(align):
    x, _, mask = routed()
    probs = torch.rand(T, E)
    counts = mask.sum(0)
    permuted, picked, row_map, offsets, padded = te.moe_permute_and_pad_with_probs(
        x, probs, mask, counts, align
    )
    assert torch.equal(padded, (counts + align - 1) // align * align)
    assert (offsets is None) == (align == 1) and len(permuted) == int(padded.sum())
    first = 0
    for e in range(E):
        tokens = [t for t in range(T) if mask[t, e]]
        assert torch.equal(permuted[first : first + len(tokens)], x[tokens])
        assert torch.equal(picked[first : first + len(tokens)], probs[tokens, e])
        stop = first + int(padded[e])
        assert not permuted[first + len(tokens) : stop].any()
        first = stop
    out = te.moe_unpermute(permuted, row_map, probs, pad_offsets=offsets)
    assert near(out, x * (probs * mask).sum(1, keepdim=True))


def test_a_layer_of_experts():
    """permute, GroupedLinear, unpermute."""
    x, _, mask = routed()
    x = x.detach().float()
    layer = te.GroupedLinear(E, HIDDEN, 3)
    permuted, row_map = te.moe_permute(x, mask, int(mask.sum()))
    out = te.moe_unpermute(layer(permuted, mask.sum(0).tolist()), row_map)
    expected = torch.zeros(T, 3)
    for t, e in by_loop(mask):
        weight, bias = getattr(layer, f"weight{e}"), getattr(layer, f"bias{e}")
        expected[t] += torch.nn.functional.linear(x[t], weight, bias)
    assert near(out, expected)


def test_runs_of_rows_in_another_order():
    x = torch.randn(9, HIDDEN, requires_grad=True)
    sizes, order = torch.tensor([2, 0, 4, 3]), torch.tensor([2, 3, 0, 1])
    chunks = x.split(sizes.tolist())
    expected = torch.cat([chunks[i] for i in order])
    probs = torch.rand(9)
    out, moved = te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    assert torch.equal(out, expected)
    assert torch.equal(out, te.moe_sort_chunks_by_index(x, sizes, order))
    assert torch.equal(moved, torch.cat([probs.split(sizes.tolist())[i] for i in order]))
    with pytest.raises(ValueError, match="must add up to the 9 rows"):
        te.moe_sort_chunks_by_index(x, sizes + 1, order)


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_or_one(tokens):
    """Also back: a rank without tokens takes part in the backward pass."""
    x, mask = torch.randn(tokens, HIDDEN), torch.ones(tokens, E, dtype=torch.bool)
    permuted, row_map = te.moe_permute(x, mask, tokens * E)
    assert permuted.shape == (tokens * E, HIDDEN)
    assert torch.allclose(te.moe_unpermute(permuted, row_map), x * E)
    x.requires_grad_()
    probs = torch.rand(tokens, E, requires_grad=True)
    experts = torch.arange(E, dtype=torch.int32).expand(tokens, E)
    counts = torch.full((E,), tokens, dtype=torch.int32)
    order = torch.arange(E)
    with_probs = te.moe_permute_with_probs(x, probs, mask, tokens * E)
    results = [
        te.moe_permute(x, mask, tokens * E)[0],
        te.moe_permute(x, mask, 8)[0],
        te.moe_permute(x, experts, 0, map_type="index")[0],
        *with_probs[:2],
        *te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 4)[:2],
        te.moe_unpermute(with_probs[0], with_probs[2], probs),
        te.moe_sort_chunks_by_index(with_probs[0], counts, order),
        *te.moe_sort_chunks_by_index_with_probs(*with_probs[:2], counts, order),
    ]
    for result in results:
        grads = torch.autograd.grad(result.sum(), (x, probs), retain_graph=True, allow_unused=True)
        assert [g.shape for g in grads if g is not None]
        same = zip(grads, (x, probs), strict=True)
        assert all(grad is None or grad.shape == of.shape for grad, of in same)
