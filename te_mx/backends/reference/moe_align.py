"""Slots sorted by expert and cut into blocks, in plain torch: no host waits for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.reference import Reference
from te_mx.dispatch.moe import Align, capacity
from te_mx.dispatch.registry import register

_I32 = torch.int32


class MoeAlignReference(Reference):
    op = "moe_align"

    def run(self, p: Align) -> tuple[Tensor, Tensor, Tensor]:
        ids, block, experts = p.topk_ids, p.block_m, p.experts
        routed, device = len(ids), ids.device
        size = capacity(routed, block, experts)
        # Slots of no expert are those of one behind the last, whose block is cut off.
        known = (ids >= 0) & (ids < experts)
        expert = torch.where(known, ids, experts).long()
        ones = torch.ones_like(expert)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        counts = counts.scatter_add_(0, expert, ones)
        padded = (counts[:experts] + block - 1) // block * block
        ends = padded.cumsum(0)
        starts = torch.cat([ends - padded, torch.full((1,), size, device=device)])
        order = torch.argsort(expert, stable=True)
        sorted_expert = expert[order]
        rank = torch.arange(routed, device=device) - (counts.cumsum(0) - counts)[sorted_expert]
        to = torch.where(sorted_expert < experts, starts[sorted_expert] + rank, size)
        sorted_ids = torch.full((size + 1,), routed, dtype=_I32, device=device)
        sorted_ids = sorted_ids.scatter_(0, to, order.to(_I32))[:size]
        first = torch.arange(-(-size // block), device=device) * block
        owner = torch.searchsorted(ends, first, right=True)
        inside = owner < experts
        owner = torch.where(inside, owner, 0)
        if p.expert_map is not None:
            owner = p.expert_map.long()[owner]
        expert_ids = torch.where(inside, owner, -1).to(_I32)
        return sorted_ids, expert_ids, ends[-1:].to(_I32)


register(MoeAlignReference())
