"""Normalizations outside of MXFP8: torch's own functions, in fp32 where torch's would add up the
gradients of 16-bit parameters in 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

NARROW = torch.bfloat16, torch.float16


def sums_in_fp32(x: Tensor) -> bool:
    """Whether `layer_norm` computes in fp32 what torch would add up in 16 bits."""
    return x.device.type == "cpu" and x.dtype in NARROW


def layer_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm over the last dimensions `shape`; of x's dtype or, on CPUs, in fp32 for a 16-bit x.

    There torch adds up the gradients of weight and bias, one number for every row, in the dtype of
    x: of 8,192 ones in bf16 that makes 256. Here x, weight and bias are fp32 inside, and each
    gradient is rounded once, to the dtype of what it belongs to.
    """
    if sums_in_fp32(x):
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    return F.layer_norm(x, shape, weight, bias, eps)
