"""Grouped problems in plain torch with bounds that only the device knows: nothing here waits for
them, so every group multiplies all rows and keeps its own. Slow, and safe in a CUDA graph.

Where the host knows the bounds, ops loop over the groups instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.backends.reference import torch_gemm
from te_mx.dispatch.grouped_calls import QuantizeGroups
from te_mx.dispatch.groups import col_sums_on_device, inside_groups, scale_rows
from te_mx.formats.nvfp4 import TensorScaledFormat
from te_mx.formats.stochastic import random_bits
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack


def _padded_rows(starts: Tensor, ends: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor]:
    """(row of every row in a copy where each group starts at a block, whether it is in a group).

    Rows outside go to one row behind the copy.
    """
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
        value = torch_gemm.matmul(lhs._replace(tensor_scale=_own(lhs, g)), rhs.group(g))
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
        value = torch_gemm.matmul(lhs_g, rhs_g)
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
