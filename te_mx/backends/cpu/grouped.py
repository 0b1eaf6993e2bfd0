"""Grouped problems on the CPU: one native call, one parallel region for all groups."""

from __future__ import annotations

import torch

from te_mx.backends.cpu import binding, binding_grouped
from te_mx.backends.cpu.envelope import why_not
from te_mx.backends.cpu.gemm import PANELS
from te_mx.backends.native import (
    native_operand,
    native_stack,
    one_read,
    one_read_of_weights,
    words_of,
)
from te_mx.dispatch.grouped_calls import (
    GroupedK,
    GroupedRows,
    QuantizeGroups,
    QuantizeWeights,
    StackedParts,
    stacks_of,
)
from te_mx.dispatch.groups import host_bounds
from te_mx.dispatch.kernels import Kernel, Wants
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts.operand import Operand, Quantized, Stack
from te_mx.runtime import workspace

_CPU = torch.device("cpu")


def _why_not(problem: Problem, random: bool = False) -> str | None:
    reason = why_not(problem, "grouped_cols", blockwise=True, random=random)
    if reason is None and problem.empty:
        reason = "takes matrices that are not empty"
    if reason is None and problem.ends == "device":
        reason = "needs ends of groups on the CPU"
    return reason


class CpuQuantizeGroups(Kernel):
    op, name = "quantize_grouped", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        return _why_not(problem, random=True) or one_read(problem.lhs, problem.rhs)

    def run(self, what: QuantizeGroups) -> Quantized | None:
        (x, groups, row, col), (rows, cols) = what[:4], what.x.shape
        parts = binding_grouped.quantize(what, host_bounds(*groups, len(x)))
        if parts is None:
            return None
        return Quantized(
            Operand(parts.row_codes, parts.row_scales, row, rows, cols) if row else None,  # type: ignore[arg-type]
            Operand(parts.col_codes, parts.col_scales, col, cols, rows) if col else None,  # type: ignore[arg-type]
            parts.col_sum,
        )


class CpuQuantizeWeights(Kernel):
    op, name = "quantize_weights", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        return _why_not(problem) or one_read_of_weights(problem.lhs, problem.rhs)

    def run(self, what: QuantizeWeights) -> StackedParts | None:
        fmt, wanted = words_of(what.row or what.col)[0], (bool(what.row), bool(what.col))
        parts = binding_grouped.quantize_weights(list(what.weights), fmt, wanted, what.rule)
        return None if parts is None else stacks_of(parts, what)


def few_and_many() -> tuple[str, str]:
    """Names of the kernels that the level in use runs groups of many and of few rows on."""
    level = binding.ISA_LEVELS[binding.isa()]
    level = "amx" if level == "amx_emulated" else level
    return PANELS[level], f"{level}_stream"


class CpuGemmRows(Kernel):
    op, name = "gemm_rows", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        return _why_not(problem)

    def note(self, problem: Problem) -> str:
        return "one parallel region for all groups"

    def wants(self, problem: Problem) -> Wants:
        return Wants("rows", "grouped_cols")

    def prepare_stack(self, stack: Stack, problem: Problem) -> Stack:
        packed = binding_grouped.pack(native_stack(stack.checked("rhs")), few_and_many()[0])
        return stack._replace(packed=packed)

    def run(self, p: GroupedRows) -> str | None:
        call = binding_grouped.GroupedGemmCall(
            few_and_many(), native_stack(p.rhs), native_operand(p.lhs),
            host_bounds(*p.groups, p.lhs.rows), p.out, p.bias,
        )  # fmt: skip
        return run_call(call)


class CpuGemmK(Kernel):
    op, name = "gemm_k", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        return _why_not(problem)

    def run(self, p: GroupedK) -> str | None:
        call = binding_grouped.GroupedGemmCall(
            few_and_many(), native_operand(p.rhs), native_operand(p.lhs),
            host_bounds(*p.groups, p.lhs.k), p.out, None, p.accumulate,
        )  # fmt: skip
        ran = run_call(call)
        if ran is not None and not p.out.is_inference():
            torch.autograd.graph.increment_version(p.out)
        return ran


def run_call(call: binding_grouped.GroupedGemmCall) -> str | None:
    """The names of the kernels that ran, or None for what native code does not take."""
    nbytes = call.workspace_bytes()
    scratch = workspace.acquire(_CPU, nbytes)
    ran = call.run(scratch, nbytes)
    workspace.release(scratch, nbytes)
    return ran


for _kernel in (CpuQuantizeGroups, CpuQuantizeWeights, CpuGemmRows, CpuGemmK):
    register(_kernel())
