"""Grouped problems on Hopper: one launch quantizes all groups, one multiplies them. Ends of groups
may stand on the device, which reads them, and nothing here waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, LAYOUTS, SCALE_RULES, pointer, typed_address
from te_mx.backends.native import (
    fields_of,
    fields_to,
    is_aligned,
    one_read,
    one_read_of_weights,
    record_of,
    words_of,
)
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.envelope import (
    as_multiplied,
    not_adaptive,
    why_not,
    why_not_each,
    why_not_second,
    why_not_weights,
)
from te_mx.backends.sm90.gemm import ADAPTIVE
from te_mx.backends.sm90.quantize import sums_too, why_not_randomly
from te_mx.dispatch.grouped_calls import (
    GroupedK,
    GroupedRows,
    Groups,
    QuantizeGroups,
    QuantizeWeights,
    StackedParts,
)
from te_mx.dispatch.groups import host_bounds, known_to_host
from te_mx.dispatch.kernels import Kernel, Wants
from te_mx.dispatch.problem import MOST, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack

_MOST_PLACES = 256  # te_mx/sm90.h


def check_ends(groups: Groups, rows: int) -> None:
    if known_to_host(groups.offs):
        host_bounds(*groups, rows)  # says what is wrong with them


def offs_on_device(offs: Tensor, device: torch.device) -> Tensor:
    """End offsets on the device. Those of the CPU travel as arguments of a kernel: no copy from
    memory that a CUDA graph could not read again.
    """
    if not offs.is_cpu:
        return offs.contiguous()
    there = torch.empty(len(offs), dtype=torch.int32, device=device)
    index = there.device.index
    status = binding.native().upload_ends(
        offs.tolist(), there.data_ptr(), binding.stream(index), index
    )
    expect(status, "end offsets")
    return there


def expect(status: int, what: str) -> None:
    if not binding.supported(status):
        raise RuntimeError(
            f"te_mx internal error: the Hopper kernels do not take {what}; they count rows, "
            "columns and rows of all weights in 31 bits"
        )


def groups_of(offs: Tensor, capacity: int, rows: int) -> Any:
    """The native record of groups whose ends are on the device."""
    return binding.native().Groups(
        count=len(offs), rows=rows, ends=offs.data_ptr(), ends_int32=offs.dtype == torch.int32,
        capacity=capacity,
    )  # fmt: skip


def _set_side(args: Any, side: str, to: Operand | Stack) -> None:
    """Write where one direction goes into a native record."""
    setattr(args, f"{side}_codes", to.codes.data_ptr())
    setattr(args, f"{side}_scales", to.scales.data_ptr())


def quantize_groups(what: QuantizeGroups, gather: Tensor | None = None) -> Quantized:
    """The tokens of all groups, which are not empty, in one read. gather: int32, the row of x that
    each row of the groups is, instead of the rows of x in their order."""
    x, (offs, capacity), row_spec, col_spec, rule, col_sum, seed = what
    rows, cols, device = len(x), x.shape[1], x.device
    if gather is None:
        check_ends(what.groups, rows)
    else:
        rows = len(gather)
    x, offs = binding.rows_of(x), offs_on_device(offs, device)
    args = binding.native().GroupedQuantizeArgs(
        x_data=x.data_ptr(), x_rows=rows, x_cols=cols, x_row_stride=x.stride(0),
        x_dtype=FLOAT_DTYPES[x.dtype], groups=groups_of(offs, capacity, rows), seed=pointer(seed),
        gather=pointer(gather), **fields_to(row_spec, col_spec, rule),
    )  # fmt: skip
    made, _partial = set_outputs(args, row_spec, col_spec, (rows, cols), offs, col_sum)
    binding.set_execution(args, device.index)
    status = binding.native().quantize_grouped(args)
    expect(status, f"{len(offs)} groups of rows of {tuple(x.shape)}")
    return made


def set_outputs(
    args: Any, row: str, col: str, shape: tuple[int, int], offs: Tensor, col_sum: bool
) -> tuple[Quantized, Tensor | None]:
    """As of one matrix; offs: the ends of its groups on the device."""
    return binding.set_outputs(args, row, col, shape, offs.device, col_sum, groups=len(offs))


def sources(weights: Sequence[Tensor] | Tensor) -> tuple[list[int], int, torch.dtype, object]:
    """Addresses of weights [rows, cols], elements between their rows, their dtype, and what must
    live until they are read."""
    if isinstance(weights, Tensor):
        if weights.stride(2) != 1:
            weights = weights.contiguous()
        start, step = weights.data_ptr(), weights.stride(0) * weights.element_size()
        addresses = [start + i * step for i in range(len(weights))]
        return addresses, weights.stride(1), weights.dtype, weights
    first = weights[0]
    stride, dtype = first.stride(), first.dtype
    if stride[1] != 1 or any(w.stride() != stride or w.dtype != dtype for w in weights):
        common = dtype if len({FLOAT_DTYPES[w.dtype] for w in weights}) == 1 else torch.float32
        weights = [w.to(common).contiguous() for w in weights]
        stride, dtype = weights[0].stride(), common
    return [w.data_ptr() for w in weights], stride[0], dtype, weights


def quantize_weights(what: QuantizeWeights) -> StackedParts:
    """The weights of all groups, which are not empty, in one read."""
    weights, row_spec, col_spec, rule = what
    packed = [spec for spec in (row_spec, col_spec) if spec and not is_plain(spec)]
    turned = isinstance(weights, Tensor) and weights.stride(1) == 1 != weights.stride(2)
    if turned and packed and not any(map(is_aligned, packed)):
        # They lie [G, cols, rows]. Packed rows of a matrix are the packed columns of the turned
        # one, so what is asked for is made as it lies, without a copy.
        made_col, made_row = _quantize_weights(
            QuantizeWeights(weights.transpose(1, 2), col_spec, row_spec, rule)  # type: ignore[union-attr]
        )
        return made_row, made_col
    return _quantize_weights(what)


def is_plain(spec: str) -> bool:
    return spec_of(spec).layout.name in binding.PLAIN_LAYOUTS


def _quantize_weights(what: QuantizeWeights) -> StackedParts:
    weights, row_spec, col_spec, rule = what
    groups, (rows, cols), device = len(weights), weights[0].shape, weights[0].device
    addresses, stride, dtype, _alive = sources(weights)
    args = binding.native().QuantizeArgs(
        x_rows=rows, x_cols=cols, x_row_stride=stride, x_dtype=FLOAT_DTYPES[dtype],
        **fields_to(row_spec, col_spec, rule),
    )  # fmt: skip
    row = col = None
    if row_spec:
        row = binding.empty_stack(row_spec, groups, rows, cols, device)
        _set_side(args, "row", row)
    if col_spec:
        col = binding.empty_stack(col_spec, groups, cols, rows, device)
        _set_side(args, "col", col)
    binding.set_execution(args, device.index)
    status = binding.native().quantize_stacked(args, addresses)
    expect(status, f"{groups} weights of {(rows, cols)}")
    return row, col


def _pack_args(weights: Stack, made: Stack) -> Any:
    """The native record of contiguous plain weights that are packed."""
    args = binding.native().PackArgs(
        operand=record_of(binding.native(), weights), out_codes=made.codes.data_ptr(),
        out_scales=made.scales.data_ptr(), out_layout=LAYOUTS["sm90"],
        spread=spec_of(made.spec).layout.spread,  # type: ignore[attr-defined]
    )  # fmt: skip
    binding.set_execution(args, weights.codes.device.index)
    return args


def pack_weights(weights: Stack, offs: Tensor, capacity: int, rows: int, spread: int) -> Stack:
    """Contiguous plain weights in tiles, for a product with groups of `rows` rows: those frozen
    without masters, and those of which a recipe keeps one copy. The operands of groups without rows
    are left uninitialized: nobody reads them, and a few tokens then need a few experts only. offs
    is on the device."""
    sizes = weights.groups, weights.rows, weights.k
    made = binding.empty_stack(f"{weights.format.name}@sm90:{spread}", *sizes, offs.device)
    args = _pack_args(weights, made)
    args.groups = groups_of(offs, capacity, rows)
    status = binding.native().pack_stacked(args)
    expect(status, f"{weights.groups} plain weights of {sizes[1:]}")
    return made


def places_of(outs: Sequence[Tensor]) -> tuple[Tensor, list[int]] | None:
    """The one of several matrices [n, m] that lies first, and how many rows behind it each begins;
    None unless these are whole numbers that the kernel can count.

    Slices of one buffer, in any order and with gaps of whole rows, are what this is for.
    """
    first = min(outs, key=Tensor.data_ptr)
    base, row = first.data_ptr(), first.shape[1] * first.element_size()
    behind = [out.data_ptr() - base for out in outs]
    if len(outs) > _MOST_PLACES or any(b % row for b in behind):
        return None
    rows = [b // row for b in behind]
    return None if max(rows) + len(first) > MOST else (first, rows)


def gemm_rows(p: GroupedRows, rhs: Stack) -> None:
    """The rows of all groups times their packed weights, all of them not empty."""
    bias = None if p.bias is None else p.bias.contiguous()
    offs = offs_on_device(p.groups.offs, p.out.device)
    args = _gemm_args(p.lhs, rhs, len(p.out), rhs.rows, rhs.k, p.out)
    args.bias, args.bias_dtype = typed_address(bias)
    args.groups = groups_of(offs, p.groups.capacity, len(p.out))
    status = binding.native().gemm_grouped(args)
    expect(status, f"groups of rows of {tuple(p.out.shape)} and {rhs.groups} weights")


def gemm_k(p: GroupedK, out: Tensor, first_rows: Sequence[int] = ()) -> None:
    """The products over the k of all groups, of packed operands that are not empty. With
    first_rows, `out` [n, m] is the product that lies first in memory, and that of group i begins
    first_rows[i] rows behind it."""
    check_ends(p.groups, p.lhs.k)
    offs = offs_on_device(p.groups.offs, out.device)
    args = _gemm_args(p.lhs, p.rhs, p.lhs.rows, p.rhs.rows, 0, out)
    args.along_k, args.accumulate = True, p.accumulate
    args.groups = groups_of(offs, p.groups.capacity, p.lhs.k)
    status = binding.native().gemm_grouped(args, first_rows)
    expect(status, f"products of {tuple(out.shape)}")


def _gemm_args(lhs: Operand, rhs: Operand | Stack, m: int, n: int, k: int, out: Tensor) -> Any:
    """The native record of a grouped GEMM, but for groups."""
    args = binding.native().GroupedGemmArgs(
        lhs_codes=lhs.codes.data_ptr(), lhs_scales=lhs.scales.data_ptr(), lhs_rows=m, lhs_k=k,
        rhs_codes=rhs.codes.data_ptr(), rhs_scales=rhs.scales.data_ptr(), rhs_rows=n, rhs_k=k,
        out=out.data_ptr(), out_dtype=FLOAT_DTYPES[out.dtype], ldo=out.shape[-1],
        **fields_of(lhs.spec, "lhs"), **fields_of(rhs.spec, "rhs"),
    )  # fmt: skip
    binding.set_execution(args, out.device.index)
    return args


class HopperQuantizeGroups(Kernel):
    op, name = "quantize_grouped", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem, "sm90_rows", "sm90_k") or one_read(problem.lhs, problem.rhs)

    def run(self, what: QuantizeGroups) -> Quantized:
        return quantize_groups(what)


class HopperRandomGroups(HopperQuantizeGroups):
    """With stochastic rounding or a Hadamard transform, as `HopperRandomQuantize`: every group has
    chunks of its own, and elements have the numbers that they have in x."""

    name = "sm90_random"

    def accepts(self, problem: Problem) -> str | None:
        return why_not_randomly(problem, HopperQuantizeGroups())

    def run(self, what: QuantizeGroups) -> Quantized:
        if not what.col_sum or sums_too(what.x.dtype, what.row, what.col):
            return quantize_groups(what)
        sums = quantize_groups(what._replace(row="", col="", seed=None)).col_sum
        return quantize_groups(what._replace(col_sum=False))._replace(col_sum=sums)


class HopperQuantizeWeights(Kernel):
    op, name = "quantize_weights", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "sm90", "rows", "cols")
        reason = reason or one_read_of_weights(problem.lhs, problem.rhs)
        return reason or why_not_weights(problem)

    def run(self, what: QuantizeWeights) -> StackedParts:
        return quantize_weights(what)


class HopperColumnsOfWeights(Kernel):
    op, name = "columns_of_weights", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not_each(problem, ("rows",), ("sm90",))
        if reason is None and words_of(problem.lhs)[0] != words_of(problem.rhs)[0]:
            reason = "keeps the format"
        return reason or why_not_second(problem.rhs)

    def run(self, row: Stack, col: str, rule: str) -> Stack:
        row = row._replace(codes=row.codes.contiguous(), scales=row.scales.contiguous())
        made = binding.empty_stack(col, row.groups, row.k, row.rows, row.codes.device)
        args = _pack_args(row, made)
        args.groups_count, args.rule = row.groups, SCALE_RULES[rule]
        status = binding.native().columns_of_stacked(args)
        expect(status, f"the columns of {row.groups} plain weights of {(row.rows, row.k)}")
        return made


class HopperGemmRows(Kernel):
    """Tokens packed by groups; weights packed, or plain ones that are packed on the way."""

    op, name = "gemm_rows", ADAPTIVE

    def accepts(self, problem: Problem) -> str | None:
        problem = as_multiplied(problem)
        reason = why_not_each(problem, ("sm90_rows",), ("sm90", "rows", "cols"))
        return reason or not_adaptive(problem) or why_not_second(problem.rhs)

    def note(self, problem: Problem) -> str:
        return "one launch for all groups, wherever m_splits lies"

    def wants(self, problem: Problem) -> Wants:
        return Wants(f"sm90_rows:{problem.spread}", f"sm90_k:{problem.spread}")

    def run(self, p: GroupedRows) -> str:
        (offs, capacity), rhs, rows = p.groups, p.rhs, p.lhs.rows
        check_ends(p.groups, rows)
        if is_plain(rhs.spec):
            offs = offs_on_device(offs, p.out.device)  # once for both kernels
            p = p._replace(groups=Groups(offs, capacity))
            rhs = pack_weights(rhs, offs, capacity, rows, p.mode.spread)
        gemm_rows(p, rhs)
        return self.name


class HopperGemmK(Kernel):
    op, name = "gemm_k", ADAPTIVE

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(as_multiplied(problem), "sm90_k") or not_adaptive(problem)
        return reason or why_not_second(problem.rhs)

    def run(self, p: GroupedK) -> str:
        gemm_k(p, p.out)
        if not p.out.is_inference():
            torch.autograd.graph.increment_version(p.out)
        return self.name

    def run_into(self, p: GroupedK, outs: Sequence[Tensor]) -> str | None:
        """The same into a tensor for each group; None where one launch does not reach them."""
        places = places_of(outs)
        if places is None:
            return None
        gemm_k(p, *places)
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
        return offs_on_device(offs, device)


for _kernel in (
    HopperMoveEnds, HopperQuantizeGroups, HopperRandomGroups, HopperQuantizeWeights,
    HopperColumnsOfWeights, HopperGemmRows, HopperGemmK,
):  # fmt: skip
    register(_kernel())
