"""te_mx.grouped_gemm of tokens that are not quantized: as mixed_gemm.py, for every group."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx import mixed_gemm
from te_mx._ops import Stack, dequantize_2d
from te_mx.arguments import check_memory
from te_mx.dispatch.calls import Epilogue
from te_mx.dispatch.grouped_calls import Groups
from te_mx.dispatch.groups import host_bounds, readable
from te_mx.nn.grouped_plain import grouped_plain

DTYPES = mixed_gemm.DTYPES


def check(inp: Tensor, weight: Stack, owner: str) -> Tensor:
    """Tokens as they are read. Raises ValueError or TypeError for what does not fit."""
    check_memory(f"{owner}: inp", inp)
    mixed_gemm.check_untransformed(f"{owner}: weight", weight.spec)
    return inp.detach().resolve_neg()


def run(
    x_RK: Tensor, groups: Groups, weight: Stack, bias_GN: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """[R, N]: x [K] of the rows of every group times the values of its weight, + bias; rows of no
    group are 0.

    Where the host knows the groups, each has the bits of te_mx.gemm. Elsewhere all weights are
    decoded at once, to bf16 where all dtypes are that.
    """
    offs, capacity = groups
    if readable(offs):
        rows = x_RK.shape[0]
        out = x_RK.new_zeros((rows, weight.rows), dtype=out_dtype)
        for g, (start, end) in enumerate(zip(*host_bounds(offs, capacity, rows), strict=True)):
            if end > start:
                sides = mixed_gemm.Sides(x_RK[start:end], weight.group(g))
                bias = None if bias_GN is None else bias_GN[g]
                made = mixed_gemm.run(sides, Epilogue(bias=bias), None, out_dtype, None)
                out[start:end] = made.out
        return out
    dtypes = {x_RK.dtype, out_dtype, weight.group(0).format.exact_dtype}
    if bias_GN is not None:
        dtypes.add(bias_GN.dtype)
    dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
    values = torch.stack([dequantize_2d(weight.group(g), dtype) for g in range(weight.groups)])
    biases = () if bias_GN is None else bias_GN.to(dtype).unbind(0)
    with torch.autocast(x_RK.device.type, enabled=False):
        return grouped_plain(x_RK.to(dtype), groups, values, biases).to(out_dtype)
