"""Grouped problems of blockwise FP8 on Hopper: the launches of grouped.py, with fp32 scales or
aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from te_mx.backends.native import is_aligned, one_read_of_weights
from te_mx.backends.sm90.blockwise import (
    ALIGNED,
    FORMATS,
    LAYOUT,
    NAME,
    as_factors,
    columns_for,
    makes_both,
    why_not_sides,
)
from te_mx.backends.sm90.envelope import (
    not_adaptive,
    why_not,
    why_not_each,
    why_not_second,
    why_not_weights,
)
from te_mx.backends.sm90.grouped import (
    HopperGemmK,
    HopperGemmRows,
    HopperMoveEnds,
    HopperQuantizeGroups,
    HopperQuantizeWeights,
    check_ends,
    gemm_rows,
)
from te_mx.backends.sm90.layouts.factors import (
    SM90_FACTOR_K,
    SM90_FACTOR_ROWS,
    SM90_FACTORS,
    factors_of_tiles,
)
from te_mx.dispatch.grouped_calls import GroupedK, GroupedRows
from te_mx.dispatch.kernels import Wants
from te_mx.dispatch.problem import INVARIANT, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Stack

ROWS, COLUMNS = SM90_FACTOR_ROWS.name, SM90_FACTOR_K.name
ALIGNED_COLUMNS = "sm90_k"  # up to the colon


class BlockwiseQuantizeGroups(HopperQuantizeGroups):
    name = NAME

    def accepts(self, problem: Problem) -> str | None:
        layouts = ROWS, COLUMNS, ALIGNED_COLUMNS
        reason = why_not(problem, *layouts, formats=FORMATS)
        return reason or makes_both(problem.lhs, problem.rhs, problem.rule)


class BlockwiseQuantizeWeights(HopperQuantizeWeights):
    name = NAME

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, LAYOUT, ALIGNED, "rows", "cols", formats=FORMATS)
        if reason is None:
            reason = makes_both(problem.lhs, problem.rhs, problem.rule)
        if reason is None and not (problem.rhs and is_aligned(problem.rhs)):
            reason = one_read_of_weights(problem.lhs, problem.rhs)
        return reason or why_not_weights(problem)


def _factors_of(stack: Stack) -> Stack:
    """Weights as the GEMM reads them; codes that lie by rows are not copied."""
    codes, scales, spec, groups, rows, k = stack[:6]
    fmt, layout = spec_of(spec)
    if layout is SM90_FACTORS:
        return stack
    if is_aligned(spec):
        parts = codes, factors_of_tiles(scales)
    else:
        if layout.k_first:
            codes, scales = codes.transpose(1, 2), scales.transpose(1, 2)
        parts = SM90_FACTORS.pack(fmt, codes, scales, k)
    return Stack(*parts, f"{fmt.name}@{LAYOUT}", groups, rows, k)


class BlockwiseGemmRows(HopperGemmRows):
    """Tokens packed by groups; weights packed, or plain ones whose scales are reordered first."""

    name, rank, invariant = NAME, 2, True

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not_each(problem, (ROWS,), (LAYOUT, ALIGNED, "rows", "cols"), FORMATS)
        return reason or not_adaptive(problem, INVARIANT) or why_not_sides(problem)

    def wants(self, problem: Problem) -> Wants:
        return Wants(ROWS, columns_for(problem, COLUMNS, f"{ALIGNED_COLUMNS}:{problem.spread}"))

    def prepare_stack(self, stack: Stack, problem: Problem) -> Stack:
        return _factors_of(stack)

    def run(self, p: GroupedRows) -> str:
        check_ends(p.groups, p.lhs.rows)
        gemm_rows(p, _factors_of(p.rhs))
        return self.name


class BlockwiseGemmK(HopperGemmK):
    """Both sides aligned, or both with fp32 scales."""

    name, rank = NAME, 2

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, COLUMNS, ALIGNED_COLUMNS, formats=FORMATS)
        return reason or not_adaptive(problem) or why_not_second(problem.rhs)

    def sides(self, p: GroupedK) -> GroupedK:
        if is_aligned(p.lhs.spec) and is_aligned(p.rhs.spec):
            return p
        return p._replace(lhs=as_factors(p.lhs, COLUMNS), rhs=as_factors(p.rhs, COLUMNS))

    def run(self, p: GroupedK) -> str:
        return super().run(self.sides(p))

    def run_into(self, p: GroupedK, outs: Sequence[Tensor]) -> str | None:
        return super().run_into(self.sides(p), outs)


class BlockwiseMoveEnds(HopperMoveEnds):
    name = NAME

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem, ROWS, formats=FORMATS)


for _kernel in (
    BlockwiseMoveEnds, BlockwiseQuantizeGroups, BlockwiseQuantizeWeights, BlockwiseGemmRows,
    BlockwiseGemmK,
):  # fmt: skip
    register(_kernel())
