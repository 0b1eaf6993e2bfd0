"""Products of routed rows on the CPU: the rows of an expert are gathered side by side, and all
experts run in the one parallel region of grouped products, which reads each expert's codes once.

Experts of few rows run on the stream kernel of the level; a table may choose another one for them.
"""

from __future__ import annotations

from itertools import accumulate, chain

import torch

from te_mx.backends.cpu import binding, binding_grouped
from te_mx.backends.cpu.envelope import why_not
from te_mx.backends.cpu.gemm import PANELS
from te_mx.backends.cpu.grouped import few_and_many, run_call
from te_mx.backends.native import native_operand, native_stack
from te_mx.backends.reference.moe import gathered
from te_mx.dispatch.groups import Bounds
from te_mx.dispatch.moe import RoutedGemm, Routing
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import Kernel, register
from te_mx.runtime import cpu_memory
from te_mx.runtime.cpu_memory import CPU

_FEW = "few rows on "


class CpuMoeGemm(Kernel):
    op, name = "moe_gemm", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True)
        if reason is None and problem.empty:
            reason = "takes matrices that are not empty"
        return reason

    def note(self, problem: Problem) -> str:
        few = self._few_and_many()[1]
        return f"one parallel region for all experts, each read once; few rows on {few}"

    def configurations(self, problem: Problem) -> tuple[str, ...]:
        _, usual = few_and_many()
        return tuple(f"{_FEW}{name}" for name in _of_level() if name != usual)

    def _few_and_many(self) -> tuple[str, str]:
        many, few = few_and_many()
        return many, self.configuration.removeprefix(_FEW) or few

    def run(self, p: RoutedGemm) -> str | None:
        groups = _rows_of_experts(p.routing, len(p.out), p.rhs.groups)
        ends = list(accumulate(map(len, groups)))
        if ends[-1] == 0:
            return self.name
        rows, div = list(chain.from_iterable(groups)), p.routing.a_div
        order = torch.tensor(rows, device=CPU)
        tokens = order if div == 1 else torch.tensor([row // div for row in rows], device=CPU)
        dtype = p.out.dtype if p.weights is None else torch.float32
        made = cpu_memory.empty((ends[-1], p.rhs.rows), dtype)
        lhs = gathered(p.lhs, tokens)
        call = binding_grouped.GroupedGemmCall(
            self._few_and_many(), native_stack(p.rhs), native_operand(lhs),
            Bounds([0, *ends[:-1]], ends), made, p.bias,
        )  # fmt: skip
        ran = run_call(call)
        if ran is None:
            return None
        if p.weights is not None:
            made *= p.weights[order].unsqueeze(1)
        p.out.index_copy_(0, order, made.to(p.out.dtype))
        return ran


def _of_level() -> list[str]:
    """The kernels that the level in use can run, of higher levels first."""
    level = binding.ISA_LEVELS[binding.isa()]
    levels = list(PANELS)
    able = levels[levels.index("amx" if level == "amx_emulated" else level) :]
    return [name for one in able for name in (f"{one}_stream", PANELS[one])]


def _rows_of_experts(routing: Routing, routed: int, experts: int) -> list[list[int]]:
    """The routed rows of every expert. Lists: a few dozen rows cost less so than operators of
    torch do."""
    ids, owners, used = routing[0], routing[1], int(routing[2])
    block = routing.block_m
    rows: list[list[int]] = [[] for _ in range(experts)]
    if ids is None:
        found = owners[: min(routed, -(-used // block))].tolist()
        pairs = list(enumerate(found))
    else:
        each = owners[: -(-used // block)].tolist()
        ids = ids[: min(used, len(each) * block)]
        pairs = [(row, each[i // block]) for i, row in enumerate(ids.tolist())]
    for row, expert in pairs:
        if 0 <= expert < experts and 0 <= row < routed:
            rows[expert].append(row)
    return rows


register(CpuMoeGemm())
