"""Grouped problems on Hopper: one launch for all groups, whose ends may stand on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_mx.backends.base import PLAIN
from te_mx.backends.native import (
    native_operand,
    native_stack,
    one_read,
    one_read_of_weights,
    words_of,
)
from te_mx.backends.sm90 import binding_grouped, binding_weights
from te_mx.backends.sm90.envelope import why_not, why_not_second, why_not_weights
from te_mx.backends.sm90.gemm import ADAPTIVE
from te_mx.dispatch.grouped_calls import (
    GroupedK,
    GroupedRows,
    Groups,
    QuantizeGroups,
    QuantizeWeights,
    StackedParts,
    stacks_of,
)
from te_mx.dispatch.groups import host_bounds, known_to_host
from te_mx.dispatch.kernels import Kernel, Wants
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack


def check_ends(groups: Groups, rows: int) -> None:
    if known_to_host(groups.offs):
        host_bounds(*groups, rows)  # says what is wrong with them


def _spread(spec: str) -> int:
    return getattr(spec_of(spec).layout, "spread", PLAIN)


class HopperQuantizeGroups(Kernel):
    op, name = "quantize_grouped", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem, "sm90_rows", "sm90_k") or one_read(problem.lhs, problem.rhs)

    def run(self, what: QuantizeGroups) -> Quantized:
        x, (offs, capacity), row, col, rule, col_sum = what[:6]
        check_ends(what.groups, len(x))
        rows, cols = x.shape
        parts = binding_grouped.quantize(
            x, offs, capacity, words_of(row or col)[0], bool(row), bool(col), rule, col_sum,
            _spread(row or col),
        )  # fmt: skip
        return Quantized(
            Operand(parts.row_codes, parts.row_scales, row, rows, cols) if row else None,  # type: ignore[arg-type]
            Operand(parts.col_codes, parts.col_scales, col, cols, rows) if col else None,  # type: ignore[arg-type]
            parts.col_sum,
        )


class HopperQuantizeWeights(Kernel):
    op, name = "quantize_weights", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "sm90", "rows", "cols")
        reason = reason or one_read_of_weights(problem.lhs, problem.rhs)
        return reason or why_not_weights(problem)

    def run(self, what: QuantizeWeights) -> StackedParts:
        weights, row, col, rule = what
        turned = isinstance(weights, Tensor) and weights.stride(1) == 1 != weights.stride(2)
        if turned and _spread(row or col) != PLAIN:
            return self._run_turned(weights, row, col, rule)  # type: ignore[arg-type]
        parts = binding_grouped.quantize_weights(
            weights, words_of(row or col)[0], (bool(row), bool(col)), rule, _spread(row or col)
        )
        return stacks_of(parts, what)

    def _run_turned(self, weights: Tensor, row: str, col: str, rule: str) -> StackedParts:
        """Weights that lie [G, cols, rows]. Packed rows of a matrix are the packed columns of the
        turned one, so what is asked for is made as it lies, without a copy."""
        turned = QuantizeWeights(weights.transpose(1, 2), col, row, rule)
        parts = binding_grouped.quantize_weights(
            turned.weights,
            words_of(row or col)[0],
            (bool(col), bool(row)),
            rule,
            _spread(row or col),
        )
        made_col, made_row = stacks_of(parts, turned)
        return made_row, made_col


class HopperColumnsOfWeights(Kernel):
    op, name = "columns_of_weights", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(rhs=""), "rows") or why_not(
            problem._replace(lhs=problem.rhs, rhs=""), "sm90"
        )
        if reason is None and words_of(problem.lhs)[0] != words_of(problem.rhs)[0]:
            reason = "keeps the format"
        return reason or why_not_second(problem.rhs)

    def run(self, row: Stack, col: str, rule: str) -> Stack:
        row = row._replace(codes=row.codes.contiguous(), scales=row.scales.contiguous())
        made = binding_weights.columns_of_weights(native_stack(row), rule, _spread(col))
        return Stack(*made, col, row.groups, row.k, row.rows)


class HopperGemmRows(Kernel):
    """Tokens packed by groups; weights packed, or plain ones that are packed on the way."""

    op, name = "gemm_rows", ADAPTIVE

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(rhs=""), "sm90_rows") or why_not(
            problem._replace(lhs=problem.rhs, rhs=""), "sm90", "rows", "cols"
        )
        return reason or not_adaptive(problem) or why_not_second(problem.rhs)

    def note(self, problem: Problem) -> str:
        return "one launch for all groups, wherever m_splits lies"

    def wants(self, problem: Problem) -> Wants:
        return Wants(f"sm90_rows:{problem.spread}", f"sm90_k:{problem.spread}")

    def run(self, p: GroupedRows) -> str:
        (offs, capacity), rhs, rows = p.groups, native_stack(p.rhs), p.lhs.rows
        check_ends(p.groups, rows)
        if rhs.order != "sm90":
            offs = binding_grouped.offs_on_device(offs, p.out.device)  # once for both kernels
            rhs = binding_weights.pack_weights(rhs, offs, capacity, rows, p.mode.spread)
        binding_grouped.gemm_rows(rhs, native_operand(p.lhs), offs, capacity, p.bias, p.out)
        return self.name


def not_adaptive(problem: Problem) -> str | None:
    if problem.precision == "adaptive":
        return None
    return f"is for precision 'adaptive', this asks for {problem.precision!r}"


class HopperGemmK(Kernel):
    op, name = "gemm_k", ADAPTIVE

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "sm90_k") or not_adaptive(problem)
        return reason or why_not_second(problem.rhs)

    def run(self, p: GroupedK) -> str:
        check_ends(p.groups, p.lhs.k)
        binding_grouped.gemm_k(
            native_operand(p.rhs), native_operand(p.lhs), *p.groups, p.lhs.k, p.out, p.accumulate
        )
        if not p.out.is_inference():
            torch.autograd.graph.increment_version(p.out)
        return self.name

    def run_into(self, p: GroupedK, outs: Sequence[Tensor]) -> str | None:
        """The same into a tensor for each group; None where one launch does not reach them."""
        places = binding_grouped.places_of(outs)
        if places is None:
            return None
        check_ends(p.groups, p.lhs.k)
        binding_grouped.gemm_k(
            native_operand(p.rhs), native_operand(p.lhs), *p.groups, p.lhs.k, places[0],
            p.accumulate, places[1],
        )  # fmt: skip
        for out in outs:
            if not out.is_inference():
                torch.autograd.graph.increment_version(out)
        return self.name


class HopperMoveEnds(Kernel):
    """Ends of groups that the host knows, as arguments of a kernel: no copy from memory that a CUDA
    graph could not read again."""

    op, name = "move_ends", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem, "sm90_rows")

    def run(self, offs: Tensor, device: torch.device) -> Tensor:
        return binding_grouped.offs_on_device(offs, device)


for _kernel in (
    HopperMoveEnds, HopperQuantizeGroups, HopperQuantizeWeights, HopperColumnsOfWeights,
    HopperGemmRows, HopperGemmK,
):  # fmt: skip
    register(_kernel())
