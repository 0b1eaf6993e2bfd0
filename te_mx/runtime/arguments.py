"""Checks of arguments that public functions share, and how their errors show a value.

What a tensor must be that a call writes its result into."""

import math
from collections.abc import Collection, Iterable
from enum import Enum
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

_SCALARS = (int, float, complex, str, bytes, type(None), type, Enum, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_LONGEST = 60
_PLAIN = Tensor, nn.Parameter


def shown(value: Any) -> str:
    """A value as an error shows it: short, and of a tensor never the elements, for which the host
    would wait for a GPU."""
    if isinstance(value, Tensor):
        # A nested tensor has no shape.
        shape = "nested" if value.is_nested else str(tuple(value.shape))
        return f"tensor {value.dtype} {shape} on {value.device}"
    if type(value) in _CONTAINERS:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        if len(value) > _LONGEST or not all(isinstance(part, _SCALARS) for part in parts):
            return f"{type(value).__name__} of {len(value)}"
    elif not isinstance(value, _SCALARS):
        return f"{type(value).__name__} object"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def is_one_of(value: Any, words: Collection[Any]) -> bool:
    """Whether a value of any type, also of one without a hash, is among strings or None."""
    return (value is None or isinstance(value, str)) and value in words


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse nor nested, which has no shape."""
    return tensor.layout is torch.strided and not tensor.is_nested


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise TypeError for sparse and nested tensors."""
    if not is_dense(tensor):
        kind = "a nested one" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} must be a dense tensor, got {kind}; use {name}.to_dense()")


def check_address(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor whose first element is not at a multiple of its size, as views
    of bytes may be: kernels load whole elements."""
    size = tensor.element_size()
    if size == 1 or type(tensor) not in _PLAIN or torch.compiler.is_compiling():
        return
    try:
        at = tensor.data_ptr()
    except RuntimeError:  # a tensor that stands for others, of torch.func
        return
    if at % size:
        raise ValueError(
            f"{name} must start at a multiple of its {size} bytes an element, got an address of "
            f"{at % size} more; pass {name}.clone()"
        )


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise unless kernels may read the memory of a tensor: `check_dense` and `check_address`."""
    check_dense(name, tensor)
    check_address(name, tensor)


def check_module(model: Any) -> None:
    """Raise TypeError unless what a function is to work on is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {shown(model)}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a bool."""
    if type(value) is not bool:
        raise TypeError(f"{name} must be a bool, got {shown(value)}")


def check_size(name: str, value: Any, least: int = 0) -> int:
    """A size as an int. Raises TypeError for what is no integer, ValueError below `least`."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Integral):  # numpy's count
            raise TypeError(f"{name} must be an int, got {shown(value)}")
        value = int(value)
    if value < least:
        raise ValueError(f"{name} must be {least} or more, got {shown(value)}")
    if value >= 1 << 63:
        raise ValueError(f"{name} must be less than 2^63, got {shown(value)}")
    return value


def check_number(name: str, value: Any, least: float | None = None) -> float:
    """A finite number as a float. Raises TypeError for what is none, ValueError for NaN, infinities
    and what is below `least`."""
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's count
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {shown(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be {least:g} or more, got {value}")
    return float(value)


def check_word(name: str, value: Any, words: Collection[str]) -> None:
    """Raise TypeError for what is no string, ValueError for one that is not among the words."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")
    check_one_of(name, value, words)


def check_one_of(name: str, value: Any, words: Collection[Any]) -> None:
    """Raise ValueError for whatever is not among the words, strings or None."""
    if not is_one_of(value, words):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {shown(value)}")


def check_place(name: str, tensor: Tensor, device: torch.device, of: str = "inp") -> None:
    """Raise ValueError unless a tensor is on a device, that of another one."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and {of} on {device}; move one")


def check_default(name: str, value: Any, default: Any, reason: str) -> None:
    """Raise NotImplementedError where an argument of another library that te_mx does not have is
    not at its default."""
    if value is not default and not (type(value) is type(default) and value == default):
        raise NotImplementedError(
            f"{name}={shown(value)} is not supported: {reason}; leave it at {default!r}"
        )


def as_device(name: str, value: Any) -> torch.device:
    """torch.device of what names one. Raises TypeError or ValueError for what does not."""
    if isinstance(value, torch.device):
        return value
    expected = f'{name} must be a device such as "cpu" or "cuda:0", got {shown(value)}'
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise TypeError(expected)
    try:
        return torch.device(value)
    except (RuntimeError, ValueError) as error:
        raise ValueError(expected) from error


def usable_device(name: str, value: Any) -> torch.device:
    """As `as_device`, of one that tensors can be made on."""
    device = as_device(name, value)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        said = str(error).partition("\n")[0]
        raise ValueError(f"{name} must be a device that is there, got {device}: {said}") from error
    return device


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
    return (f"the codes of {name}", side.codes), (f"the scales of {name}", side.scales)


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
