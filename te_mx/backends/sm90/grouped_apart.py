"""Groups whose two directions are in different formats, as MXFP4BlockScaling has them: one launch
of the quantizer for each direction. Columns of weights of codes in another format, as dgrad of
frozen MXFP4 experts reads them: one launch that decodes, one that quantizes. Tokens that are
quantized already, as they lie by rows.
"""

from __future__ import annotations

import torch

from te_mx.backends.sm90.envelope import why_not
from te_mx.backends.sm90.grouped import (
    HopperGemmRows,
    HopperQuantizeGroups,
    HopperQuantizeWeights,
    HopperRandomGroups,
    quantize_groups,
    quantize_weights,
)
from te_mx.backends.sm90.quantize import HopperDequantize
from te_mx.dispatch import run
from te_mx.dispatch.grouped_calls import GroupedRows, QuantizeGroups, QuantizeWeights, StackedParts
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack, stacked

NAME = "sm90_two_reads"
MOST_BYTES = 1 << 30  # of decoded weights at a time


class _Apart(Kernel):
    """Reads the matrix twice, where one read does not make both directions."""

    name, rank = NAME, 1
    of: tuple[Kernel, ...]

    def accepts(self, problem: Problem) -> str | None:
        if not (problem.lhs and problem.rhs):
            return "is for two directions"
        for side in (problem._replace(rhs=""), problem._replace(lhs="")):
            reasons = [kernel.accepts(side) for kernel in self.of]
            if all(reasons):
                return reasons[0]
        return None


class HopperQuantizeGroupsApart(_Apart):
    op, of = "quantize_grouped", (HopperQuantizeGroups(), HopperRandomGroups())

    def run(self, what: QuantizeGroups) -> Quantized:
        # NOTE: a launch that transforms columns sums none, but of bfloat16; rows are as they are.
        made = quantize_groups(what._replace(col=""))
        return made._replace(col=quantize_groups(what._replace(row="", col_sum=False)).col)


class HopperQuantizeWeightsApart(_Apart):
    op, of = "quantize_weights", (HopperQuantizeWeights(),)

    def run(self, what: QuantizeWeights) -> StackedParts:
        row, _ = quantize_weights(what._replace(col=""))
        _, col = quantize_weights(what._replace(row=""))
        return row, col


class HopperColumnsDecoded(Kernel):
    """What the codes of all groups decode to, quantized along the columns; as many groups at a time
    as MOST_BYTES of values hold."""

    op, name, rank = "columns_of_weights", "sm90_decoded", 1

    def accepts(self, problem: Problem) -> str | None:
        decoded = problem._replace(op="dequantize", rhs="", dtype=_values_of(problem.lhs))
        quantized = problem._replace(op="quantize_weights", lhs="")
        reason = HopperDequantize().accepts(decoded) or HopperQuantizeWeights().accepts(quantized)
        if reason is None and spec_of(problem.lhs).format.scaling.block[0] != 1:
            reason = "takes blocks of one row"
        return reason

    def run(self, row: Stack, col: str, rule: str) -> Stack:
        dtype = _values_of(row.spec)
        each = row.rows * row.k * dtype.itemsize
        step = max(1, MOST_BYTES // max(each, 1))
        made = []
        for first in range(0, row.groups, step):
            codes, scales = (t[first : first + step].flatten(0, 1) for t in row[:2])
            rows = Operand(codes, scales, row.spec, len(codes), row.k)
            values = run.dequantize(rows, dtype)
            weights = values.view(-1, row.rows, row.k)
            stack = HopperQuantizeWeights().run(QuantizeWeights(weights, "", col, rule))[1]
            assert stack is not None
            made.append(stack)
        if len(made) == 1:
            return made[0]
        return stacked([stack.group(i) for stack in made for i in range(stack.groups)])


def _values_of(spec: str) -> torch.dtype:
    return spec_of(spec).format.exact_dtype


class HopperGemmPlainRows(HopperGemmRows):
    """Tokens are packed by groups from what they decode to, since only the quantizer packs by ends
    that the device alone knows. Where the host knows them, a loop over the groups packs codes as
    they are.

    Quantizing a block by "rceil" again changes no value above 2^-133: the smallest scale is no
    larger than the one that it had, and its codes times a power of two are codes there.
    """

    name, rank = "sm90_adaptive_plain", 1

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(rhs=""), "rows")
        if reason is None and spec_of(problem.lhs).format.scaling.scale != "e8m0":
            reason = f"takes tokens with power-of-two scales, not {spec_of(problem.lhs).format}"
        if reason is None and problem.ends != "device":
            reason = "is for ends of groups that the device alone knows"
        packed = f"{spec_of(problem.lhs).format}@sm90_rows:{problem.spread}"
        return reason or super().accepts(problem._replace(lhs=packed))

    def run(self, p: GroupedRows) -> str:
        fmt = p.lhs.format
        values = run.dequantize(p.lhs, fmt.exact_dtype)
        row = f"{fmt.name}@sm90_rows:{p.mode.spread}"
        lhs = HopperQuantizeGroups().run(QuantizeGroups(values, p.groups, row, "", "rceil")).row
        assert lhs is not None
        super().run(p._replace(lhs=lhs))
        return self.name


register(HopperGemmPlainRows())
register(HopperColumnsDecoded())
register(HopperQuantizeGroupsApart())
register(HopperQuantizeWeightsApart())
