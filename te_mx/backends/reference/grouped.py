"""Grouped problems on any device: one op a group where the host knows where groups end, which is
the specification; else every group on all rows, which waits for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.reference import grouped_math
from te_mx.dispatch import run
from te_mx.dispatch.calls import Epilogue, Quantize
from te_mx.dispatch.fused import Target
from te_mx.dispatch.grouped_calls import (
    ActGroups,
    GroupedK,
    GroupedRows,
    Groups,
    QuantizeGroups,
    QuantizeWeights,
    StackedParts,
)
from te_mx.dispatch.groups import (
    Bounds,
    device_bounds,
    first_scale_row,
    host_bounds,
    k_of,
    known_to_host,
    rows_of,
)
from te_mx.dispatch.kernels import Kernel, Wants
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.base import Parts
from te_mx.layouts.operand import Operand, Quantized, Stack, turned


class _Reference(Kernel):
    name, rank = "reference", 1000

    def accepts(self, problem: Problem) -> str | None:
        return None


def _bounds(groups: Groups, rows: int) -> Bounds | None:
    """Bounds that the host knows, checked; None where only a device knows them."""
    if len(groups.offs) == 0:
        return Bounds([], [])
    return host_bounds(*groups, rows) if known_to_host(groups.offs) else None


# ----------------------------------------------------------------------------------------- quantize
class QuantizeGroupsReference(_Reference):
    op = "quantize_grouped"

    def run(self, what: QuantizeGroups) -> Quantized:
        x, row, col = what.x, what.row, what.col
        if row and col and _kind(row) != _kind(col):
            one = _direction(what, what.row, "", what.col_sum)
            other = _direction(what, "", what.col, False)
            return Quantized(one.row, other.col, one.col_sum)
        bounds, packed = _bounds(what.groups, x.shape[0]), bool(_kind(row or col)[1])
        if bounds is None and packed:
            raise ValueError(
                f"te_mx: only Hopper kernels write {row or col} in groups whose ends the device "
                "knows, and they do not take this problem; quantize to rows and grouped_cols"
            )
        if bounds is None:
            return grouped_math.quantize(what, *device_bounds(*what.groups, x.shape[0]))
        return _packed(what, bounds) if packed else _plain(what, bounds)


class ActGroupsReference(_Reference):
    """An activation, then the quantizer of groups, each by its own kernel."""

    op = "act_quantize_grouped"

    def run(self, what: ActGroups) -> Quantized:
        row, col, rule, col_sum, seed = what.step.target
        step = what.step._replace(keep=True, target=Target("", "", "rceil"))
        made = run.run_on("act_quantize", step.h, "", "", step.dtype, "rceil", step).out
        asked = QuantizeGroups(made, what.groups, row, col, rule, col_sum, seed)
        return _direction(asked, row, col, col_sum)


def _kind(spec: str) -> tuple[str, str]:
    """Format of a spec, and the layout of a group's part; "" for plain ones."""
    fmt, layout = spec_of(spec)
    return fmt.name, layout.alone


def _direction(what: QuantizeGroups, row: str, col: str, col_sum: bool) -> Quantized:
    """Some directions, by the kernel for these."""
    x, offs = what.x, what.groups.offs
    rows, cols = x.shape
    problem = Problem(
        "quantize_grouped", place_of(x.device), row, col, rows, cols, groups=len(offs),
        ends="host" if known_to_host(offs) else "device", dtype=x.dtype, rule=what.rule,
    )  # fmt: skip
    return run.run(problem, what._replace(row=row, col=col, col_sum=col_sum))


def _plain(what: QuantizeGroups, bounds: Bounds) -> Quantized:
    """One quantize a group, codes and scales that belong to no group 0."""
    (rows, cols), groups, x = what.x.shape, len(bounds.ends), what.x
    row = col = sums = None
    if what.row:
        row = Operand(*_zeroed(x, what.row, rows, cols, groups), what.row, rows, cols)
    if what.col:
        col = Operand(*_zeroed(x, what.col, cols, rows, groups), what.col, cols, rows)
    if what.col_sum:
        sums = x.new_zeros((groups, cols), dtype=torch.float32)
    each = what.col.replace("@grouped_cols", "@cols")
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        made = run.quantize(_part(what, start, end, what.row, each))
        if row is not None and made.row is not None:
            row.codes[start:end], row.scales[start:end] = made.row.codes, made.row.scales
        if col is not None and made.col is not None:
            first = first_scale_row(start, i, col.format.block)
            col.codes[start:end] = made.col.codes
            col.scales[first : first + len(made.col.scales)] = made.col.scales
        if sums is not None and made.col_sum is not None:
            sums[i] = made.col_sum
    return Quantized(row, col, sums)


def _part(what: QuantizeGroups, start: int, end: int, row: str, col: str) -> Quantize:
    """The rows of one group, as a matrix whose elements are counted as in all of x."""
    x, rule = what.x[start:end], what.rule
    return Quantize(x, row, col, rule, what.col_sum, seed=what.seed, first=start)


def _zeroed(x: Tensor, spec: str, rows: int, k: int, groups: int) -> Parts:
    """Codes and scales of tokens in groups, all 0."""
    fmt, layout = spec_of(spec)
    codes, scales = layout.grouped_empty(fmt, rows, k, groups, x.device)
    return codes.zero_(), scales.zero_()


def _packed(what: QuantizeGroups, bounds: Bounds) -> Quantized:
    """The same packed for Hopper: what its quantizer must produce."""
    (rows, cols), groups, x = what.x.shape, len(bounds.ends), what.x
    spec = _alone(what.row or what.col)
    row = col = sums = None
    if what.row:
        row = Operand(*_zeroed(x, what.row, rows, cols, groups), what.row, rows, cols)
    if what.col:
        col = Operand(*_zeroed(x, what.col, cols, rows, groups), what.col, cols, rows)
    if what.col_sum:
        sums = x.new_zeros((groups, cols), dtype=torch.float32)
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        if start == end:
            continue
        made = run.quantize(
            _part(what, start, end, spec if what.row else "", spec if what.col else "")
        )
        if row is not None and made.row is not None:
            row.layout.put_group(row, made.row, start, end, i)
        if col is not None and made.col is not None:
            col.layout.put_group(col, made.col, start, end, i)
        if sums is not None and made.col_sum is not None:
            sums[i] = made.col_sum
    return Quantized(row, col, sums)


class QuantizeWeightsReference(_Reference):
    """One quantize a weight."""

    op = "quantize_weights"

    def run(self, what: QuantizeWeights) -> StackedParts:
        made = [
            run.quantize(Quantize(weight, what.row, what.col, what.rule)) for weight in what.weights
        ]
        row = stacked([one.row for one in made]) if what.row else None  # type: ignore[misc]
        col = stacked([one.col for one in made]) if what.col else None  # type: ignore[misc]
        return row, col


def stacked(operands: list[Operand]) -> Stack:
    """The operands of all groups, one behind the other."""
    first = operands[0]
    codes = torch.stack([one.codes for one in operands])
    if first.scales.dtype == torch.int32 and codes.shape[-1] % 16:  # rows as far apart as packed
        width = codes.shape[-1]
        codes = torch.nn.functional.pad(codes, (0, -width % 16))[..., :width]
    scales = torch.stack([one.scales for one in operands])
    return Stack(codes, scales, first.spec, len(operands), first.rows, first.k)


class ColumnsOfWeightsReference(_Reference):
    """The codes of every weight where blocks are square, else what they decode to, quantized along
    the columns."""

    op = "columns_of_weights"

    def run(self, row: Stack, col: str, rule: str) -> Stack:
        made = []
        for i in range(row.groups):
            one = row.group(i)
            if one.format.is_square and one.format is spec_of(col).format:
                made.append(run.convert(turned(one), col))
                continue
            values = run.dequantize(one, one.format.exact_dtype)
            again = run.quantize(Quantize(values, "", col, rule)).col
            assert again is not None
            made.append(again)
        return stacked(made)


# --------------------------------------------------------------------------------------------- gemm
class Names:
    """Names of the kernels that a loop ran on, in order of their first use."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def note(self, name: str) -> None:
        if name != run.ZERO_SIZE:
            self.names[name] = None

    def __str__(self) -> str:
        return " + ".join(self.names) or run.ZERO_SIZE


class GemmRowsReference(_Reference):
    op = "gemm_rows"

    def wants(self, problem: Problem) -> Wants:
        return Wants("rows", "grouped_cols")

    def run(self, p: GroupedRows) -> str:
        bounds = _bounds(p.groups, p.lhs.rows)
        if bounds is None:
            grouped_math.gemm_rows(
                p.lhs, p.rhs, *device_bounds(*p.groups, p.lhs.rows), p.bias, p.out
            )
            return self.name
        ran, at = Names(), 0
        for i, (start, end) in enumerate(zip(*bounds, strict=True)):
            p.out[at:start].zero_()
            at = end
            if end > start:
                own, weight = _own_rows(p.lhs, start, end, i), p.rhs.group(i)
                if weight.layout.exact and not own.layout.exact and own.layout.takes(weight.format):
                    weight = run.convert(weight, f"{weight.format.name}@{own.layout.name}")
                epilogue = Epilogue(bias=None if p.bias is None else p.bias[i])
                ran.note(run.gemm(own, weight, epilogue, p.out[start:end], None, p.mode).name)
        p.out[at:].zero_()
        return str(ran)


def _own_rows(lhs: Operand, start: int, end: int, group: int) -> Operand:
    if lhs.layout.exact:
        return rows_of(lhs, start, end)
    part = lhs.layout.group_of(lhs, start, end, group)
    return Operand(*part, _alone(lhs.spec), end - start, lhs.k)


def _alone(spec: str) -> str:
    """The spec of a group's part of packed tokens."""
    fmt, layout = spec_of(spec)
    return f"{fmt.name}@{layout.alone}"


class GemmKReference(_Reference):
    op = "gemm_k"

    def run(self, p: GroupedK) -> str:
        bounds = _bounds(p.groups, p.lhs.k)
        if bounds is None:
            starts, ends = device_bounds(*p.groups, p.lhs.k)
            grouped_math.gemm_k(p.lhs, p.rhs, starts, ends, p.out, p.accumulate)
            return self.name
        ran = Names()
        for i, (start, end) in enumerate(zip(*bounds, strict=True)):
            lhs, rhs = (own_k(side, start, end, i) for side in (p.lhs, p.rhs))
            epilogue = Epilogue(accumulate=p.accumulate)
            ran.note(run.gemm(lhs, rhs, epilogue, p.out[i], None, p.mode).name)
        return str(ran)


def own_k(side: Operand, start: int, end: int, group: int) -> Operand:
    """A group's part of an operand whose k is grouped."""
    if side.layout.exact:
        return k_of(side, start, end, group)
    part = side.layout.group_of(side, start, end, group)
    return Operand(*part, _alone(side.spec), side.rows, end - start)


for _kernel in (
    ActGroupsReference, QuantizeGroupsReference, QuantizeWeightsReference,
    ColumnsOfWeightsReference, GemmRowsReference, GemmKReference,
):  # fmt: skip
    register(_kernel())
