"""Products of routed rows on any device: one GEMM an expert, on its own rows where the host may
look, else on all rows. Slots sorted by expert and cut into blocks: no host waits for a device."""

import torch
from torch import Tensor

from te_mx.backends.reference import Reference
from te_mx.backends.reference.grouped import Names
from te_mx.dispatch import run
from te_mx.dispatch.calls import Epilogue
from te_mx.dispatch.groups import known_to_host
from te_mx.dispatch.moe import Align, RoutedGemm, capacity
from te_mx.dispatch.registry import register
from te_mx.layouts.operand import Operand


class MoeGemmReference(Reference):
    op = "moe_gemm"

    def run(self, p: RoutedGemm) -> str:
        expert, ran = p.routing.experts(len(p.out), p.rhs.groups), Names()
        rows = torch.arange(len(p.out), device=p.out.device)
        if known_to_host(expert):
            for e in expert.unique().tolist():
                if e >= 0:
                    own = rows[expert == e]
                    p.out[own] = _product(p, own, e, ran)
        else:
            for e in range(p.rhs.groups):
                made = _product(p, rows, e, ran)
                p.out.copy_(torch.where((expert == e).unsqueeze(1), made, p.out))
        return str(ran)


def _product(p: RoutedGemm, rows: Tensor, e: int, ran: Names) -> Tensor:
    """Routed rows times expert e, in the dtype of out."""
    lhs = gathered(p.lhs, rows // p.routing.a_div)
    sums = p.out.new_empty((len(rows), p.rhs.rows), dtype=torch.float32)
    epilogue = Epilogue(bias=None if p.bias is None else p.bias[e])
    ran.note(run.gemm(lhs, p.rhs.group(e), epilogue, sums, None, p.mode).name)
    if p.weights is not None:
        sums *= p.weights[rows].unsqueeze(1)
    return sums.to(p.out.dtype)


def gathered(tokens: Operand, rows: Tensor) -> Operand:
    """Rows of an operand in layout "rows"."""
    codes, scales = tokens.codes.index_select(0, rows), tokens.scales.index_select(0, rows)
    made = tokens._replace(codes=codes, scales=scales, rows=len(rows), packed=None)
    whole = tokens.tensor_scale
    if whole is None or whole.dim() == 0:
        return made
    return made._replace(tensor_scale=whole.index_select(0, rows))


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


register(MoeGemmReference())
register(MoeAlignReference())
