"""Products of routed rows on the CPU: the rows of an expert are gathered side by side, and all
experts run in the one parallel region of grouped products, which reads each expert's codes once."""

from __future__ import annotations

import torch

from te_mx.backends.cpu import binding_grouped
from te_mx.backends.cpu.envelope import why_not
from te_mx.backends.cpu.grouped import few_and_many, run_call
from te_mx.backends.native import native_operand, native_stack
from te_mx.backends.reference.moe import gathered
from te_mx.dispatch.groups import Bounds
from te_mx.dispatch.moe import RoutedGemm
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import Kernel, register
from te_mx.runtime import cpu_memory


class CpuMoeGemm(Kernel):
    op, name = "moe_gemm", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True)
        if reason is None and problem.empty:
            reason = "takes matrices that are not empty"
        return reason

    def note(self, problem: Problem) -> str:
        return "one parallel region for all experts, each read once"

    def run(self, p: RoutedGemm) -> str | None:
        experts = p.rhs.groups
        expert = p.routing.experts(len(p.out), experts)
        of_none, *counts = torch.bincount(expert + 1, minlength=experts + 1).tolist()
        order = torch.argsort(expert, stable=True)[of_none:]
        if len(order) == 0:
            return self.name
        ends, at = [], 0
        for count in counts:
            at += count
            ends.append(at)
        dtype = p.out.dtype if p.weights is None else torch.float32
        made = cpu_memory.empty((len(order), p.rhs.rows), dtype)
        lhs = gathered(p.lhs, order // p.routing.a_div)
        call = binding_grouped.GroupedGemmCall(
            few_and_many(), native_stack(p.rhs), native_operand(lhs),
            Bounds([0, *ends[:-1]], ends), made, p.bias,
        )  # fmt: skip
        ran = run_call(call)
        if ran is None:
            return None
        if p.weights is not None:
            made *= p.weights[order].unsqueeze(1)
        p.out.index_copy_(0, order, made.to(p.out.dtype))
        return ran


register(CpuMoeGemm())
