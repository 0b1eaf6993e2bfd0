"""Checks of the arguments that the constructors of the modules share; each raises before a
parameter is made, and names the module and the argument.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from te_mx.arguments import check_flag, check_size, shown, usable_device

_LARGEST = 1 << 47  # elements: more than a process can address


def sizes(owner: str, /, **given: Any) -> tuple[int, ...]:
    """The sizes of a module as ints.

    Raises:
        TypeError: one is no int.
        ValueError: one is negative, or together they make a weight that no memory holds.
    """
    made = tuple(check_size(f"{owner}: {name}", value) for name, value in given.items())
    if math.prod(size or 1 for size in made) >= _LARGEST:
        what = ", ".join(f"{name}={shown(size)}" for name, size in zip(given, made, strict=True))
        raise ValueError(f"{owner}: {what} make weights that no memory holds, 2^47 elements")
    return made


def flags(owner: str, /, **given: Any) -> None:
    """Raise TypeError unless all are bools."""
    for name, value in given.items():
        if type(value) is not bool:
            check_flag(f"{owner}: {name}", value)


def functions(owner: str, /, **given: Any) -> None:
    """Raise TypeError unless each is None or can be called."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise TypeError(f"{owner}: {name} must be a function or None, got {shown(value)}")


def check_name(owner: str, name: Any) -> None:
    """Raise TypeError unless the name of a layer is a string or None."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{owner}: name must be a string or None, got {shown(name)}")


def parameter_place(
    owner: str, device: Any, dtype: Any, params_dtype: Any
) -> tuple[torch.device | None, torch.dtype | None]:
    """Where parameters are made, and their dtype, which has two names.

    Raises:
        TypeError: what is no device, or no dtype that parameters can have.
        ValueError: a device that is not there, or names that disagree.
    """
    for name, value in (("dtype", dtype), ("params_dtype", params_dtype)):
        if value is not None and not _holds_parameters(value):
            raise TypeError(
                f"{owner}: {name} must be a torch.dtype for parameters, as torch.float32, "
                f"torch.bfloat16 or torch.float16, got {shown(value)}"
            )
    if None not in (dtype, params_dtype) and dtype != params_dtype:
        raise ValueError(
            f"{owner}: dtype={dtype} and params_dtype={params_dtype} disagree; they mean the same, "
            "give one"
        )
    if device is not None:
        device = usable_device(f"{owner}: device", device)
    return device, dtype if params_dtype is None else params_dtype


def _holds_parameters(dtype: Any) -> bool:
    """Whether parameters of a dtype can be initialized: not so 8-bit floats."""
    return (
        isinstance(dtype, torch.dtype)
        and (dtype.is_floating_point or dtype.is_complex)
        and dtype.itemsize > 1
    )
