"""Groups whose two directions are in different formats, as MXFP4BlockScaling has them: one launch
of the quantizer for each direction."""

from __future__ import annotations

from te_mx.backends.sm90.grouped import HopperQuantizeGroups, HopperQuantizeWeights
from te_mx.dispatch.grouped_calls import QuantizeGroups, QuantizeWeights, StackedParts
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import Kernel, register
from te_mx.layouts.operand import Quantized

NAME = "sm90_two_reads"


class _Apart(Kernel):
    """Reads the matrix twice, where one read does not make both directions."""

    name, rank = NAME, 1
    of: Kernel

    def accepts(self, problem: Problem) -> str | None:
        if not (problem.lhs and problem.rhs):
            return "is for two directions"
        by_row = self.of.accepts(problem._replace(rhs=""))
        return by_row or self.of.accepts(problem._replace(lhs=""))


class HopperQuantizeGroupsApart(_Apart):
    op, of = "quantize_grouped", HopperQuantizeGroups()

    def run(self, what: QuantizeGroups) -> Quantized:
        row = self.of.run(what._replace(col="", col_sum=False)).row
        col = self.of.run(what._replace(row=""))
        return col._replace(row=row)


class HopperQuantizeWeightsApart(_Apart):
    op, of = "quantize_weights", HopperQuantizeWeights()

    def run(self, what: QuantizeWeights) -> StackedParts:
        row, _ = self.of.run(what._replace(col=""))
        _, col = self.of.run(what._replace(row=""))
        return row, col


register(HopperQuantizeGroupsApart())
register(HopperQuantizeWeightsApart())
