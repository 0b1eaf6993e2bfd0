"""Mixtures with many rows an expert on Hopper: slots are sorted by expert, and everything between
the tokens and the sums over their slots lies in that order, in tiles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, FORMATS, pointer, why_not_dtype
from te_mx.backends.native import fields_to
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.decode import ROWS_OF_MANY
from te_mx.backends.sm90.envelope import as_multiplied, not_adaptive, why_not_each, why_not_second
from te_mx.backends.sm90.fused import makes
from te_mx.backends.sm90.gemm import frozen_tiles, lies_in_tiles
from te_mx.backends.sm90.grouped import (
    gemm_bands,
    gemm_rows,
    groups_of,
    is_plain,
    pack_weights,
    quantize_groups,
    set_outputs,
)
from te_mx.backends.sm90.layouts import SM90_FROZEN, SM90_NVFP4
from te_mx.backends.sm90.layouts.frozen import FORMAT
from te_mx.backends.sm90.layouts.tiles import BY_ROWS
from te_mx.backends.sm90.moe import HopperMoeCombine, HopperMoeGemm, in_tiles, one_copy
from te_mx.dispatch import run
from te_mx.dispatch.calls import GroupedRows, Groups, QuantizeGroups
from te_mx.dispatch.fused import ACT_IDS
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.moe import Experts, ExpertsKernel, RoutedGemm, rows_of_expert
from te_mx.dispatch.problem import INVARIANT, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Stack
from te_mx.runtime import workspace

# Mean rows of an expert from which tiles are faster than reading weights once for 8 rows, although
# weights that lie as codes and scales are packed at every call.
LEAST_ROWS, LEAST_ROWS_PACKED = 32, 6
LEAST_ROWS_STANDING = 24  # of MXFP4 that stands still, which few rows read once for 32 of them
LEAST_SORTED = 64  # the same of one product, whose rows are sorted and put back
MOST_EXPERTS = 4096  # te_mx/sm90.h
_I32, _E4M3 = torch.int32, FORMATS["e4m3"]


class Sorted(NamedTuple):
    """Slots in the order of their experts, int32: where those of each expert end [experts], the
    row of tokens of every position [slots], the position of every slot [slots], -1 for none."""

    ends: Tensor
    rows: Tensor
    positions: Tensor


def sort_slots(ids: Tensor, experts: int, per_row: int, expert_map: Tensor | None = None) -> Sorted:
    """Slots with ids of experts, `per_row` of which share a row of tokens."""
    native = binding.native()
    ids = ids.reshape(-1).contiguous()
    local = None if expert_map is None else expert_map.contiguous()
    made = Sorted(
        *(torch.empty(n, dtype=_I32, device=ids.device) for n in (experts, len(ids), len(ids)))
    )
    args = native.MoeAlignArgs(
        topk_ids=ids.data_ptr(), routed=len(ids), experts=experts, positions=len(ids),
        expert_map=pointer(local), mapped=0 if local is None else len(local), top_k=per_row,
        ends=made.ends.data_ptr(), rows=made.rows.data_ptr(),
        slot_positions=made.positions.data_ptr(),
    )  # fmt: skip
    binding.set_execution(args, ids.device.index)
    binding.expect(native.moe_align(args), f"{len(ids)} slots of {experts} experts")
    return made


def why_not_sorted(problem: Problem, *layouts: str) -> str | None:
    """Why no product with weights of experts, that lie plain, in tiles or in `layouts`, runs in
    tiles."""
    reason = why_not_each(as_multiplied(problem), ("rows",), ("rows", "sm90", *layouts))
    reason = reason or not_adaptive(problem, INVARIANT) or why_not_dtype(problem)
    if reason is None and problem.precision == INVARIANT:
        rhs = spec_of(problem.rhs)
        if (spec_of(problem.lhs).format.name, rhs.format.name) != (FORMAT, FORMAT):
            reason = f"takes {FORMAT} at precision {INVARIANT!r}"
        elif not (rhs.layout is SM90_FROZEN or lies_in_tiles(problem.rhs, problem.k)):
            reason = f"takes rows of whole 16 bytes, or {SM90_FROZEN.name}"
    if reason is None and problem.groups > MOST_EXPERTS:
        reason = f"sorts by at most {MOST_EXPERTS} experts, this has {problem.groups}"
    return reason or why_not_second(problem.rhs)


def product(
    lhs: Operand, weight: Stack, groups: Groups, bias: Tensor | None, dtype: torch.dtype, what: Any
) -> Tensor:
    """Sorted rows times the weights of their experts, in a dtype."""
    rhs, out = weight, torch.empty((lhs.rows, weight.rows), dtype=dtype, device=lhs.codes.device)
    if weight.layout is SM90_NVFP4:
        gemm_bands(GroupedRows(lhs, weight, groups, bias, out, what.mode))
        return out
    if is_plain(weight.spec) and what.mode.precision == INVARIANT:
        rhs = frozen_tiles(weight)
    elif is_plain(weight.spec):
        rhs = pack_weights(weight, groups.offs, groups.capacity, lhs.rows, what.mode.spread)
    gemm_rows(GroupedRows(lhs, rhs, groups, bias, out, what.mode), rhs)
    return out


class HopperExperts(ExpertsKernel):
    """Six launches, and one a weight that is packed on the way."""

    name, invariant = "sm90_tiles", True

    def accepts(self, problem: Problem) -> str | None:
        if not problem.lhs:
            return "quantizes tokens"
        reason = why_not_sorted(problem, SM90_NVFP4.name)
        invariant = problem.precision == INVARIANT
        spread = BY_ROWS if invariant else problem.spread
        row = problem.lhs.replace("@rows", f"@sm90_rows:{spread}")
        if reason is None and not makes(row, "", problem.rule, problem.dtype):
            reason = f"makes no {problem.lhs} of activated {problem.dtype}"
        least = LEAST_ROWS if is_plain(problem.rhs) else LEAST_ROWS_PACKED
        if spec_of(problem.rhs).layout is SM90_NVFP4:
            least = LEAST_ROWS_STANDING
        if reason is None and not invariant and rows_of_expert(problem) < least:
            reason = f"is for {least} rows an expert or more"
        return reason

    def run(self, what: Experts) -> Tensor:
        first, second, (tokens, top_k), x = what.first, what.second, what.ids.shape, what.x
        slots = sort_slots(what.ids, first.groups, top_k, what.expert_map)
        groups = Groups(slots.ends)
        spread = BY_ROWS if what.mode.precision == INVARIANT else what.mode.spread
        spec = f"{what.format}@sm90_rows:{spread}"
        quantized = quantize_groups(QuantizeGroups(x, groups, spec, "", what.rule), slots.rows).row
        assert quantized is not None
        h = product(quantized, first, groups, what.biases[0], x.dtype, what)
        middle = self._activated(h, spec, groups, what)
        y = product(middle, second, groups, what.biases[1], torch.float32, what)
        out = HopperMoeCombine().run(y, top_k, x.dtype, what.weights, slots.positions)
        if out is None:
            raise RuntimeError(f"te_mx internal error: {tokens} tokens with {top_k} slots")
        return out

    def _activated(self, h: Tensor, spec: str, groups: Groups, what: Experts) -> Operand:
        """f(gate) * up of sorted h, quantized."""
        native = binding.native()
        (rows, width), act, dtype = h.shape, what.act, FLOAT_DTYPES[h.dtype]
        args = native.ActArgs(
            h_data=h.data_ptr(), h_rows=rows, h_cols=width, h_row_stride=width, h_dtype=dtype,
            act=ACT_IDS[act.base], gated=True, limit=act.limit, alpha=act.alpha, offset=act.offset,
            in_pairs=what.in_pairs, out_dtype=dtype, **fields_to(spec, "", what.rule),
        )  # fmt: skip
        made, _ = set_outputs(args, spec, "", (rows, width // 2), groups.offs, False)
        binding.set_execution(args, h.device.index)
        status = native.activate_grouped(args, groups_of(groups.offs, groups.capacity, rows))
        binding.expect(status, f"{spec} of activated {h.dtype}")
        assert made.row is not None
        return made.row


class HopperMoeTiles(Kernel):
    """One product of routed rows in tiles: what lists and the kernel for few rows do not fit."""

    op, name, rank = "moe_gemm", "sm90_moe_tiles", -1

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not_sorted(problem)
        few = rows_of_expert(problem) < LEAST_SORTED
        if reason is None and problem.precision == INVARIANT:
            reason = "quantizes tokens once more, which may round others where they are aligned"
        if reason is None and few and HopperMoeGemm().accepts(problem) is None:
            reason = f"leaves less than {LEAST_SORTED} rows an expert to {HopperMoeGemm.name}"
        return reason

    def prepare_stack(self, stack: Stack, problem: Problem) -> Stack:
        if not is_plain(stack.spec):
            return stack
        wide = stack.format.element.bits == 8
        return in_tiles(stack, problem.spread) if wide else one_copy(stack)

    def note(self, problem: Problem) -> str:
        return "sorts tokens by expert, in tiles"

    def run(self, p: RoutedGemm) -> str:
        experts = p.routing.experts(len(p.out), p.rhs.groups).to(_I32)
        slots = sort_slots(experts, p.rhs.groups, p.routing.a_div)
        groups, fmt = Groups(slots.ends), p.lhs.format
        # Quantizing a block by "rceil" again changes no value above 2^-133.
        values = run.dequantize(p.lhs, fmt.exact_dtype)
        row = f"{fmt.name}@sm90_rows:{p.mode.spread}"
        lhs = quantize_groups(QuantizeGroups(values, groups, row, "", "rceil"), slots.rows).row
        assert lhs is not None
        put_back(p, slots, lambda dtype: product(lhs, p.rhs, groups, p.bias, dtype, p))
        return self.name


def put_back(p: RoutedGemm, slots: Sorted, multiply: Callable[[torch.dtype], Tensor]) -> None:
    """Write p.out: the rows of its slots, from what `multiply` makes of them sorted, in a dtype."""
    sorted_out = multiply(p.out.dtype if p.weights is None else torch.float32)
    there = slots.positions >= 0
    made = sorted_out[slots.positions.clamp(min=0)]
    if p.weights is not None:
        made = made * p.weights.unsqueeze(1)
    p.out.copy_(torch.where(there.unsqueeze(1), made.to(p.out.dtype), p.out))


class HopperMoeRows(Kernel):
    """One product of routed rows that have the bits of any others: sorted codes, on the kernel of
    few rows (decode.py, Rows), which takes any number of them."""

    op, name, rank, invariant = "moe_gemm", ROWS_OF_MANY, -1, True

    def accepts(self, problem: Problem) -> str | None:
        if problem.precision != INVARIANT:
            return f"is for precision 'invariant', this asks for {problem.precision!r}"
        return why_not_sorted(problem)

    def prepare_stack(self, stack: Stack, problem: Problem) -> Stack:
        return frozen_tiles(stack) if is_plain(stack.spec) else stack

    def run(self, p: RoutedGemm) -> str | None:
        experts = p.routing.experts(len(p.out), p.rhs.groups).to(_I32)
        slots = sort_slots(experts, p.rhs.groups, p.routing.a_div)
        rhs = frozen_tiles(p.rhs) if is_plain(p.rhs.spec) else p.rhs
        rows = slots.rows.clamp(0, max(p.lhs.rows - 1, 0))
        codes, scales = (part.index_select(0, rows) for part in (p.lhs.codes, p.lhs.scales))
        bias = None if p.bias is None else p.bias.contiguous()
        native, (m, n), k = binding.native(), p.out.shape, p.lhs.k
        args = native.DecodeArgs(
            m=m, n=n, k=k, w=rhs.codes.data_ptr(), ldw=rhs.codes.stride(-2), w_packed=True,
            w_scales=rhs.scales.data_ptr(), w_element=_E4M3, x_element=_E4M3, spread=BY_ROWS,
            x=codes.data_ptr(), ldx=k, x_scales=scales.data_ptr(), ldo=n,
            groups=groups_of(slots.ends, 0, m), workspace_bytes=native.decode_workspace(
                m, k, p.rhs.groups),
        )  # fmt: skip
        binding.set_execution(args, p.out.device.index)
        if bias is not None:
            args.bias, args.bias_dtype = bias.data_ptr(), FLOAT_DTYPES[bias.dtype]

        def multiply(dtype: torch.dtype) -> Tensor:
            out = torch.empty(p.out.shape, dtype=dtype, device=p.out.device)
            args.out, args.out_dtype = out.data_ptr(), FLOAT_DTYPES[out.dtype]
            scratch = workspace.acquire(out.device, args.workspace_bytes)
            args.workspace = pointer(scratch)
            binding.expect(native.decode(args), f"{m} rows of {p.rhs.groups} experts")
            workspace.release(scratch, args.workspace_bytes)
            return out

        put_back(p, slots, multiply)
        return self.name


register(HopperExperts())
register(HopperMoeTiles())
register(HopperMoeRows())
