"""Groups of tokens that are quantized already, as they lie by rows, on Hopper."""

from __future__ import annotations

from te_mx.backends.sm90.envelope import why_not
from te_mx.backends.sm90.grouped import HopperGemmRows, HopperQuantizeGroups
from te_mx.dispatch import run
from te_mx.dispatch.grouped_calls import GroupedRows, QuantizeGroups
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of


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
