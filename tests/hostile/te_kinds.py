"""Kinds of arguments of te_mx.pytorch, and what its tables share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from judge import Call
from malformed import COUNT, Kind, changed, other_than, values
from malformed_tensors import COLUMNS, DIMENSIONS, LAYOUTS, META, NO_TENSOR, SCALAR, plain

HEADS, WIDTH, S, B, T, E = 4, 8, 6, 2, 8, 4
HIDDEN = HEADS * WIDTH
# --------------------------------------------------------------------------------- kinds of values
PROBABILITY = other_than("an int", "a float").but("None") | values(
    None_=None, negative=-0.1, one=1, two=2, infinity=float("inf")
)  # fmt: skip
OPTIONAL_COUNT = COUNT.but("None") | values(zero=0)
HINT = OPTIONAL_COUNT.but("huge")
WINDOW = other_than("None") | values(
    one=(1,), three=(1, 2, 3), below=(-2, 0), floats=(1.0, 2.0), bools=(True, False),
    huge=(2**70, 0),
)  # fmt: skip
# For what another table has all malformations of.
PASSED = values(an_object=lambda: object())
NOT_FLOATS = changed(
    int32=lambda x: plain(x).int(), bool_=lambda x: plain(x).bool(),
    complex64=lambda x: plain(x).to(torch.complex64),
    float8=lambda x: plain(x).float().to(torch.float8_e4m3fn),
)  # fmt: skip
# Without strides: torch multiplies transposed operands in another order.
HEADS_OF = NO_TENSOR | META | LAYOUTS | SCALAR | COLUMNS | DIMENSIONS | NOT_FLOATS
MASK = (NO_TENSOR | META | SCALAR | COLUMNS | DIMENSIONS).but("a list", "a dict") | changed(
    floats=lambda x: plain(x).float(), ints=lambda x: plain(x).int(),
    a_pair_and_one=lambda x: (x, x, x),
)  # fmt: skip
STEPS = NO_TENSOR.but("None") | changed(
    floats=lambda x: x.float(), a_matrix=lambda x: x[None], none_at_all=lambda x: x[:0],
    bools=lambda x: x.bool(), one_less=lambda x: x[:-1], meta=lambda x: x.to("meta"),
)  # fmt: skip


def call(
    name: str, function: Callable[..., Any], arguments: Callable[[str], dict[str, Any]],
    kinds: Mapping[str, Kind], **rest: Any,
) -> Call:  # fmt: skip
    return Call(f"te_mx.pytorch.{name}", lambda d: function, arguments, kinds, **rest)
