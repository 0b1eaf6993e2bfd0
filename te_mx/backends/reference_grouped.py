"""Grouped problems in plain torch with bounds that only the device knows: nothing here waits for
them, so every group multiplies all rows and keeps its own. Slow, and safe in a CUDA graph.

Where the host knows the bounds, ops loop over the groups instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends import reference
from te_mx.backends.base import BLOCK, Operand, QuantizedParts
from te_mx.backends.grouped import StackedOperand, scale_rows


def _inside(starts: Tensor, ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(group of every row, whether it is inside one), [rows]; the group is 0 where it is not."""
    row = torch.arange(rows, device=ends.device)
    group = torch.searchsorted(ends, row, right=True)
    known = group < len(ends)
    group = torch.where(known, group, 0)
    return group, known & (row >= starts[group])


def _padded_rows(starts: Tensor, ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(row of every row in a copy where each group starts at a block, whether it is in a group).

    Rows outside go to one row behind the copy.
    """
    group, inside = _inside(starts, ends, rows)
    start = starts[group]
    row = torch.arange(rows, device=ends.device)
    padded = (start // BLOCK + group) * BLOCK + row - start
    return torch.where(inside, padded, scale_rows(rows, len(ends)) * BLOCK), inside


def _pad(values: Tensor, position: Tensor, blocks: int) -> Tensor:
    """values [rows, cols] -> [32 * blocks, cols], zeros where no row goes."""
    room = values.new_zeros(blocks * BLOCK + 1, values.shape[1])
    room[position] = values
    return room[:-1]


@torch.no_grad()
def quantize(
    x: Tensor, starts: Tensor, ends: Tensor, fmt: str, rowwise: bool, columnwise: bool, rule: str,
    col_sum: bool,
) -> QuantizedParts:  # fmt: skip
    """As ops.quantize_grouped, for one group or more."""
    rows, groups = len(x), len(ends)
    position, inside = _padded_rows(starts, ends, rows)
    keep = inside.unsqueeze(1)
    row_codes = row_scales = col_codes = col_scales = sums = None
    if rowwise:
        parts = reference.quantize(x, fmt, True, None, rule, False)
        assert parts.row_codes is not None and parts.row_scales is not None
        row_codes, row_scales = parts.row_codes * keep, parts.row_scales * keep
    if columnwise:
        blocks = scale_rows(rows, groups)
        padded = _pad(x.detach(), position, blocks)
        parts = reference.quantize(padded, fmt, False, "plain", rule, False)
        assert parts.col_codes is not None
        codes = torch.nn.functional.pad(parts.col_codes, (0, 0, 0, 1))
        col_codes, col_scales = codes[position], parts.col_scales
    if col_sum:
        sums = col_sums(x, starts, ends)
    return QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums)


@torch.no_grad()
def col_sums(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Sums of x [R, cols] over the rows of every group, fp32 [G, cols]."""
    group, inside = _inside(starts, ends, len(x))
    values = x.detach().to(torch.float32)
    own = [(inside & (group == g)).unsqueeze(1) for g in range(len(ends))]
    return torch.stack([torch.where(mask, values, 0.0).sum(0) for mask in own])


@torch.no_grad()
def gemm_rows(
    a: StackedOperand, b: Operand, starts: Tensor, ends: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out [R, m]: rows of group g are b @ a_g^T + bias_g, others are 0."""
    group, inside = _inside(starts, ends, len(out))
    result = torch.zeros_like(out)
    for g in range(a.groups):
        value = reference.matmul(a.group(g), b)
        if bias is not None:
            value = value + bias[g].to(torch.float32)
        own = (inside & (group == g)).unsqueeze(1)
        result = torch.where(own, value.to(out.dtype), result)
    out.copy_(result)


@torch.no_grad()
def gemm_k(
    a: Operand, b: Operand, starts: Tensor, ends: Tensor, out: Tensor, accumulate: bool
) -> None:
    """out [G, n, m] (+)= b_g @ a_g^T over the k of group g; both operands are "k_first"."""
    rows, groups = a.k, len(ends)
    position, _ = _padded_rows(starts, ends, rows)
    blocks = scale_rows(rows, groups)
    firsts = starts // BLOCK + torch.arange(groups, device=ends.device)
    block = torch.arange(blocks, device=ends.device)
    owner = torch.searchsorted(firsts, block, right=True) - 1
    sides = [(side, _pad(side.codes, position, blocks)) for side in (a, b)]
    for g in range(groups):
        own = (owner == g).unsqueeze(1)
        rows_own = own.repeat_interleave(BLOCK, 0)
        a_g, b_g = (
            Operand(codes * rows_own, side.scales * own, side.fmt, "k_first")
            for side, codes in sides
        )
        value = reference.matmul(a_g, b_g)
        out[g].copy_(value + out[g].to(torch.float32) if accumulate else value)
