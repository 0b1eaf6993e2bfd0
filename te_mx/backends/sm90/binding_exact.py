"""The exact GEMM on Hopper: both operands upcast to bf16 in a memory-bound pass, then cuBLAS.

bf16 holds every code times its scale exactly inside bf16's own range (2^-133 to 2^128).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from te_mx.backends.base import Epilogue, Operand
from te_mx.backends.reference import torch_gemm as reference
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90 import binding as sm90

_F32 = torch.float32
_LARGE = 1 << 23  # elements of a result that fills the GPU without splitting k


def workspace_bytes(a: Operand, b: Operand) -> int:
    """Scratch bytes of `gemm`: both operands in bf16."""
    return 2 * sum((operand.rows * operand.k + 127) // 128 * 128 for operand in (a, b))


def gemm(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None,
    scratch: Callable[[int], Tensor | None],
) -> Tensor | None:  # fmt: skip
    """out = epilogue(b @ a^T) by cuBLAS on bf16 values in a workspace; operands of any order,
    without transposing. Returns the bias gradient or None. Sizes are 1 or more.
    """
    workspace = scratch(workspace_bytes(a, b))
    assert workspace is not None
    values = []
    offset = 0
    for operand in (b, a):
        count = operand.rows * operand.k
        room = workspace[offset : offset + 2 * count].view(torch.bfloat16)
        room = room.view(sm90.values_shape(operand))
        offset += 2 * ((count + 127) // 128 * 128)
        if sm90.dequantize(operand, torch.bfloat16, room) is None:
            raise RuntimeError(
                "te_mx internal error: the Hopper kernels do not upcast this operand"
            )
        values.append(room if operand.order == "k_last" else room.t())
    left, right = values[0], values[1].t()
    bias = epilogue.bias
    if epilogue._replace(bias=None) == Epilogue():
        if bias is None and out.dtype == _F32:
            torch.mm(left, right, out_dtype=_F32, out=out)
            return None
        # NOTE: for small results cuBLAS may split k and add the parts in bf16.
        if out.dtype == torch.bfloat16 and out.numel() >= _LARGE:
            if bias is None:
                torch.mm(left, right, out=out)
                return None
            if bias.dtype == torch.bfloat16:
                torch.addmm(bias, left, right, out=out)
                return None
    sums = torch.mm(left, right, out_dtype=_F32)
    bias_grad = binding.operand_sums(b, scratch) if epilogue.bias_grad == "operand" else None
    return reference.finish(sums, bias_grad, epilogue, out, aux)
