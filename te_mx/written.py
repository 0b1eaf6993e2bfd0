"""What a tensor must be that a call writes its result into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def check_written(out: Tensor, name: str, read: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise unless a contiguous `out` may be written in place by a call that is not
    differentiable and reads these tensors, by name.

    Raises:
        RuntimeError: autograd records, and would not know of the change.
        ValueError: out is a negative view, or shares memory with a tensor that is read.
    """
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} requires grad, but gradients do not flow through this function; pass "
            f"{name}.detach(), or call it under torch.no_grad()"
        )
    if torch.compiler.is_compiling():  # the op sees real tensors
        return
    if out.is_neg():
        raise ValueError(f"{name} is a negative view; pass {name}.resolve_neg()")
    check_apart(out, name, read)


def parts_of(name: str, side: Any) -> tuple[tuple[str, Tensor], ...]:
    """What is read of a tensor, or of an operand its codes and scales, by name."""
    if isinstance(side, Tensor):
        return ((name, side),)
    return (name, side.codes), (f"the scales of {name}", side.scales)


def check_apart(out: Tensor, name: str, read: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise ValueError if a contiguous `out` shares memory with a tensor that is read."""
    if out.is_meta or not out.numel():
        return
    start = out.data_ptr()
    end = start + out.numel() * out.element_size()
    for other, tensor in read:
        if tensor is None or not tensor.numel():
            continue
        first = tensor.data_ptr()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = first + (sum((size - 1) * step for size, step in steps) + 1) * tensor.element_size()
        if first < end and start < last:
            raise ValueError(f"{name} and {other} share memory; pass another {name}")
