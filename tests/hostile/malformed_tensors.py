"""What can be wrong with tensors, indices and state_dicts, by kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from malformed import Bad, Kind, changed, other_than, values
from torch import Tensor, nn


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
    on_the_cpu=lambda x: plain(x).cpu(),  # whatever the device of the others
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
        float8=lambda x: plain(x).float().to(torch.float8_e5m2),
        dimension_more=lambda x: plain(x).unsqueeze(0),
    )
)  # fmt: skip


def _entry(key: str, bad: Bad) -> Callable[[Any, Any], Any]:
    def make(state: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {**state, key: bad.make(state[key], arguments)}

    return make
