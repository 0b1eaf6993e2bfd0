"""Sums over k of an operand's values, the bias gradient of one that is multiplied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from te_mx.backends.base import Operand, pointer
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.layouts import tiles as sm90_layout


def operand_sums(operand: Operand, scratch: Callable[[int], Tensor | None]) -> Tensor:
    """fp32 [rows]: the sum over k of an operand's values, in an order that only sizes decide."""
    rows, k, k_first = operand.rows, operand.k, operand.order == "k_first"
    fp4 = operand.fmt == "e2m1"
    if operand.order == "sm90":
        fmt = "mxfp4" if fp4 else operand.fmt
        return sm90_layout.packed_values(operand, k, fmt).sum(1).to(torch.float32)
    if fp4:
        values = binding.dequantize(operand, torch.float32)
        assert values is not None
        return values.sum(0 if k_first else 1)
    sums = torch.empty(rows, dtype=torch.float32, device=operand.codes.device)
    native = binding.native()
    assert native is not None
    nbytes = native.row_sums_workspace_bytes(rows, k, k_first)
    args = native.RowSumsArgs()
    args.operand, args.out = binding.plain_operand(operand), sums.data_ptr()
    args.workspace, args.workspace_bytes = pointer(scratch(nbytes) if nbytes else None), nbytes
    binding.set_execution(args, operand.codes.device.index)
    status = native.row_sums(args)
    if not binding.supported(status):
        raise RuntimeError("te_mx internal error: the Hopper kernels do not sum this operand")
    return sums
