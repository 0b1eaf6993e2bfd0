"""Grouped problems on any device: one op a group where the host knows where groups end, which is
the specification; else every group on all rows, which waits for nothing."""

from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.backends.reference import Reference, gemm
from te_mx.dispatch import run
from te_mx.dispatch.calls import (
    ActGroups,
    Epilogue,
    GroupedK,
    GroupedRows,
    Groups,
    Quantize,
    QuantizeGroups,
    QuantizeWeights,
    StackedParts,
)
from te_mx.dispatch.fused import Target
from te_mx.dispatch.groups import (
    Bounds,
    col_sums_on_device,
    device_bounds,
    host_bounds,
    inside_groups,
    known_to_host,
    scale_rows,
)
from te_mx.dispatch.kernels import PreferredLayouts
from te_mx.dispatch.moe import Align, RoutedGemm, capacity
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import register
from te_mx.formats.nvfp4 import TensorScaledFormat
from te_mx.formats.stochastic import random_bits
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack, stacked, turned


# ------------------------------------------------------------------------------------ grouped math
# Grouped problems in plain torch with bounds that only the device knows: nothing here waits for
# them, so every group multiplies all rows and keeps its own. Slow, and safe in a CUDA graph.
# Where the host knows the bounds, ops loop over the groups instead.
def _padded_rows(starts: Tensor, ends: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor]:
    """(row of every row in a copy where each group starts at a block, whether it is in a group).

    Rows outside go to one row behind the copy."""
    group, inside = inside_groups(starts, ends, rows)
    start = starts[group]
    row = torch.arange(rows, device=ends.device)
    padded = (start // block + group) * block + row - start
    return torch.where(inside, padded, scale_rows(rows, len(ends), block) * block), inside


def _pad(values: Tensor, position: Tensor, padded_rows: int) -> Tensor:
    """values [rows, cols] -> [padded_rows, cols], zeros where no row goes."""
    room = values.new_zeros(padded_rows + 1, values.shape[1])
    room[position] = values
    return room[:-1]


@torch.no_grad()
def quantize(what: QuantizeGroups, starts: Tensor, ends: Tensor) -> Quantized:
    """As te_mx::quantize_grouped, for one group or more, in plain layouts."""
    x = what.x.detach()
    (rows, cols), groups = x.shape, len(ends)
    row = col = None
    random = None if what.seed is None else random_bits(what.seed, rows, cols)
    if what.row:
        fmt = spec_of(what.row).format
        group, inside = inside_groups(starts, ends, rows)
        keep, whole = inside.unsqueeze(1), None
        if isinstance(fmt, TensorScaledFormat) and not fmt.by_rows:
            owner = torch.where(inside, group, groups)
            codes, scales, whole = _by_groups(fmt, x, what.rule, random, owner[:, None], groups)
        else:
            codes, scales, *of_rows = fmt.quantize(x, what.rule, random)
            whole = torch.where(keep, of_rows[0], 1.0) if of_rows else None
        scales = torch.where(keep, scales, 0)
        row = Operand(codes * keep, scales, what.row, rows, cols, None, whole)
    if what.col:
        fmt = spec_of(what.col).format
        position, _ = _padded_rows(starts, ends, rows, fmt.block)
        room = scale_rows(rows, groups, fmt.block) * fmt.block
        padded = _pad(x, position, room).t()
        across = None if random is None else _pad(random, position, room).t()
        if fmt.transform is not None:
            there = _pad(x.new_ones(rows, 1), position, room).view(-1, fmt.transform.size)
            padded = fmt.transform.apply(padded, there.bool().all(1))
            if fmt.tensor_scaled:  # which rounds what was transformed to the dtype of x
                padded = padded.to(x.dtype)
            fmt = fmt.untransformed
        whole, owner = None, _owners(starts, ends, rows, fmt.block)
        if isinstance(fmt, TensorScaledFormat):
            of_blocks = torch.where(owner < 0, groups, owner)[None]
            codes, scales, whole = _by_groups(fmt, padded, what.rule, across, of_blocks, groups)
        else:
            codes, scales = fmt.quantize(padded, what.rule, across)
        codes = torch.nn.functional.pad(fmt.unpack(codes, room).t(), (0, 0, 0, 1))
        scales = torch.where((owner >= 0).unsqueeze(1), scales.t(), 0).contiguous()
        col = Operand(codes[position], scales, what.col, cols, rows, None, whole)
    return Quantized(row, col, col_sums_on_device(x, starts, ends) if what.col_sum else None)


def _by_groups(
    fmt: TensorScaledFormat, x: Tensor, rule: str, random: Tensor | None, owner: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and tensor scales [groups] of x [rows, k], of which every row of blocks
    [rows, 1], or column [1, blocks], has an owner: a group, or `groups` for none."""

    def shared(amax: Tensor) -> Tensor:
        down, across = (size == 1 for size in owner.shape)
        amax = torch.nn.functional.pad(amax, (0, across, 0, down))  # 0 of nothing
        of_owners = amax.amax([0] * down + [1] * across, keepdim=True)
        room = amax.new_zeros(groups + 1)
        room.scatter_reduce_(0, owner.flatten(), of_owners.flatten(), "amax")
        return room[owner]

    codes, scales, whole = fmt.quantize_parts(x, rule, random, shared)
    made = whole.new_ones(groups + 1).index_put_((owner.flatten(),), whole.flatten())
    return codes, scales, made[:-1]


@torch.no_grad()
def gemm_rows(
    lhs: Operand, rhs: Stack, starts: Tensor, ends: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out [R, n]: rows of group g are lhs @ rhs_g^T + bias_g, others are 0."""
    group, inside = inside_groups(starts, ends, len(out))
    result = torch.zeros_like(out)
    for g in range(rhs.groups):
        value = gemm.matmul(lhs._replace(tensor_scale=_own(lhs, g)), rhs.group(g))
        if bias is not None:
            value = value + bias[g].to(torch.float32)
        own = (inside & (group == g)).unsqueeze(1)
        result = torch.where(own, value.to(out.dtype), result)
    out.copy_(result)


def _own(tokens: Operand, g: int) -> Tensor | None:
    """The tensor scale of group g, or what scales every row."""
    whole = tokens.tensor_scale
    return whole[g] if whole is not None and whole.dim() == 1 else whole


@torch.no_grad()
def gemm_k(
    lhs: Operand, rhs: Operand, starts: Tensor, ends: Tensor, out: Tensor, accumulate: bool
) -> None:
    """out [G, m, n] (+)= lhs_g @ rhs_g^T over the k of group g; both lie as "grouped_cols"."""
    sides = [_parts(side, starts, ends) for side in (lhs, rhs)]
    for g in range(len(ends)):
        lhs_g, rhs_g = (side.group(g) for side in sides)
        value = gemm.matmul(lhs_g, rhs_g)
        out[g].copy_(value + out[g].to(torch.float32) if accumulate else value)


class _Padded(NamedTuple):
    """An operand in layout "grouped_cols" with codes [block * blocks, rows] where every group
    starts at a block, and the group of every block, -1 for none."""

    side: Operand
    codes: Tensor
    owner: Tensor

    def group(self, g: int) -> Operand:
        """All of k, with zeros outside of the group."""
        own, side = (self.owner == g).unsqueeze(1), self.side
        codes = self.codes * own.repeat_interleave(side.format.block, 0)
        spec = side.spec.replace("@grouped_cols", "@cols")
        scales, whole = torch.where(own, side.scales, 0), _own(side, g)
        return Operand(codes, scales, spec, side.rows, len(codes), None, whole)


def _parts(side: Operand, starts: Tensor, ends: Tensor) -> _Padded:
    """An operand whose k are the rows of groups."""
    rows, block = side.k, side.format.block
    position, _ = _padded_rows(starts, ends, rows, block)
    owner = _owners(starts, ends, rows, block)
    return _Padded(side, _pad(side.codes, position, len(owner) * block), owner)


def _owners(starts: Tensor, ends: Tensor, rows: int, block: int) -> Tensor:
    """The group of every block of a columnwise copy, -1 for those of none."""
    groups = len(ends)
    firsts = starts // block + torch.arange(groups, device=ends.device)
    at = torch.arange(scale_rows(rows, groups, block), device=ends.device)
    owner = torch.searchsorted(firsts, at, right=True) - 1
    known = owner.clamp(min=0)
    used = firsts[known] + (ends - starts + block - 1)[known] // block
    return torch.where((owner >= 0) & (at < used), owner, -1)


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
            return quantize(what, *device_bounds(*what.groups, x.shape[0]))
        return _in_groups(what, bounds)


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


def _in_groups(what: QuantizeGroups, bounds: Bounds) -> Quantized:
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
    """The codes of each weight where blocks are square, else its values quantized by columns."""

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

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts("rows", "grouped_cols")

    def run(self, p: GroupedRows) -> str:
        bounds = _bounds(p.groups, p.lhs.rows)
        if bounds is None:
            gemm_rows(p.lhs, p.rhs, *device_bounds(*p.groups, p.lhs.rows), p.bias, p.out)
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
            gemm_k(p.lhs, p.rhs, starts, ends, p.out, p.accumulate)
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


# ------------------------------------------------------------------------------------- routed rows
# Products of routed rows on any device: one GEMM an expert, on its own rows where the host may
# look, else on all rows. Slots sorted by expert and cut into blocks: no host waits for a device.
class MoeGemmReference(Reference):
    op = "moe_gemm"

    def run(self, p: RoutedGemm) -> str:
        expert, ran = p.routing.experts(len(p.out), p.rhs.groups), Names()
        rows = torch.arange(len(p.out), device=p.out.device)
        if known_to_host(expert):
            for e in expert.unique().tolist():
                if e >= 0:
                    own = rows[expert == e]
                    p.out[own] = _product(p, own, e, ran)
        else:
            for e in range(p.rhs.groups):
                made = _product(p, rows, e, ran)
                p.out.copy_(torch.where((expert == e).unsqueeze(1), made, p.out))
        return str(ran)


def _product(p: RoutedGemm, rows: Tensor, e: int, ran: Names) -> Tensor:
    """Routed rows times expert e, in the dtype of out."""
    lhs = gathered(p.lhs, rows // p.routing.a_div)
    sums = p.out.new_empty((len(rows), p.rhs.rows), dtype=torch.float32)
    epilogue = Epilogue(bias=None if p.bias is None else p.bias[e])
    ran.note(run.gemm(lhs, p.rhs.group(e), epilogue, sums, None, p.mode).name)
    if p.weights is not None:
        sums *= p.weights[rows].unsqueeze(1)
    return sums.to(p.out.dtype)


def gathered(tokens: Operand, rows: Tensor) -> Operand:
    """Rows of an operand in layout "rows"."""
    codes, scales = tokens.codes.index_select(0, rows), tokens.scales.index_select(0, rows)
    made = tokens._replace(codes=codes, scales=scales, rows=len(rows), packed=None)
    whole = tokens.tensor_scale
    if whole is None or whole.dim() == 0:
        return made
    return made._replace(tensor_scale=whole.index_select(0, rows))


_I32 = torch.int32


class MoeAlignReference(Reference):
    op = "moe_align"

    def run(self, p: Align) -> tuple[Tensor, Tensor, Tensor]:
        ids, block, experts = p.topk_ids, p.block_m, p.experts
        routed, device = len(ids), ids.device
        size = capacity(routed, block, experts)
        # Slots of no expert are those of one behind the last, whose block is cut off.
        known = (ids >= 0) & (ids < experts)
        expert = torch.where(known, ids, experts).long()
        ones = torch.ones_like(expert)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        counts = counts.scatter_add_(0, expert, ones)
        padded = (counts[:experts] + block - 1) // block * block
        ends = padded.cumsum(0)
        starts = torch.cat([ends - padded, torch.full((1,), size, device=device)])
        order = torch.argsort(expert, stable=True)
        sorted_expert = expert[order]
        rank = torch.arange(routed, device=device) - (counts.cumsum(0) - counts)[sorted_expert]
        to = torch.where(sorted_expert < experts, starts[sorted_expert] + rank, size)
        sorted_ids = torch.full((size + 1,), routed, dtype=_I32, device=device)
        sorted_ids = sorted_ids.scatter_(0, to, order.to(_I32))[:size]
        first = torch.arange(-(-size // block), device=device) * block
        owner = torch.searchsorted(ends, first, right=True)
        inside = owner < experts
        owner = torch.where(inside, owner, 0)
        if p.expert_map is not None:
            owner = p.expert_map.long()[owner]
        expert_ids = torch.where(inside, owner, -1).to(_I32)
        return sorted_ids, expert_ids, ends[-1:].to(_I32)


register(MoeGemmReference())
register(MoeAlignReference())
