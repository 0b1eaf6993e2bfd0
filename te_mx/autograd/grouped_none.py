"""A grouped layer of no groups: what a rank runs that has none of the experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.autograd.wgrad import WeightGradient, Wgrad


class NoGroups(torch.autograd.Function):
    """Zeros [..., N] of x [..., K], a weight [0, N, K] and a bias [0, N] or None. All of them get
    the gradients of their shapes, so that whoever looks at gradients finds the same ones on all
    ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype,
        sink: WeightGradient | None,
    ) -> Tensor:  # fmt: skip
        like = [(x.shape, x.dtype), (weight.shape, weight.dtype)]
        ctx.like = [*like, None if bias is None else (bias.shape, bias.dtype)]
        ctx.sink = sink
        return x.new_zeros((*x.shape[:-1], weight.shape[1]), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        made: list[Tensor | None] = [
            grad.new_zeros(like[0], dtype=like[1]) if like is not None and needed else None
            for like, needed in zip(ctx.like, ctx.needs_input_grad, strict=False)
        ]
        if ctx.sink is not None and ctx.needs_input_grad[1]:
            shape, dtype = ctx.like[1]

            def run(out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
                return grad.new_zeros(shape, dtype=dtype) if out is None else out

            made[1] = ctx.sink.take(Wgrad(run, ()), dtype)
        return (*made, None, None)
