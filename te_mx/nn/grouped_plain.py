"""Grouped linear layers in high precision: what a GroupedLinear is outside of te_mx.autocast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from te_mx.autograd import joining
from te_mx.autograd.grouped_operands import Groups
from te_mx.dispatch.groups import device_bounds, host_bounds, readable

_ALIGNED = 8  # torch._grouped_mm takes rows of whole 16 bytes


def grouped_plain(
    x_RK: Tensor, groups: Groups, weights: Sequence[Tensor] | Tensor, biases: Sequence[Tensor]
) -> Tensor:
    """F.linear on the rows of every group, zeros on rows of no group; [R, N]. weights [N, K] of
    every group, or one tensor [G, N, K]. No bias: [].

    A loop over the groups where the host knows them. Elsewhere torch._grouped_mm in bf16, or every
    group on all rows: slower, but nothing waits for the device.
    """
    offs, capacity = groups
    each = list(biases) if biases else [None] * len(weights)
    if not readable(offs):
        starts, ends = device_bounds(offs, capacity, x_RK.shape[0])
        row = torch.arange(x_RK.shape[0], device=x_RK.device).unsqueeze(1)
        if _has_grouped_mm(x_RK, weights[0], capacity):
            return _grouped_mm(x_RK, ends, row, weights, biases)
        total: Tensor | None = None
        for start, end, weight, bias in zip(starts, ends, weights, each, strict=True):
            own = (row >= start) & (row < end)
            # Zeros instead of what lies outside, so that NaN there reaches no gradient.
            part = F.linear(torch.where(own, x_RK, 0), weight, bias)
            part = torch.where(own, part, 0)
            total = part if total is None else total + part
        assert total is not None
        return total
    parts, at = [], 0
    bounds = host_bounds(offs, capacity, x_RK.shape[0])
    for start, end, weight, bias in zip(*bounds, weights, each, strict=True):
        part = F.linear(x_RK[start:end], weight, bias)
        if start > at:
            parts.append(part.new_zeros(start - at, part.shape[1]))
        parts.append(part)
        at = end
    if at < x_RK.shape[0]:
        parts.append(parts[-1].new_zeros(x_RK.shape[0] - at, parts[-1].shape[1]))
    return torch.cat(parts)


def _has_grouped_mm(x: Tensor, weight: Tensor, capacity: int) -> bool:
    """Whether torch._grouped_mm takes the problem: bf16 on CUDA, rows of whole 16 bytes."""
    if not (x.is_cuda and hasattr(torch, "_grouped_mm")) or capacity:
        return False
    autocast = torch.is_autocast_enabled("cuda")
    dtypes = {torch.get_autocast_dtype("cuda")} if autocast else {x.dtype, weight.dtype}
    return dtypes == {torch.bfloat16} and all(size % _ALIGNED == 0 for size in weight.shape)


def _grouped_mm(
    x: Tensor,
    ends: Tensor,
    row: Tensor,
    weights: Sequence[Tensor] | Tensor,
    biases: Sequence[Tensor],
) -> Tensor:
    if isinstance(weights, Tensor):
        stacked = weights.to(torch.bfloat16)
    else:
        stacked = torch.stack([w.to(torch.bfloat16) for w in weights])
    inside, offs = row < ends[-1], ends.int()
    x = torch.where(inside, x.to(torch.bfloat16), 0)
    out = torch._grouped_mm(x, stacked.transpose(-2, -1), offs=offs)
    if biases:
        # The product of a column of ones and a row of biases (and as many zeros as 16 bytes take),
        # because its gradient sums over the tokens in fp32; that of an index would sum in bf16.
        rows_G1N = joining.stack(biases).to(torch.bfloat16).unsqueeze(1)
        rows_G8N = F.pad(rows_G1N, (0, 0, 0, _ALIGNED - 1))
        out = out + torch._grouped_mm(x.new_ones(x.shape[0], _ALIGNED), rows_G8N, offs=offs)
    return torch.where(inside, out, 0)
