"""Products of inputs that are not quantized with what quantized weights stand for.

Shapes as in autograd/linear.py. Codes are decoded for the time of a product and never kept so:
backward decodes them again.

    fprop  y[M, N]  = x[M, K] @ values(w)[N, K]^T + bias
    dgrad  dx[M, K] = g[M, N] @ values(w)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from te_mx._ops import Operand, dequantize_2d


def decoded_linear(x: Tensor, weight: Operand, bias_N: Tensor | None) -> Tensor:
    """x [..., K] @ weight^T + bias in the dtype of x, which holds the values of the codes and of
    the bias; differentiable in x and bias, any number of times."""
    with torch.autocast(x.device.type, enabled=False):
        wanted = x.requires_grad or (bias_N is not None and bias_N.requires_grad)
        if torch.is_grad_enabled() and wanted:
            codes, scales, spec, rows, k, _ = weight
            return _DecodedLinear.apply(x, bias_N, codes, scales, (spec, rows, k))
        return functional.linear(x, dequantize_2d(weight, x.dtype), bias_N)


class _DecodedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias_N: Tensor | None, codes: Tensor, scales: Tensor,
        sizes: tuple[str, int, int],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(codes, scales)
        ctx.sizes, ctx.dtype = sizes, x.dtype
        weight = dequantize_2d(Operand(codes, scales, *sizes), x.dtype)
        return functional.linear(x, weight, bias_N)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dx = db = None
        with torch.autocast(g.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                # The weight is a constant: what autograd makes of this is the second derivative.
                dx = g @ dequantize_2d(Operand(*ctx.saved_tensors, *ctx.sizes), ctx.dtype)
            if ctx.needs_input_grad[1]:
                db = g.flatten(0, -2).sum(0) if g.dim() > 1 else g
        return dx, db, None, None, None
