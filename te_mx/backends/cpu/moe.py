"""Products of routed rows on the CPU: the rows of an expert are gathered side by side, and all
experts run in the one parallel region of grouped products, which reads each expert's codes once.

Experts of few rows run on the stream kernel of the level; a table may choose another one for them.
"""

from __future__ import annotations

from te_mx.backends.cpu import binding, binding_grouped
from te_mx.backends.cpu.envelope import why_not
from te_mx.backends.cpu.gemm import PANELS
from te_mx.backends.cpu.grouped import few_and_many
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.moe import RoutedGemm
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register

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
        ran = binding_grouped.moe_gemm(p, self._few_and_many())
        return None if ran is None else ran or self.name


def _of_level() -> list[str]:
    """The kernels that the level in use can run, of higher levels first."""
    level = binding.ISA_LEVELS[binding.isa()]
    levels = list(PANELS)
    able = levels[levels.index("amx" if level == "amx_emulated" else level) :]
    return [name for one in able for name in (f"{one}_stream", PANELS[one])]


register(CpuMoeGemm())
