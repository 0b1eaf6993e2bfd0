"""Products of routed rows on any device: one GEMM an expert, on its own rows where the host may
look, else on all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.reference import Reference
from te_mx.backends.reference.grouped import Names
from te_mx.dispatch import run
from te_mx.dispatch.calls import Epilogue
from te_mx.dispatch.groups import known_to_host
from te_mx.dispatch.moe import RoutedGemm
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
    return tokens._replace(codes=codes, scales=scales, rows=len(rows), packed=None)


register(MoeGemmReference())
