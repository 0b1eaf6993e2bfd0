"""Functions that misbehave, as a table: what test_judge.py expects to be noticed."""

from __future__ import annotations

import os
from typing import Any

import torch
from judge import Call
from malformed import changed, values
from torch import Tensor


def right(x: Any) -> Any:
    if x is not True:
        raise ValueError("x must be True, got something else")
    return x


def kills(x: Any) -> Any:
    return x if x is True else os.abort()


def silent(x: Any) -> Any:
    return x


def key_error(x: Any) -> Any:
    return {True: x}[x]


def attribute_error(x: Any) -> Any:
    return x if x is True else x.shape


def torchs_error(x: Any) -> Any:
    return x if x is True else torch.empty(x)


def nameless(x: Any) -> Any:
    if x is not True:
        raise TypeError("that is wrong")
    return x


def prints(x: Any) -> Any:
    if x is not True:
        raise TypeError(f"x must be True, got {torch.ones(2)!r}")
    return x


def doubles(x: Tensor) -> Tensor:
    return 2 * x


def forgets_signs(x: Tensor) -> Tensor:
    return 2 * (x if not x.is_neg() else x._neg_view())


def writes_first(x: Tensor) -> Tensor:
    x.zero_()
    if x.dim() != 2:
        raise ValueError("x must have two dimensions, got others")
    return x


REFUSED = {"x": values(None_=None)}
FLAT = {"x": changed(None, flat=lambda x: x.flatten())}
NEGATED = {"x": changed(lambda x: x, negated=lambda x: torch._neg_view(-x))}


def _flag(device: str) -> dict[str, Any]:
    return {"x": True}


def _matrix(device: str) -> dict[str, Any]:
    return {"x": torch.ones(2, 3, device=device)}


CALLS = (
    *(
        Call(function.__name__, lambda d, f=function: f, _flag, REFUSED)
        for function in (
            right, kills, silent, key_error, attribute_error, torchs_error, nameless, prints
        )
    ),
    Call("doubles", lambda d: doubles, _matrix, NEGATED),
    Call("forgets_signs", lambda d: forgets_signs, _matrix, NEGATED),
    Call("writes_first", lambda d: writes_first, _matrix, FLAT),
)  # fmt: skip
