"""Grouped problems on any device: one op a group where the host knows where groups end, which is
the specification; else every group on all rows, which waits for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.reference import Reference, grouped_math
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
    host_bounds,
    known_to_host,
)
from te_mx.dispatch.kernels import Wants
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack, stacked, turned


def _bounds(groups: Groups, rows: int) -> Bounds | None:
    """Bounds that the host knows, checked; None where only a device knows them."""
    if len(groups.offs) == 0:
        return Bounds([], [])
    return host_bounds(*groups, rows) if known_to_host(groups.offs) else None


# ----------------------------------------------------------------------------------------- quantize
class QuantizeGroupsReference(Reference):
    op = "quantize_grouped"

    def run(self, what: QuantizeGroups) -> Quantized:
        x, row, col = what.x, what.row, what.col
        packed = _is_packed(row or col)
        if (
            row
            and col
            and (
                spec_of(row).format != spec_of(col).format
                or ((packed or _is_packed(col)) and _alone(row) != _alone(col))
            )
        ):
            one = _direction(what, what.row, "", what.col_sum)
            other = _direction(what, "", what.col, False)
            return Quantized(one.row, other.col, one.col_sum)
        bounds = _bounds(what.groups, x.shape[0])
        if bounds is None and packed:
            raise ValueError(
                f"te_mx: only Hopper kernels write {row or col} in groups whose ends the device "
                "knows, and they do not take this problem; quantize to rows and grouped_cols"
            )
        if bounds is None:
            return grouped_math.quantize(what, *device_bounds(*what.groups, x.shape[0]))
        return _by_groups(what, bounds)


class ActGroupsReference(Reference):
    """An activation, then the quantizer of groups, each by its own kernel."""

    op = "act_quantize_grouped"

    def run(self, what: ActGroups) -> Quantized:
        row, col, rule, col_sum, seed = what.step.target
        step = what.step._replace(keep=True, target=Target("", "", "rceil"))
        made = run.run_on("act_quantize", step.h, "", "", step.dtype, "rceil", step).out
        asked = QuantizeGroups(made, what.groups, row, col, rule, col_sum, seed)
        return _direction(asked, row, col, col_sum)


def _alone(spec: str) -> str:
    """The spec of a group's part of tokens."""
    fmt, layout = spec_of(spec)
    return f"{fmt.name}@{layout.alone}"


def _is_packed(spec: str) -> bool:
    return not spec_of(spec).layout.exact


def _direction(what: QuantizeGroups, row: str, col: str, col_sum: bool) -> Quantized:
    """Some directions, by the kernel for these."""
    x, offs = what.x, what.groups.offs
    rows, cols = x.shape
    problem = Problem(
        "quantize_grouped", place_of(x.device), row, col, rows, cols, groups=len(offs),
        ends="host" if known_to_host(offs) else "device", dtype=x.dtype, rule=what.rule,
    )  # fmt: skip
    return run.run(problem, what._replace(row=row, col=col, col_sum=col_sum))


def _part(what: QuantizeGroups, start: int, end: int) -> Quantize:
    """The rows of one group, as a matrix whose elements are counted as in all of x."""
    x, rule = what.x[start:end], what.rule
    row, col = (_alone(spec) if spec else "" for spec in (what.row, what.col))
    return Quantize(x, row, col, rule, what.col_sum, seed=what.seed, first=start)


def _zeroed(x: Tensor, spec: str, rows: int, k: int, groups: int) -> Operand:
    """Tokens in groups, codes and scales all 0, tensor scales 1."""
    fmt, layout = spec_of(spec)
    codes, scales = layout.grouped_empty(fmt, rows, k, groups, x.device)
    whole = None
    if fmt.tensor_scaled:
        shape = fmt.tensor_scale_shape(rows) or (groups,)
        whole = x.new_ones(shape, dtype=torch.float32)
    return Operand(codes.zero_(), scales.zero_(), spec, rows, k, None, whole)


def _by_groups(what: QuantizeGroups, bounds: Bounds) -> Quantized:
    """One quantize a group, codes and scales that belong to no group 0: what Hopper's quantizer
    must produce, too."""
    (rows, cols), groups, x = what.x.shape, len(bounds.ends), what.x
    row = col = sums = None
    if what.row:
        row = _zeroed(x, what.row, rows, cols, groups)
    if what.col:
        col = _zeroed(x, what.col, cols, rows, groups)
    if what.col_sum:
        sums = x.new_zeros((groups, cols), dtype=torch.float32)
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        if start == end:
            continue
        made = run.quantize(_part(what, start, end))
        for whole, part in ((row, made.row), (col, made.col)):
            if whole is not None and part is not None:
                whole.layout.put_group(whole, part, start, end, i)
                if whole.tensor_scale is not None and part.tensor_scale is not None:
                    by_rows = whole.tensor_scale.dim() == 2
                    whole.tensor_scale[slice(start, end) if by_rows else i] = part.tensor_scale
        if sums is not None and made.col_sum is not None:
            sums[i] = made.col_sum
    return Quantized(row, col, sums)


class QuantizeWeightsReference(Reference):
    """One quantize a weight."""

    op = "quantize_weights"

    def run(self, what: QuantizeWeights) -> StackedParts:
        made = [
            run.quantize(Quantize(weight, what.row, what.col, what.rule)) for weight in what.weights
        ]
        row = stacked([one.row for one in made]) if what.row else None  # type: ignore[misc]
        col = stacked([one.col for one in made]) if what.col else None  # type: ignore[misc]
        return row, col


class ColumnsOfWeightsReference(Reference):
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


class GemmRowsReference(Reference):
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
                own, weight = p.lhs.group(start, end, i), p.rhs.group(i)
                if weight.layout.exact and not own.layout.exact and own.layout.takes(weight.format):
                    weight = run.convert(weight, f"{weight.format.name}@{own.layout.name}")
                epilogue = Epilogue(bias=None if p.bias is None else p.bias[i])
                ran.note(run.gemm(own, weight, epilogue, p.out[start:end], None, p.mode).name)
        p.out[at:].zero_()
        return str(ran)


class GemmKReference(Reference):
    op = "gemm_k"

    def run(self, p: GroupedK) -> str:
        bounds = _bounds(p.groups, p.lhs.k)
        if bounds is None:
            starts, ends = device_bounds(*p.groups, p.lhs.k)
            grouped_math.gemm_k(p.lhs, p.rhs, starts, ends, p.out, p.accumulate)
            return self.name
        ran = Names()
        for i, (start, end) in enumerate(zip(*bounds, strict=True)):
            lhs, rhs = (side.group(start, end, i) for side in (p.lhs, p.rhs))
            epilogue = Epilogue(accumulate=p.accumulate)
            ran.note(run.gemm(lhs, rhs, epilogue, p.out[i], None, p.mode).name)
        return str(ran)


for _kernel in (
    ActGroupsReference, QuantizeGroupsReference, QuantizeWeightsReference,
    ColumnsOfWeightsReference, GemmRowsReference, GemmKReference,
):  # fmt: skip
    register(_kernel())
