"""te_mx::plain_rows: a weight that stands still lies once, in the layout of which one copy serves
every kernel of its device (`settled`); `plain` gives back the rowwise codes and scales that it was
made of, byte for byte."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from te_mx._ops.library import define, is_direct
from te_mx.dispatch.linear import RestKernel
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import pick_problem
from te_mx.layouts import ROWS, get, spec_of
from te_mx.layouts.operand import Operand, Stack

Weight = TypeVar("Weight", Operand, Stack, Operand | Stack)


def settled(held: Weight) -> Weight:
    """A weight that stands still, or those of groups, as its device keeps them: itself where it
    lies so. Waits for the device."""
    codes, scales, packed = held.codes, held.scales, held.packed
    if codes.is_meta:
        return _outline(held)
    if codes.numel() == 0 or not is_direct(codes, scales, packed):
        return held
    kernel = _kernel(held)
    if held.layout.name == kernel.layout:
        return held
    with torch.inference_mode(False), torch.no_grad():  # it outlives the mode
        return kernel.rest(plain(held))  # type: ignore[return-value]


def for_any_rows(held: Weight) -> Weight:
    """A weight by rows as `settled`, where a kernel multiplies any rows with that; else itself."""
    lies = held.layout is ROWS and held.codes.numel() > 0 and is_direct(held.codes, held.scales)
    return settled(held) if lies and get(_kernel(held).layout).any_rows else held


def _outline(held: Weight) -> Weight:
    """By rows, without values: what a device gets later may lie otherwise."""
    if held.layout is ROWS:
        return held
    codes, scales = _fake(*_flat(held))
    row = f"{held.format.name}@{ROWS.name}"
    return held._replace(codes=codes, scales=scales, spec=row, packed=None)


def plain(held: Weight) -> Weight:
    """The other way, for whoever reads the bytes themselves. In new memory, unless they lie by rows
    as it is; waits for no device."""
    if held.layout is ROWS:
        return held
    if is_direct(held.codes, held.scales, held.packed):
        codes, scales = _kernel(held).plain(held)
    else:
        codes, scales = PLAIN_ROWS(*_flat(held))
    row = f"{held.format.name}@{ROWS.name}"
    return held._replace(codes=codes, scales=scales, spec=row, packed=None)


def _flat(held: Operand | Stack) -> tuple[Any, ...]:
    groups = held.groups if isinstance(held, Stack) else 0
    return held.codes, held.scales, held.packed, held.spec, groups, held.rows, held.k


def held_as(parts: Sequence[Tensor], spec: str, shape: Sequence[int]) -> Operand | Stack:
    """The weight [n, k] of a spec, or those of groups [groups, n, k], whose codes and scales these
    are, and what lies aside; the tensor scale comes last, perhaps as bytes."""
    codes, scales, *aside = parts
    fmt, layout = spec_of(spec)
    *groups, n, k = shape
    whole = None
    if fmt.tensor_scaled and aside:
        given = aside.pop().view(torch.float32)
        whole = given.view((*groups, *fmt.tensor_scale_shape(n)))
    scales, last = scales.view(layout.scales_dtype(fmt)), aside[0] if aside else None
    if groups:
        return Stack(codes, scales, spec, groups[0], n, k, last, whole)
    return Operand(codes, scales, spec, n, k, last, whole)


def _kernel(held: Operand | Stack) -> RestKernel:
    groups = held.groups if isinstance(held, Stack) else 0
    place, spec = place_of(held.codes.device), f"{held.format.name}@any"
    problem = Problem("rest", place, spec, "", held.rows, held.k, groups=groups)
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
