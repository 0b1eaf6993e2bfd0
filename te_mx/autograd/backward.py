"""What the backward passes of all module families share: saved operands, tags, the place of a
weight gradient, and the refusal of a second derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_mx.autograd.wgrad import WeightGradient, Wgrad
from te_mx.ops import Operand, dequantize_2d


def run_backward(
    backward: Callable[..., tuple[Tensor | None, ...]], owner: str, ctx: Any, *grads: Tensor
) -> tuple[Tensor | None, ...]:
    """backward(ctx, *grads). Under create_graph=True its gradients are right, but theirs must not
    be silently zero: they get a grad_fn that raises, so that only a real double backward is an
    error.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return backward(ctx, *grads)
    with torch.no_grad():
        made = backward(ctx, *grads)
    message = (
        f"{owner}: trying to differentiate twice through an MXFP8 linear layer, which has no "
        "second derivative (its backward quantizes the gradient). Run the layers that need a "
        "double backward in high precision: `with te_mx.autocast(enabled=False):` around their "
        "forward"
    )
    real = [g.detach().requires_grad_() for g in made if g is not None]
    functions: Any = torch._C._functions
    refusing = functions.DelayedError(message, len(real))(*real)
    wrapped = iter([refusing] if isinstance(refusing, Tensor) else refusing)
    return tuple(None if g is None else next(wrapped) for g in made)


def tag_of(first: int, gemm: int) -> int:
    """The slot of a GEMM in LAST_RUN; -1 where nothing is recorded."""
    return first + gemm if first >= 0 else -1


def place(sink: WeightGradient | None, wgrad: Wgrad, dtype: torch.dtype) -> Tensor | None:
    """Run the wgrad GEMM, or let its sink decide when and where to."""
    return wgrad(None, dtype, False) if sink is None else sink.take(wgrad, dtype)


def tensors_of(operand: Operand) -> tuple[Tensor, Tensor, Tensor | None]:
    """What save_for_backward keeps of an operand; its order is kept beside."""
    return operand.codes, operand.scales, operand.packed


def operand_of(tensors: tuple[Tensor, ...], fmt: str, order: str) -> Operand:
    """The operand that was saved."""
    return Operand(tensors[0], tensors[1], fmt, order, tensors[2])


def values_of(
    tensors: tuple[Tensor, ...], fmt: str, order: str | None, dtype: torch.dtype
) -> Tensor:
    """The tensor that was saved (order None), or what the saved codes decode to."""
    if order is None:
        return tensors[0]
    return dequantize_2d(tensors[0], tensors[1], fmt, order, dtype)
