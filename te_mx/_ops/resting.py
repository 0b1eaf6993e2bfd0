"""te_mx::plain_rows: a weight that stands still lies once, in the layout of which one copy serves
every kernel of its device (`at_rest`); `plain` gives back the rowwise codes and scales that it was
made of, byte for byte.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from te_mx._ops.library import define, is_direct
from te_mx.dispatch.linear import RestKernel
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import pick_problem
from te_mx.layouts import ROWS, spec_of
from te_mx.layouts.operand import Operand, Stack

Weight = TypeVar("Weight", Operand, Stack)


def at_rest(row: Weight) -> Weight:
    """Rowwise codes and scales (layout "rows") of a weight that stands still, or of those of
    groups, as its device keeps them; as they are where that is so. Waits for the device."""
    if row.codes.is_meta or row.codes.numel() == 0:
        return row
    with torch.inference_mode(False), torch.no_grad():  # it outlives the mode
        return _kernel(row).rest(row)  # type: ignore[return-value]


def plain(held: Weight) -> Weight:
    """The other way, for whoever reads the bytes themselves. In new memory, unless they lie by rows
    as it is; waits for no device."""
    if held.layout is ROWS:
        return held
    codes, scales, spec, *sizes, packed = held
    row = f"{held.format.name}@{ROWS.name}"
    groups, rows, k = sizes if isinstance(held, Stack) else (0, *sizes)
    if is_direct(codes, scales, packed):
        made = _kernel(held).plain(held)
    else:
        made = PLAIN_ROWS(codes, scales, packed, spec, groups, rows, k)
    return held._replace(codes=made[0], scales=made[1], spec=row, packed=None)


def _kernel(held: Operand | Stack) -> RestKernel:
    groups = held.groups if isinstance(held, Stack) else 0
    problem = Problem(
        "rest", place_of(held.codes.device), held.spec, "", held.rows, held.k, groups=groups
    )
    kernel = pick_problem(problem)
    assert isinstance(kernel, RestKernel)
    return kernel


def _run(
    codes: Tensor, scales: Tensor, packed: Tensor | None, spec: str, groups: int, rows: int, k: int
) -> tuple[Tensor, Tensor]:
    held = Stack(codes, scales, spec, groups, rows, k, packed) if groups else Operand(
        codes, scales, spec, rows, k, packed
    )  # fmt: skip
    return _kernel(held).plain(held)


def _fake(
    codes: Tensor, scales: Tensor, packed: Tensor | None, spec: str, groups: int, rows: int, k: int
) -> tuple[Tensor, Tensor]:
    fmt = spec_of(spec).format
    many = (groups,) if groups else ()
    shapes = ROWS.shapes(fmt, rows, k)
    return (
        codes.new_empty((*many, *shapes[0])),
        codes.new_empty((*many, *shapes[1]), dtype=fmt.scaling.storage),
    )


PLAIN_ROWS = define(
    "plain_rows(Tensor codes, Tensor scales, Tensor? packed, str spec, int groups, SymInt rows, "
    "SymInt k) -> (Tensor, Tensor)",
    _run,
    _fake,
)
