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
OPTIONAL_FUNCTION = FUNCTION.but("None")
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


# ------------------------------------------------------------------------------------------ tensors
def negated(x: Tensor) -> Tensor:
    """x as a view whose elements are negated when they are read."""
    return torch._neg_view(-x.detach())


def plain(x: Tensor) -> Tensor:
    """x with memory of its own and strides of its shape."""
    return x.detach().resolve_neg().resolve_conj().clone(memory_format=torch.contiguous_format)


def every_second(x: Tensor) -> Tensor:
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x.detach()
    return wide[..., ::2]


def stored_transposed(x: Tensor) -> Tensor:
    turned = x.detach().movedim(-1, 0).contiguous()
    return turned.movedim(0, -1)


def one_row(x: Tensor) -> Tensor:
    """Every row is the first one: stride 0."""
    return x.detach()[:1].expand(x.shape)


def windows(x: Tensor) -> Tensor:
    """Rows that overlap in memory."""
    line = x.detach().flatten()
    return line.as_strided(x.shape, (1,) * x.dim())


def offset(x: Tensor) -> Tensor:
    """Memory that is aligned to its elements and to nothing more."""
    line = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    line[1:] = x.detach().flatten()
    return line[1:].view(x.shape)


class Subclass(Tensor):
    """A tensor class that te_mx does not know."""


# How a tensor may lie in memory, with the same values as the plain one.
STRIDES = changed(
    plain,
    negative_view=negated,
    every_second_column=every_second,
    stored_transposed=stored_transposed,
    offset_by_one=offset,
    a_subclass=lambda x: plain(x).as_subclass(Subclass),
    a_parameter=lambda x: nn.Parameter(plain(x), requires_grad=False),
)
SHARED_ROWS = Kind(
    (
        Bad("one row expanded", lambda x, _: one_row(x), lambda x: plain(one_row(x))),
        Bad("overlapping rows", lambda x, _: windows(x), lambda x: plain(windows(x))),
    )
)
LAYOUTS = changed(
    sparse=lambda x: plain(x).float().to_sparse(),
    nested=lambda x: torch.nested.nested_tensor([plain(x).float()]),
)
META = changed(meta=lambda x: x.detach().to("meta"))
NOT_FLOATS = changed(
    int32=lambda x: plain(x).int(),
    int8=lambda x: plain(x).to(torch.int8),
    bool_=lambda x: plain(x).bool(),
    complex64=lambda x: plain(x).to(torch.complex64),
    float64=lambda x: plain(x).double(),
    float8=lambda x: plain(x).to(torch.float8_e4m3fn),
    float8_e8m0=lambda x: plain(x).float().abs().to(torch.float8_e8m0fnu),
)
NO_TENSOR = other_than("a tensor")
SCALAR = changed(scalar=lambda x: plain(x).flatten()[0])
COLUMNS = changed(
    column_less=lambda x: plain(x)[..., :-1],
    column_more=lambda x: torch.cat([plain(x), plain(x)[..., :1]], -1),
    no_columns=lambda x: plain(x)[..., :0],
)
ROWS = changed(
    row_less=lambda x: plain(x)[:-1],
    row_more=lambda x: torch.cat([plain(x), plain(x)[:1]]),
    no_rows=lambda x: plain(x)[:0],
)
DIMENSIONS = changed(
    dimension_more=lambda x: plain(x).unsqueeze(0), dimension_less=lambda x: plain(x).flatten()
)
# More bytes than an address has: nothing of this size can be allocated.
ENDLESS = Kind((Bad("endless", lambda x, _: x.detach()[:1].expand(2**50, *x.shape[1:])),))

# A matrix of any number of rows, one of a given shape, a parameter of a module.
INPUT = NO_TENSOR | META | NOT_FLOATS | LAYOUTS | SCALAR | COLUMNS | ENDLESS | STRIDES | SHARED_ROWS
SHAPED = (
    NO_TENSOR | META | NOT_FLOATS | LAYOUTS | SCALAR | COLUMNS | ROWS | DIMENSIONS | STRIDES
    | SHARED_ROWS
)  # fmt: skip
VECTOR = (
    NO_TENSOR | META | NOT_FLOATS | SCALAR | COLUMNS | STRIDES
    | changed(dimension_more=lambda x: plain(x).unsqueeze(0))
).but("stored transposed")  # fmt: skip
PARAMETER = (META | NOT_FLOATS | SCALAR | COLUMNS | ROWS | DIMENSIONS | STRIDES | SHARED_ROWS).but(
    "a subclass", "int32", "int8", "bool"
)
VECTOR_PARAMETER = (
    META | NOT_FLOATS | SCALAR | COLUMNS | STRIDES | SHARED_ROWS
    | changed(dimension_more=lambda x: plain(x).unsqueeze(0))
).but("a subclass", "int32", "int8", "bool", "stored transposed")  # fmt: skip


def _onto(name: str) -> Bad:
    """In an MXTensor it is the rowwise copy."""

    def make(out: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        memory = arguments[name]
        memory = getattr(memory, "rowwise_data", memory)
        line = memory.detach().contiguous().view(torch.uint8).flatten()
        if line.data_ptr() != memory.data_ptr():
            raise AssertionError(f"{name} of the valid call has to be contiguous")
        return line[: out.numel() * out.element_size()].view(out.dtype).view(out.shape)

    return Bad(f"in the memory of {name}", make)


def output(*others: str) -> Kind:
    """A tensor that is written in place, which must not lie in the memory of these arguments."""
    strides = changed(
        negative_view=negated, every_second_column=every_second, one_row_expanded=one_row,
        overlapping_rows=windows, stored_transposed=stored_transposed,
        that_requires_grad=lambda x: plain(x).requires_grad_(),
    )  # fmt: skip
    wrong = NO_TENSOR | META | NOT_FLOATS | LAYOUTS | SCALAR | COLUMNS | ROWS | DIMENSIONS
    return (wrong | strides | Kind(tuple(_onto(name) for name in others))).but("None")


# -------------------------------------------------------------------------- indices and state_dicts
SPLITS = (
    other_than("a tensor", "an array")
    | values(
        floats=lambda: [10.0, 14.0],
        fractions=lambda: [1.5, 2.5],
        NaNs=lambda: [math.nan, math.nan],
        strings=lambda: ["10", "14"],
        Nones=lambda: [None, None],
        bools=lambda: [True, False],
        one_split_less=lambda: [24],
        one_split_more=lambda: [10, 10, 4],
        no_splits=lambda: [],
        negative_split=lambda: [-1, 25],
        more_than_the_rows=lambda: [10, 15],
        huge_splits=lambda: [2**63, 2**63],
        nested_lists=lambda: [[10], [14]],
        a_dict_of_splits=lambda: {10: 0, 14: 1},
        a_float_array=lambda: np.array([10.0, 14.0]),
        a_matrix=lambda: torch.tensor([[10, 14]]),
        a_scalar_tensor=lambda: torch.tensor(24),
        a_float_tensor=lambda: torch.tensor([10.0, 14.0]),
        a_bool_tensor=lambda: torch.tensor([True, False]),
        a_negative_tensor=lambda: torch.tensor([-1, 25]),
        a_tensor_over_the_rows=lambda: torch.tensor([10, 15]),
        an_overflowing_tensor=lambda: torch.tensor([2**62, 2**62]),
        a_meta_tensor=lambda: torch.tensor([10, 14], device="meta"),
    )
    | changed(
        list,
        a_tuple=tuple,
        a_generator=lambda splits: (split for split in splits),
        an_int_array=np.array,
        a_tensor_of_every_second=lambda splits: torch.tensor([[s, -1] for s in splits])[:, 0],
    )
)
INDEX = (
    other_than("a tensor")
    | changed(
        a_list_of_ints=lambda x: x.tolist(), floats=lambda x: x.float(), bools=lambda x: x.bool(),
        int8=lambda x: x.to(torch.int8), int16=lambda x: x.short(),
        one_less=lambda x: x[:-1], one_more=lambda x: torch.cat([x, x[-1:]]),
        a_matrix=lambda x: x[None], a_scalar=lambda x: x[0], none_at_all=lambda x: x[:0],
        meta=lambda x: x.to("meta"), beyond_the_end=lambda x: x + 10**6,
        beyond_64_bits=lambda x: x + (2**62 - 1) * 2, a_sparse_one=lambda x: x.to_sparse(),
    )
    | changed(
        lambda x: x,
        every_second=lambda x: torch.stack([x, -x], 1)[:, 0],
        negative_view=negated,
        int32=lambda x: x.int(),
    )
)  # fmt: skip
OFFSETS = INDEX | changed(negative=lambda x: x - 10**6, falling=lambda x: x.flip(0).contiguous())


def state_dict_of(*keys: str) -> Kind:
    """A state_dict with one of these entries malformed."""
    return Kind(
        tuple(
            Bad(f"{bad.label} as {key}", _entry(key, bad), None)
            for key in keys
            for bad in _ENTRIES.bads
        )
    ) | values(
        None_=None, a_list=lambda: ["weight"], a_tensor=lambda: torch.ones(2), a_string="x",
        with_a_key_too_many=lambda: {"nonsense": torch.ones(2)}, empty=lambda: {},
    )  # fmt: skip


_ENTRIES = (
    NO_TENSOR | SCALAR | COLUMNS | ROWS | LAYOUTS
    | changed(
        float8=lambda x: plain(x).to(torch.float8_e4m3fn),
        dimension_more=lambda x: plain(x).unsqueeze(0),
    )
)  # fmt: skip


def _entry(key: str, bad: Bad) -> Callable[[Any, Any], Any]:
    def make(state: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {**state, key: bad.make(state[key], arguments)}

    return make
