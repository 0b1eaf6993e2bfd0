"""A conformance set for routed products: routings of every kind with oracles that loop over tokens.

Whoever takes sorted_token_ids, expert_ids and num_tokens_post_padded as vLLM lays them out can be
held to it: `ROUTINGS` are the topk_ids, `aligned` lays them out, `poisoned` does what is allowed to
the memory behind, `product` says what must come out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_I32 = torch.int32


class Routed(NamedTuple):
    """topk_ids [M, top_k] among `experts`, of which `expert_map` says which are here (`local`)."""

    topk_ids: Tensor
    experts: int
    block_m: int
    expert_map: Tensor | None = None

    @property
    def local(self) -> int:
        return self.experts if self.expert_map is None else int(self.expert_map.max()) + 1

    @property
    def routed(self) -> int:
        return self.topk_ids.numel()

    def expert_of(self, row: int) -> int:
        """The expert here of a routed row, -1 for none."""
        expert = int(self.topk_ids.reshape(-1)[row])
        if expert < 0 or self.expert_map is None:
            return expert
        return int(self.expert_map[expert])


def _random(tokens: int, top_k: int, experts: int, block_m: int, seed: int) -> Routed:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    return Routed(ids.to(_I32), experts, block_m)


def _mapped(routed: Routed, here: list[int]) -> Routed:
    local = torch.full((routed.experts,), -1, dtype=_I32)
    local[here] = torch.arange(len(here), dtype=_I32)
    return routed._replace(expert_map=local)


def _with_holes(routed: Routed) -> Routed:
    ids = routed.topk_ids.clone()
    ids[::2, -1] = -1
    return routed._replace(topk_ids=ids)


ROUTINGS: dict[str, Routed] = {
    "one token": _random(1, 2, 8, 4, 0),
    "one token, one expert": _random(1, 1, 1, 16, 1),
    "fewer slots than experts": _random(3, 2, 16, 8, 2),
    "more than a block of one expert": Routed(torch.ones(11, 1, dtype=_I32), 4, 4),
    "blocks of one": _random(9, 3, 5, 1, 3),
    "no power of two": _random(13, 3, 7, 6, 4),
    "many tokens": _random(65, 4, 6, 16, 5),
    "every expert of every token": _random(6, 4, 4, 8, 6),
    "an expert named twice": Routed(torch.tensor([[2, 2], [0, 2]], dtype=_I32), 3, 4),
    "slots of no expert": _with_holes(_random(8, 3, 6, 4, 7)),
    "some experts elsewhere": _mapped(_random(17, 4, 12, 8, 8), [1, 4, 5, 11]),
    "nothing here": _mapped(Routed(torch.zeros(4, 1, dtype=_I32), 4, 4), [2]),
}


class Lists(NamedTuple):
    """What a routed product is given."""

    sorted_token_ids: Tensor
    expert_ids: Tensor
    num_tokens_post_padded: Tensor


def capacity(r: Routed) -> int:
    most = r.routed + r.experts * (r.block_m - 1)
    return min(most, r.routed * r.block_m) if r.routed < r.experts else most


def aligned(r: Routed) -> Lists:
    """The lists, slot by slot: padding ids behind the rows of an expert and behind the count."""
    ids, experts = [], []
    for expert in range(r.experts):
        own = [i for i, e in enumerate(r.topk_ids.reshape(-1).tolist()) if e == expert]
        own += [r.routed] * (-len(own) % r.block_m)
        here = expert if r.expert_map is None else int(r.expert_map[expert])
        ids += own
        experts += [here] * (len(own) // r.block_m)
    size = capacity(r)
    blocks = -(-size // r.block_m)
    return Lists(
        torch.tensor(ids + [r.routed] * (size - len(ids)), dtype=_I32),
        torch.tensor(experts + [-1] * (blocks - len(experts)), dtype=_I32),
        torch.tensor([len(ids)], dtype=_I32),
    )


def poisoned(lists: Lists, block_m: int, more: int) -> Lists:
    """The same lists with memory behind the count that was never written, and `more` of it, so that
    no length is a multiple of a block."""
    used = int(lists.num_tokens_post_padded)
    waste = torch.tensor([0, -(2**31), 2**31 - 1, 3, -1], dtype=_I32)
    ids = torch.cat([lists[0][:used], waste.repeat(used + more)[: len(lists[0]) - used + more]])
    blocks = used // block_m
    tail = waste.repeat(blocks + more)[: len(lists[1]) - blocks + more]
    return Lists(ids, torch.cat([lists[1][:blocks], tail]), lists[2])


def in_turns(lists: Lists, r: Routed) -> Lists:
    """The same rows with the blocks in another order, and rows of a block too: both are free."""
    used = int(lists.num_tokens_post_padded)
    blocks = used // r.block_m
    generator = torch.Generator().manual_seed(used)
    order = torch.randperm(blocks, generator=generator)
    ids = lists[0][:used].view(blocks, r.block_m)[order]
    ids = ids[:, torch.randperm(r.block_m, generator=generator)].reshape(-1)
    return Lists(
        torch.cat([ids, lists[0][used:]]), torch.cat([lists[1][:blocks][order], lists[1][blocks:]]),
        lists[2],
    )  # fmt: skip


def product(
    r: Routed, a: Tensor, w: Tensor, a_div: int, weights: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(values [routed, N] in fp64, sums of magnitudes, which rows are routed), from values of a
    [M, K] and w [E, N, K]."""
    n = w.shape[1]
    out = torch.zeros(r.routed, n, dtype=torch.float64)
    magnitude, hit = torch.zeros_like(out), torch.zeros(r.routed, dtype=torch.bool)
    a, w = a.double(), w.double()
    for row in range(r.routed):
        expert = r.expert_of(row)
        if expert < 0:
            continue
        hit[row] = True
        x = a[row // a_div]
        out[row], magnitude[row] = w[expert] @ x, w[expert].abs() @ x.abs()
        if bias is not None:
            out[row] += bias[expert].double()
            magnitude[row] += bias[expert].double().abs()
        if weights is not None:
            out[row] *= weights.reshape(-1)[row].double()
            magnitude[row] *= weights.reshape(-1)[row].double().abs()
    return out, magnitude, hit
