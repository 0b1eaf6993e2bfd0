"""Grouped problems in plain torch with bounds that only the device knows: nothing here waits for
them, so every group multiplies all rows and keeps its own. Slow, and safe in a CUDA graph.

Where the host knows the bounds, ops loop over the groups instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.reference import torch_gemm
from te_mx.dispatch.grouped_calls import QuantizeGroups
from te_mx.dispatch.groups import BLOCK, col_sums_on_device, inside_groups, scale_rows
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack


def _padded_rows(starts: Tensor, ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(row of every row in a copy where each group starts at a block, whether it is in a group).

    Rows outside go to one row behind the copy.
    """
    group, inside = inside_groups(starts, ends, rows)
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
def quantize(what: QuantizeGroups, starts: Tensor, ends: Tensor) -> Quantized:
    """As te_mx::quantize_grouped, for one group or more, in plain layouts."""
    x = what.x.detach()
    (rows, cols), groups = x.shape, len(ends)
    position, inside = _padded_rows(starts, ends, rows)
    keep = inside.unsqueeze(1)
    row = col = None
    if what.row:
        codes, scales = spec_of(what.row).format.quantize(x, what.rule)
        row = Operand(codes * keep, scales * keep, what.row, rows, cols)
    if what.col:
        fmt, blocks = spec_of(what.col).format, scale_rows(rows, groups)
        padded = _pad(x, position, blocks)
        codes, scales = fmt.quantize(padded.t(), what.rule)
        codes = torch.nn.functional.pad(fmt.unpack(codes, len(padded)).t(), (0, 0, 0, 1))
        col = Operand(codes[position], scales.t().contiguous(), what.col, cols, rows)
    return Quantized(row, col, col_sums_on_device(x, starts, ends) if what.col_sum else None)


@torch.no_grad()
def gemm_rows(
    lhs: Operand, rhs: Stack, starts: Tensor, ends: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out [R, n]: rows of group g are lhs @ rhs_g^T + bias_g, others are 0."""
    group, inside = inside_groups(starts, ends, len(out))
    result = torch.zeros_like(out)
    for g in range(rhs.groups):
        value = torch_gemm.matmul(lhs, rhs.group(g))
        if bias is not None:
            value = value + bias[g].to(torch.float32)
        own = (inside & (group == g)).unsqueeze(1)
        result = torch.where(own, value.to(out.dtype), result)
    out.copy_(result)


@torch.no_grad()
def gemm_k(
    lhs: Operand, rhs: Operand, starts: Tensor, ends: Tensor, out: Tensor, accumulate: bool
) -> None:
    """out [G, m, n] (+)= lhs_g @ rhs_g^T over the k of group g; both lie as "grouped_cols"."""
    rows, groups = lhs.k, len(ends)
    position, _ = _padded_rows(starts, ends, rows)
    blocks = scale_rows(rows, groups)
    firsts = starts // BLOCK + torch.arange(groups, device=ends.device)
    block = torch.arange(blocks, device=ends.device)
    owner = torch.searchsorted(firsts, block, right=True) - 1
    sides = [(side, _pad(side.codes, position, blocks)) for side in (lhs, rhs)]
    for g in range(groups):
        own = (owner == g).unsqueeze(1)
        rows_own = own.repeat_interleave(BLOCK, 0)
        lhs_g, rhs_g = (
            Operand(
                codes * rows_own, side.scales * own, side.spec.replace("@grouped_cols", "@cols"),
                side.rows, len(codes),
            )
            for side, codes in sides
        )  # fmt: skip
        value = torch_gemm.matmul(lhs_g, rhs_g)
        out[g].copy_(value + out[g].to(torch.float32) if accumulate else value)
