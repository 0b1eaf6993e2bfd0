"""te_mx.moe.align_block_size and batched_align_block_size: routed rows sorted by expert, cut into
blocks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops.moe import moe_align
from te_mx.dispatch.moe import Align
from te_mx.moe.gemm import check_ids, check_range, refuse_transforms
from te_mx.runtime.arguments import check_flag, check_size, shown

OWNER = "align_block_size"


class AlignedBlocks(NamedTuple):
    """What `align_block_size` makes, int32.

    sorted_token_ids [capacity]: routed rows of one expert after the other, each expert's filled up
    to whole blocks with the padding id, the number of routed rows. expert_ids [blocks]: the expert
    of each block. num_tokens_post_padded [1]: how many positions count."""

    sorted_token_ids: Tensor
    expert_ids: Tensor
    num_tokens_post_padded: Tensor


def align_block_size(
    topk_ids: Tensor,
    block_m: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
) -> AlignedBlocks:
    """Sort the slots of topk_ids by expert and fill every expert up to whole blocks of block_m, as
    vLLM's moe_align_block_size does.

    Slot ``token * top_k + j`` of the flattened topk_ids is a routed row. The capacity is ``numel +
    num_experts * (block_m - 1)``, at most ``numel * block_m`` where there are fewer slots than
    experts; it need not be a multiple of block_m, unless pad_sorted_ids has it be one. Rows of one
    expert keep their order. Behind num_tokens_post_padded lie padding ids and experts -1. No host
    waits for a device, and a CUDA graph may capture it.

    Args:
        topk_ids: int32 or int64 [M, top_k], or flat; -1 for a slot of no expert, which is left out.
        block_m: rows of a block.
        num_experts: of all ranks.
        expert_map: int32 or int64 [num_experts]: the number of each expert here, -1 for those of
            other ranks. Their blocks stay and have expert -1.
        pad_sorted_ids: fill sorted_token_ids up to a multiple of block_m with the padding id.

    Raises:
        TypeError, ValueError: what does not fit; ids that are out of range on the CPU. Out of
            range on a device is of no expert.
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.
    """
    if not isinstance(topk_ids, Tensor):
        raise TypeError(f"{OWNER}: topk_ids must be a tensor, got {shown(topk_ids)}")
    block_m = check_size(f"{OWNER}: block_m", block_m, 1)
    experts = check_size(f"{OWNER}: num_experts", num_experts, 1)
    check_flag(f"{OWNER}: pad_sorted_ids", pad_sorted_ids)
    refuse_transforms(OWNER, topk_ids, expert_map)
    shape = "a vector" if topk_ids.dim() == 1 else "[M, top_k] or flat"
    ids = check_ids(f"{OWNER}: topk_ids", topk_ids, topk_ids.device, shape).reshape(-1)
    check_range(f"{OWNER}: topk_ids", ids, -1, experts, "num_experts counts those of all ranks")
    local = check_map(expert_map, experts, topk_ids, OWNER)
    limits = ids.numel() * block_m, experts * block_m
    if max(limits) >= 1 << 31:
        raise ValueError(
            f"{OWNER}: {ids.numel()} slots of {experts} experts in blocks of {block_m} do not fit "
            "int32; take a smaller block_m"
        )
    made = AlignedBlocks(*moe_align(Align(ids, block_m, experts, local)))
    if not pad_sorted_ids:
        return made
    missing = -len(made.sorted_token_ids) % block_m
    padding = made.sorted_token_ids.new_full((missing,), ids.numel())
    return made._replace(sorted_token_ids=torch.cat((made.sorted_token_ids, padding)))


def batched_align_block_size(
    max_tokens_per_batch: int, block_m: int, expert_num_tokens: Tensor
) -> AlignedBlocks:
    """The lists of tokens that lie by expert already, [E, max_tokens_per_batch, ..] with the first
    expert_num_tokens[e] of each counting, as vLLM's batched_moe_align_block_size makes them.

    Row ``e * max_tokens_per_batch + i`` is token i of expert e. Each expert's rows are filled up to
    whole blocks with the padding id, ``E * max_tokens_per_batch``; sorted_token_ids is ``E *
    max_tokens_per_batch`` long, with max_tokens_per_batch rounded up to whole blocks. Behind
    num_tokens_post_padded lie padding ids and experts -1. No host waits for a device, and a CUDA
    graph may capture it.

    Args:
        max_tokens_per_batch: rows of every expert, counting or not.
        block_m: rows of a block.
        expert_num_tokens: int32 or int64 [E].

    Raises:
        TypeError, ValueError: what does not fit; counts that are out of range on the CPU. On a
            device they are cut off.
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.
    """
    owner = "batched_align_block_size"
    most = check_size(f"{owner}: max_tokens_per_batch", max_tokens_per_batch)
    block_m = check_size(f"{owner}: block_m", block_m, 1)
    name = f"{owner}: expert_num_tokens"
    if not isinstance(expert_num_tokens, Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown(expert_num_tokens)}")
    refuse_transforms(owner, expert_num_tokens)
    counts = check_ids(name, expert_num_tokens, expert_num_tokens.device)
    check_range(name, counts, 0, most + 1, "max_tokens_per_batch are the rows there are")
    if counts.is_meta:
        raise ValueError(f"{name} is on the meta device, where there are no counts; move it")
    experts, blocks = len(counts), -(-most // block_m)
    size = experts * blocks * block_m
    if max(size, experts * most) >= 1 << 31:
        raise ValueError(
            f"{owner}: {experts} experts of max_tokens_per_batch={most} rows in blocks of "
            f"block_m={block_m} do not fit int32"
        )
    device = counts.device
    padding = experts * most
    used = (counts.long().clamp(0, most) + block_m - 1) // block_m
    ends = used.cumsum(0)
    # Position p of the lists is row `within` of the blocks of one expert.
    position = torch.arange(size, device=device)
    expert = torch.searchsorted(ends * block_m, position, right=True)
    there = expert < experts
    expert = torch.where(there, expert, 0)
    within = position - (ends - used)[expert] * block_m if experts else position
    real = there & (within < counts.long().clamp(0, most)[expert]) if experts else there
    ids = torch.where(real, expert * most + within, padding).int()
    of_blocks = torch.where(there, expert, -1)[::block_m].int()
    total = ends[-1:] * block_m if experts else ends.new_zeros(1)
    return AlignedBlocks(ids, of_blocks.contiguous(), total.int())


def check_map(expert_map: Any, experts: int, ids: Tensor, owner: str) -> Tensor | None:
    """An expert map as int32, or None."""
    if expert_map is None:
        return None
    name = f"{owner}: expert_map"
    made = check_ids(name, expert_map, ids.device)
    if len(made) != experts:
        raise ValueError(
            f"{name} must have an entry for each of {experts} experts, got {len(made)}"
        )
    check_range(name, made, -1, experts, "-1 is an expert that is not here")
    return made
