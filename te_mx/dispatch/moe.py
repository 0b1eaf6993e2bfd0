"""Words of products whose rows are routed to experts, in the conventions of serving: lists of rows
that are sorted by expert and cut into blocks.

A routed row is a (token, slot) pair, ``r = token * top_k + slot``. Position p of sorted_token_ids
holds a routed row, or something that is none (the padding id, the number of routed rows); its block
``p // block_m`` belongs to expert_ids[p // block_m], -1 for an expert that is not here. Positions
from num_tokens_post_padded on hold nothing, whatever lies there.

Without sorted_token_ids every routed row r is a block of its own, of expert_ids[r]."""

from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.dispatch.calls import Mode
from te_mx.dispatch.fused import Activation
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.layouts.operand import Operand, Stack


class Routing(NamedTuple):
    """Which routed row meets which expert, int32. Row r reads row ``r // a_div`` of the tokens;
    a token is sent to top_k experts."""

    sorted_token_ids: Tensor | None  # [positions]
    expert_ids: Tensor  # [blocks]
    num_tokens_post_padded: Tensor | None  # [1]; None: all count
    block_m: int
    a_div: int
    top_k: int = 1

    def experts(self, routed: int, count: int) -> Tensor:
        """The expert of every routed row, int64 [routed]; -1 for rows of none. No host waits."""
        ids, blocks = self.sorted_token_ids, self.expert_ids
        size = routed if ids is None else len(ids)
        at = torch.arange(size, device=blocks.device)
        block = at if ids is None else at // self.block_m
        first = block * self.block_m if ids is None else at
        live = block < len(blocks)
        if self.num_tokens_post_padded is not None:
            live = live & (first < self.num_tokens_post_padded)
        if len(blocks) == 0 or size == 0:
            return at.new_full((routed,), -1)
        expert = blocks.long()[block.clamp(max=len(blocks) - 1)]
        live = live & (expert >= 0) & (expert < count)
        if ids is None:
            return torch.where(live, expert, -1)
        row = ids.long()
        live = live & (row >= 0) & (row < routed)
        found = at.new_full((routed + 1,), -1)
        to = torch.where(live, row, routed)  # what is no row meets in one that is cut off
        return found.scatter_(0, to, torch.where(live, expert, -1))[:routed]


class RoutedGemm(NamedTuple):
    """out[r] = (lhs[r // a_div] @ rhs_e^T + bias_e) * weights[r] for every routed row r of an
    expert e, in fp32, rounded to the dtype of out; other rows of out [routed, n] stay.

    bias: [E, n]. weights: fp32 [routed]. follows: it comes two kernels after a product of the same
    lists, so that these were there before the kernel before it began."""

    lhs: Operand
    rhs: Stack
    routing: Routing
    bias: Tensor | None
    weights: Tensor | None
    out: Tensor
    mode: Mode
    follows: bool = False


class Align(NamedTuple):
    """Slots topk_ids int32 [routed] to sort by expert and to cut into blocks; -1: of no expert.
    expert_map int32 [experts]: the number of each here, -1 for those that are elsewhere."""

    topk_ids: Tensor
    block_m: int
    experts: int
    expert_map: Tensor | None


class Experts(NamedTuple):
    """A mixture of gated MLPs with many rows an expert: out [tokens, rows of second] in the dtype
    of x, what te_mx.moe.fused_experts says, from slots `ids` int32 [tokens, top_k] and their
    weights fp32 [tokens * top_k].

    expert_map: int32, the number of each expert of all ranks here, or -1. biases: those of first
    and second [E, n]. in_pairs: rows of first are activated and gates in turns. x and what is
    activated are quantized to a format by a rule, or, format "", multiplied as they are."""

    x: Tensor
    first: Stack
    second: Stack
    ids: Tensor
    weights: Tensor
    expert_map: Tensor | None
    biases: tuple[Tensor | None, Tensor | None]
    act: Activation
    in_pairs: bool
    format: str
    rule: str
    mode: Mode


class ExpertsKernel(Kernel):
    """A way to run a whole mixture (op "experts"). It accepts the problem of either product, whose
    groups are the experts of all ranks."""

    op = "experts"


def in_halves(h: Tensor, in_pairs: bool) -> Tensor:
    """h [rows, 2 F] with what is activated before the gates."""
    return h.view(len(h), -1, 2).transpose(1, 2).reshape(h.shape) if in_pairs else h


def rows_of_expert(problem: Problem) -> int:
    """Rows an expert in the mean, as far as the size class of a problem says."""
    return size_class(problem.m) * problem.top_k // max(problem.groups, 1)


def size_class(tokens: int) -> int:
    """Tokens as envelopes count them: a power of two."""
    return 1 << max(tokens.bit_length() - 1, 0)


def capacity(routed: int, block_m: int, experts: int) -> int:
    """Positions that any routing of so many slots fits in."""
    most = routed + experts * (block_m - 1)
    return min(most, routed * block_m) if routed < experts else most
