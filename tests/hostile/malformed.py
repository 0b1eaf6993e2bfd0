"""What can be wrong with an argument, by the kind of argument.

A `Bad` makes a malformed value of the valid one. The call has to be refused, unless `means` says
which value it stands for: then the call may also give what it gives with that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import isfunction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Bad(NamedTuple):
    """One malformation. make(value, arguments of the call) -> malformed value; means(value) -> the
    value that it stands for."""

    label: str
    make: Callable[[Any, Mapping[str, Any]], Any]
    means: Callable[[Any], Any] | None = None


class Kind(NamedTuple):
    """All malformations of a kind of argument."""

    bads: tuple[Bad, ...]

    def __or__(self, other: Kind) -> Kind:  # type: ignore[override]
        return Kind(self.bads + other.bads)

    def but(self, *labels: str) -> Kind:
        """Without these: they are legal here."""
        unknown = set(labels) - {bad.label for bad in self.bads}
        assert not unknown, f"no such malformation: {unknown}"
        return Kind(tuple(bad for bad in self.bads if bad.label not in labels))


def values(**made: Any) -> Kind:
    """Values that must be refused. Functions make them, anew for each call."""

    def maker(value: Any) -> Callable[[Any, Any], Any]:
        return lambda _value, _arguments: value() if isfunction(value) else value

    return Kind(
        tuple(Bad(label.replace("_", " ").strip(), maker(value)) for label, value in made.items())
    )


def changed(means: Callable[[Any], Any] | None = None, /, **made: Callable[[Any], Any]) -> Kind:
    """What functions make of the valid value; it stands for what `means` makes of that."""

    def maker(change: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda value, _arguments: change(value)

    return Kind(
        tuple(
            Bad(label.replace("_", " ").strip(), maker(change), means)
            for label, change in made.items()
        )
    )


class UsersError(Exception):
    """Raised by a function that te_mx was given: it passes through."""


def refuser(*_args: Any, **_kwargs: Any) -> Any:
    raise UsersError


def raiser(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("a value of a wrong type was called")


ANYTHING = values(
    None_=None, a_bool=True, an_int=3, a_float=2.5, NaN=math.nan, a_string="x",
    a_list=lambda: ["x"], a_dict=lambda: {"x": 1}, a_tensor=lambda: torch.full((2,), 0.5),
    an_array=lambda: np.full(2, 0.5), a_function=lambda: raiser,
)  # fmt: skip


def other_than(*labels: str) -> Kind:
    """Values of every type but these."""
    return ANYTHING.but(*labels)


# ---------------------------------------------------------------------------------- plain arguments
FLAG = other_than("a bool") | values(zero=0, one=1)
OPTIONAL_FLAG = FLAG.but("None")
COUNT = other_than("an int") | values(
    negative=-1, infinity=math.inf, huge=2**62, beyond_64_bits=2**70, one_tensor=lambda: _one()
)
NUMBER = other_than("an int", "a float") | values(negative=-1e-5, infinity=math.inf)
WORD = other_than("a string") | values(unknown_word="nonsense", empty_word="", a_tuple=lambda: ())
OPTIONAL_WORD = WORD.but("None")
UPPER_CASE = changed(upper_case=lambda word: str(word).swapcase())
TEXT = other_than("a string", "None")
FUNCTION = other_than("a function")
OPTIONAL_FUNCTION = FUNCTION.but("None") | values(that_raises=lambda: refuser)
DTYPE = other_than() | values(
    its_name="float32", int32=torch.int32, bool_=torch.bool, float8=torch.float8_e4m3fn,
    a_device=lambda: torch.device("cpu"), numpys=np.float32,
)  # fmt: skip
OPTIONAL_DTYPE = DTYPE.but("None")
DEVICE = other_than("None", "an int") | values(
    unknown_type="nonsense", no_such_index="cuda:99", a_dtype=torch.float32, negative=-5
)
RECIPE = other_than("None") | values(
    its_class=lambda: _recipe_class(), its_settings=lambda: _recipe_class()().settings,
    a_format=lambda: next(iter(_formats())),
)  # fmt: skip
MODULE = other_than() | values(
    its_class=lambda: nn.Linear, a_state_dict=lambda: nn.Linear(2, 2).state_dict(),
    a_list_of_modules=lambda: [nn.Linear(2, 2)],
)  # fmt: skip


def _one() -> Tensor:
    return torch.ones(1, dtype=torch.int64)


def _recipe_class() -> Any:
    from te_mx.recipe import MXFP8BlockScaling

    return MXFP8BlockScaling


def _formats() -> Any:
    from te_mx.recipe import Format

    return Format
