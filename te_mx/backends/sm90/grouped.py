"""Grouped problems on Hopper: one launch quantizes all groups, one multiplies them. Ends of groups
may stand on the device, which reads them, and nothing here waits for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import (
    FLOAT_DTYPES,
    LAYOUTS,
    SCALE_RULES,
    matrix,
    pointer,
    typed_address,
    why_not_dtype,
)
from te_mx.backends.base import FLOAT_DTYPES as DTYPES
from te_mx.backends.native import (
    fields_of,
    fields_to,
    is_aligned,
    one_read,
    one_read_of_weights,
    words_of,
)
from te_mx.backends.reference.grouped import ActGroupsReference
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.blockwise import (
    ALIGNED,
    FORMATS,
    LAYOUT,
    as_factors,
    columns_for,
    makes_both,
    why_not_sides,
)
from te_mx.backends.sm90.blockwise import NAME as OF_BLOCKS
from te_mx.backends.sm90.envelope import (
    as_multiplied,
    not_adaptive,
    why_not,
    why_not_each,
    why_not_second,
    why_not_weights,
)
from te_mx.backends.sm90.fused import makes
from te_mx.backends.sm90.gemm import ADAPTIVE, Invariant, frozen_tiles, lies_in_tiles
from te_mx.backends.sm90.layouts import SM90_FROZEN, SM90_NVFP4
from te_mx.backends.sm90.layouts.factors import (
    SM90_FACTOR_K,
    SM90_FACTOR_ROWS,
    SM90_FACTORS,
    factors_of_tiles,
)
from te_mx.backends.sm90.layouts.frozen import FORMAT
from te_mx.backends.sm90.layouts.tiles import BY_ROWS
from te_mx.backends.sm90.quantize import HopperDequantize, pack_args, sums_too, why_not_randomly
from te_mx.dispatch import run
from te_mx.dispatch.calls import (
    ActGroups,
    GroupedK,
    GroupedRows,
    Groups,
    QuantizeGroups,
    QuantizeWeights,
    StackedParts,
)
from te_mx.dispatch.fused import ACT_IDS
from te_mx.dispatch.groups import host_bounds, known_to_host
from te_mx.dispatch.kernels import Kernel, PreferredLayouts
from te_mx.dispatch.problem import INVARIANT, MOST, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack, stacked
from te_mx.runtime.kernel_log import note_written

_MOST_PLACES = 256  # te_mx/sm90.h


def check_ends(groups: Groups, rows: int) -> None:
    if known_to_host(groups.offs):
        host_bounds(*groups, rows)  # says what is wrong with them


def offs_on_device(offs: Tensor, device: torch.device) -> Tensor:
    """End offsets on the device. Those of the CPU travel as arguments of a kernel: no copy from
    memory that a CUDA graph could not read again."""
    if not offs.is_cpu:
        return offs.contiguous()
    there = torch.empty(len(offs), dtype=torch.int32, device=device)
    index = there.device.index
    status = binding.native().upload_ends(
        offs.tolist(), there.data_ptr(), binding.stream(index), index
    )
    binding.expect(status, "end offsets")
    return there


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
    binding.expect(status, f"{len(offs)} groups of rows of {tuple(x.shape)}")
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
        made_col, made_row = quantize_weights(
            QuantizeWeights(weights.transpose(1, 2), col_spec, row_spec, rule)  # type: ignore[union-attr]
        )
        return made_row, made_col
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
    binding.expect(status, f"{groups} weights of {(rows, cols)}")
    return row, col


def is_plain(spec: str) -> bool:
    return spec_of(spec).layout.name in binding.PLAIN_LAYOUTS


def pack_weights(weights: Stack, offs: Tensor, capacity: int, rows: int, spread: int) -> Stack:
    """Contiguous plain weights in tiles, for a product with groups of `rows` rows: those frozen
    without masters, and those of which a recipe keeps one copy. The operands of groups without rows
    are left uninitialized: nobody reads them, and a few tokens then need a few experts only. offs
    is on the device."""
    sizes = weights.groups, weights.rows, weights.k
    made = binding.empty_stack(f"{weights.format.name}@sm90:{spread}", *sizes, offs.device)
    args = pack_args(weights, made)
    args.groups = groups_of(offs, capacity, rows)
    status = binding.native().pack_stacked(args)
    binding.expect(status, f"{weights.groups} plain weights of {sizes[1:]}")
    return made


BAND_BYTES = 768 << 20  # of tiles: every band reads all tokens once more
# Mean rows of a group up to which codes become tiles where they are multiplied, for every block of
# 256 rows once more (NVIDIA H200: 1.02 times as fast at 384 rows, 0.97 times at 512).
MOST_IN_LOOP = 448


def gemm_bands(p: GroupedRows) -> None:
    """The rows of all groups times MXFP4 weights that stand still: in the loop, or as many rows of
    every weight at a time as BAND_BYTES of tiles hold become tiles. `p.groups.offs` is on the
    device."""
    native, w, spread = binding.native(), p.rhs, p.mode.spread
    if len(p.out) <= MOST_IN_LOOP * w.groups:
        return gemm_rows(p, w)
    steps, spec = -(-w.k // 128), f"{w.format.name}@sm90:{spread}"
    bands = -(-w.rows // (max(BAND_BYTES // (w.groups * w.k) // 256, 1) * 256))
    band = -(-w.rows // (bands * 256)) * 256
    for first in range(0, w.rows, band):
        rows = min(band, w.rows - first)
        made = binding.empty_stack(spec, w.groups, rows, w.k, w.codes.device)
        quads = first // 16 * steps
        args = native.PackArgs(
            rows=rows, k=w.k, out_layout=LAYOUTS["sm90"], spread=spread,
            codes=w.codes.data_ptr() + quads * 1024, scales=w.scales.data_ptr() + quads * 64,
            out_codes=made.codes.data_ptr(), out_scales=made.scales.data_ptr(), **fields_of(w.spec),
        )  # fmt: skip
        binding.set_execution(args, w.codes.device.index)
        args.groups = groups_of(p.groups.offs, p.groups.capacity, len(p.out))
        binding.expect(native.unpack_stacked(args, w.rows), f"{w.groups} weights of {(rows, w.k)}")
        bias = None if p.bias is None else p.bias[:, first : first + rows]
        gemm_rows(p._replace(bias=bias, out=p.out[:, first : first + rows]), made)


def places_of(outs: Sequence[Tensor]) -> tuple[Tensor, list[int]] | None:
    """The one of several matrices [n, m] that lies first, and how many rows behind it each begins;
    None unless these are whole numbers that the kernel can count.

    Slices of one buffer, in any order and with gaps of whole rows, are what this is for."""
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
    binding.expect(status, f"groups of rows of {tuple(p.out.shape)} and {rhs.groups} weights")


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
    binding.expect(status, f"products of {tuple(out.shape)}")


def _gemm_args(lhs: Operand, rhs: Operand | Stack, m: int, n: int, k: int, out: Tensor) -> Any:
    """The native record of a grouped GEMM, but for groups."""
    args = binding.native().GroupedGemmArgs(
        lhs_codes=lhs.codes.data_ptr(), lhs_scales=lhs.scales.data_ptr(), lhs_rows=m, lhs_k=k,
        rhs_codes=rhs.codes.data_ptr(), rhs_scales=rhs.scales.data_ptr(), rhs_rows=n, rhs_k=k,
        out=out.data_ptr(), out_dtype=FLOAT_DTYPES[out.dtype],
        ldo=max(out.stride(-2), out.shape[-1]),
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

    run = staticmethod(quantize_weights)


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
        args = pack_args(row, made)
        args.groups_count, args.rule = row.groups, SCALE_RULES[rule]
        status = binding.native().columns_of_stacked(args)
        binding.expect(status, f"the columns of {row.groups} plain weights of {(row.rows, row.k)}")
        return made


class HopperGemmRows(Kernel):
    """Tokens packed by groups; weights packed, or plain ones that are packed on the way."""

    op, name = "gemm_rows", ADAPTIVE

    def accepts(self, problem: Problem) -> str | None:
        problem = as_multiplied(problem)
        layouts = "sm90", "rows", "cols", SM90_NVFP4.name
        reason = why_not_each(problem, ("sm90_rows",), layouts)
        return reason or not_adaptive(problem) or why_not_second(problem.rhs)

    def note(self, problem: Problem) -> str:
        return "one launch for all groups, wherever m_splits lies"

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts(f"sm90_rows:{problem.spread}", f"sm90_k:{problem.spread}")

    def run(self, p: GroupedRows) -> str:
        (offs, capacity), rhs, rows = p.groups, p.rhs, p.lhs.rows
        check_ends(p.groups, rows)
        stands = rhs.layout is SM90_NVFP4
        if stands or is_plain(rhs.spec):
            offs = offs_on_device(offs, p.out.device)  # once for both kernels
            p = p._replace(groups=Groups(offs, capacity))
        if stands:
            gemm_bands(p)
        elif is_plain(rhs.spec):
            gemm_rows(p, pack_weights(rhs, offs, capacity, rows, p.mode.spread))
        else:
            gemm_rows(p, rhs)
        return self.name


class InvariantGemmRows(HopperGemmRows):
    """The same where a row has the bits that it has in a layer: tokens aligned each by itself,
    weights as Invariant in gemm.py has them, packed in every call where they are plain."""

    name, invariant = Invariant.name, True

    def accepts(self, problem: Problem) -> str | None:
        lhs, rhs = spec_of(problem.lhs), spec_of(problem.rhs)
        reason = why_not_each(as_multiplied(problem), ("sm90_rows",), ("sm90", "rows"))
        if reason is None and problem.precision != INVARIANT:
            reason = f"is for precision 'invariant', this asks for {problem.precision!r}"
        if reason is None and getattr(lhs.layout, "spread", BY_ROWS) != BY_ROWS:
            reason = "takes tokens that are aligned by rows"
        if reason is None and not (rhs.layout.exact or rhs.layout is SM90_FROZEN):
            reason = f"takes weights in rows, or in {SM90_FROZEN.name}"
        if reason is None and (lhs.format.name, rhs.format.name) != (FORMAT, FORMAT):
            reason = f"takes {FORMAT}, not {lhs.format.name} times {rhs.format.name}"
        return reason

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts(f"sm90_rows:{BY_ROWS}", right_row="rows")

    def run(self, p: GroupedRows) -> str:
        if is_plain(p.rhs.spec) and lies_in_tiles(p.rhs.spec, p.rhs.k):
            p = p._replace(rhs=frozen_tiles(p.rhs))
        return super().run(p)


class HopperGemmK(Kernel):
    op, name = "gemm_k", ADAPTIVE

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(as_multiplied(problem), "sm90_k") or not_adaptive(problem)
        return reason or why_not_second(problem.rhs)

    def run(self, p: GroupedK) -> str:
        gemm_k(p, p.out)
        note_written(p.out)
        return self.name

    def run_into(self, p: GroupedK, outs: Sequence[Tensor]) -> str | None:
        """The same into a tensor for each group; None where one launch does not reach them."""
        places = places_of(outs)
        if places is None:
            return None
        gemm_k(p, *places)
        for out in outs:
            note_written(out)
        return self.name


class HopperMoveEnds(Kernel):
    """Ends of groups that the host knows, as arguments of a kernel: no copy from memory that a CUDA
    graph could not read again."""

    op, name = "move_ends", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem, "sm90_rows")

    run = staticmethod(offs_on_device)


for _kernel in (
    HopperMoveEnds, HopperQuantizeGroups, HopperRandomGroups, HopperQuantizeWeights,
    HopperColumnsOfWeights, HopperGemmRows, InvariantGemmRows, HopperGemmK,
):  # fmt: skip
    register(_kernel())


# ----------------------------------------------------------------------------------- grouped apart
# Groups whose two directions are in different formats, as MXFP4BlockScaling has them: one launch
# of the quantizer for each direction. Columns of weights of codes in another format, as dgrad of
# frozen MXFP4 experts reads them: one launch that decodes, one that quantizes. Tokens that are
# quantized already, as they lie by rows.
TWO_READS = "sm90_two_reads"
MOST_BYTES = 1 << 30  # of decoded weights at a time


class _Apart(Kernel):
    """Reads the matrix twice, where one read does not make both directions."""

    name, rank = TWO_READS, 1
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
    larger than the one that it had, and its codes times a power of two are codes there."""

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


# ------------------------------------------------------------------------------- grouped blockwise
# The same of blockwise FP8, with fp32 scales or aligned columns.
ROWS, COLUMNS = SM90_FACTOR_ROWS.name, SM90_FACTOR_K.name
ALIGNED_COLUMNS = "sm90_k"  # up to the colon


class BlockwiseQuantizeGroups(HopperQuantizeGroups):
    name = OF_BLOCKS

    def accepts(self, problem: Problem) -> str | None:
        layouts = ROWS, COLUMNS, ALIGNED_COLUMNS
        reason = why_not(problem, *layouts, formats=FORMATS)
        return reason or makes_both(problem.lhs, problem.rhs, problem.rule)


class BlockwiseQuantizeWeights(HopperQuantizeWeights):
    name = OF_BLOCKS

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

    name, rank, invariant = OF_BLOCKS, 2, True

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not_each(problem, (ROWS,), (LAYOUT, ALIGNED, "rows", "cols"), FORMATS)
        return reason or not_adaptive(problem, INVARIANT) or why_not_sides(problem)

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts(
            ROWS, columns_for(problem, COLUMNS, f"{ALIGNED_COLUMNS}:{problem.spread}")
        )

    def prepare_stack(self, stack: Stack, problem: Problem) -> Stack:
        return _factors_of(stack)

    def run(self, p: GroupedRows) -> str:
        check_ends(p.groups, p.lhs.rows)
        gemm_rows(p, _factors_of(p.rhs))
        return self.name


class BlockwiseGemmK(HopperGemmK):
    """Both sides aligned, or both with fp32 scales."""

    name, rank = OF_BLOCKS, 2

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
    name = OF_BLOCKS

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem, ROWS, formats=FORMATS)


for _kernel in (
    BlockwiseMoveEnds, BlockwiseQuantizeGroups, BlockwiseQuantizeWeights, BlockwiseGemmRows,
    BlockwiseGemmK,
):  # fmt: skip
    register(_kernel())


# ----------------------------------------------------------------------------------- grouped fused
# Activations of groups: tiles go to the quantizer of groups without being written.
_QUANTIZERS = HopperQuantizeGroups(), BlockwiseQuantizeGroups()


class HopperActGroups(Kernel):
    """In one launch where the fused kernels make what is asked for; else values are written, in
    their dtype, and quantized by groups."""

    op, name = "act_quantize_grouped", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(lhs="", rhs="", rule="rceil"))
        return reason or why_not_dtype(problem)

    def make_plan(self, problem: Problem) -> Any:
        p = problem
        known = any(kernel.accepts(p) is None for kernel in _QUANTIZERS)
        if known and (p.lhs or p.rhs) and makes(p.lhs, p.rhs, p.rule, p.dtype):
            return ActsOfGroups(p)
        return ActGroupsReference().run


class ActsOfGroups:
    """Activations of groups in matrices of one size, by a record that is made once."""

    __slots__ = ("dtype", "index", "native", "record", "specs")

    def __init__(self, p: Problem) -> None:
        self.native, self.index, self.dtype, self.specs = (
            binding.native(), p.place.index, p.dtype, p[2:4],
        )  # fmt: skip
        self.record = self.native.ActArgs(
            h_rows=p.m, h_cols=p.n, h_dtype=DTYPES[p.dtype], out_dtype=DTYPES[p.dtype],
            device=self.index, **fields_to(p.lhs, p.rhs, p.rule),
        )  # fmt: skip

    def __call__(self, what: ActGroups) -> Quantized:
        (h, grad, act, dtype, _, target), groups = what
        if h.dtype != dtype or (grad is not None and grad.dtype != dtype):
            return ActGroupsReference().run(what)  # the value in fp32, rounded, quantized
        rows, width = h.shape
        check_ends(groups, rows)
        h, offs = binding.rows_of(h), offs_on_device(groups.offs, h.device)
        cols = width // 2 if act.gated and grad is None else width
        args = self.record.copy(
            h_data=h.data_ptr(), h_row_stride=h.stride(0), act=ACT_IDS[act.base], gated=act.gated,
            limit=act.limit, alpha=act.alpha, offset=act.offset,
            stream=binding.stream(self.index),
        )  # fmt: skip
        if grad is not None:
            grad = binding.rows_of(grad)
            args.grad = matrix(self.native, grad)
        made, _partial = set_outputs(args, *self.specs, (rows, cols), offs, target.col_sum)
        status = self.native.activate_grouped(args, groups_of(offs, groups.capacity, rows))
        if not binding.supported(status):
            return ActGroupsReference().run(what)
        return made


register(HopperActGroups())
