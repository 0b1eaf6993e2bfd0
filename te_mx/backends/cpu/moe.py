"""Products of routed rows on the CPU: the rows of an expert are gathered side by side, and all
experts run in the one parallel region of grouped products, which reads each expert's codes once.

Experts of few rows run on the stream kernel of the level; a table may choose another one for them.
"""

import torch

from te_mx.backends.base import pointer
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.binding import why_not, why_not_empty
from te_mx.backends.cpu.gemm import PANELS
from te_mx.backends.cpu.grouped import few_and_many, names_of
from te_mx.backends.native import routed_record
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.moe import RoutedGemm
from te_mx.dispatch.problem import INVARIANT, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.runtime import workspace
from te_mx.runtime.cpu_memory import CPU

_FEW = "few rows on "


def moe_gemm(p: RoutedGemm, kernels: tuple[str, str]) -> str | None:
    """Write the routed rows of p.out, whose lists the native code reads; the names of the kernels
    that ran. kernels: as of GroupedGemmCall."""
    native = binding.native()
    ids, (many, few) = p.routing.sorted_token_ids, kernels
    args, _keep = routed_record(
        native, p, positions=0 if ids is None else len(ids), kernel=binding.KERNEL_IDS[many],
        few_rows_kernel=binding.KERNEL_IDS[few], threads=torch.get_num_threads(),
        invariant=p.mode.precision == INVARIANT,
    )  # fmt: skip
    nbytes = native.moe_workspace_bytes(args)
    scratch = workspace.acquire(CPU, nbytes)
    args.workspace, args.workspace_bytes = pointer(scratch), nbytes
    status, ran = native.moe_gemm(args)
    workspace.release(scratch, nbytes)
    return names_of(ran) if binding.supported(status) else None


class CpuMoeGemm(Kernel):
    op, name, invariant = "moe_gemm", "cpu", True

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True, nvfp4=True) or why_not_empty(problem)
        if reason is None and spec_of(problem.lhs).format.name == "nvfp4_rows":
            reason = "gathers tokens that share a tensor scale"
        return reason

    def note(self, problem: Problem) -> str:
        few = self._few_and_many(problem.precision)[1]
        return f"one parallel region for all experts, each read once; few rows on {few}"

    def configurations(self, problem: Problem) -> tuple[str, ...]:
        _, usual = few_and_many()
        level = binding.ISA_LEVELS[binding.isa()]
        levels = list(PANELS)  # higher ones first
        able = levels[levels.index("amx" if level == "amx_emulated" else level) :]
        names = (name for one in able for name in (f"{one}_stream", PANELS[one]))
        return tuple(f"{_FEW}{name}" for name in names if name != usual)

    def _few_and_many(self, precision: str) -> tuple[str, str]:
        many, few = few_and_many(precision)
        return many, self.configuration.removeprefix(_FEW) or few

    def run(self, p: RoutedGemm) -> str | None:
        ran = moe_gemm(p, self._few_and_many(p.mode.precision))
        return None if ran is None else ran or self.name


register(CpuMoeGemm())
