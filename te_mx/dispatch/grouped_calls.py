"""Words of grouped calls: which rows belong to which group, and what is asked of a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from te_mx.dispatch.calls import Mode
from te_mx.dispatch.fused import ActStep
from te_mx.layouts.operand import Operand, Stack
from te_mx.layouts.registry import tensor_scaled


class Groups(NamedTuple):
    """Which rows belong to which group: end offsets int [G], and the capacity of a group or 0."""

    offs: Tensor
    capacity: int = 0


class QuantizeGroups(NamedTuple):
    """The tokens x [R, cols] of all groups. row, col: specs of [R, k = cols] and [cols, k = R], ""
    for none. col_sum: sums over the rows of every group, fp32 [G, cols]. seed: as of Quantize;
    elements are counted in x, not in their group."""

    x: Tensor
    groups: Groups
    row: str
    col: str
    rule: str
    col_sum: bool = False
    seed: Tensor | None = None


class ActGroups(NamedTuple):
    """An activation of the tokens of all groups, or its derivative, that is quantized by groups."""

    step: ActStep
    groups: Groups


class QuantizeWeights(NamedTuple):
    """The weights of all groups, each [rows, cols] or all in one [G, rows, cols]. row, col: specs
    of [G, rows, k = cols] and [G, cols, k = rows]."""

    weights: Sequence[Tensor] | Tensor
    row: str
    col: str
    rule: str


StackedParts = tuple[Stack | None, Stack | None]


def stacks_of(parts: Iterable[Tensor], what: QuantizeWeights) -> StackedParts:
    """The tensors of each side that was asked for, in order, as operands."""
    groups, (rows, cols), rest = len(what.weights), what.weights[0].shape, iter(parts)
    return (
        stack_of(rest, what.row, groups, rows, cols) if what.row else None,
        stack_of(rest, what.col, groups, cols, rows) if what.col else None,
    )


def stack_of(tensors: Iterator[Tensor], spec: str, groups: int, rows: int, k: int) -> Stack:
    """The operands of all groups whose tensors are the next ones."""
    codes, scales = next(tensors), next(tensors)
    whole = next(tensors) if tensor_scaled(spec) else None
    return Stack(codes, scales, spec, groups, rows, k, None, whole)


class GroupedRows(NamedTuple):
    """out [R, n]: rows of group g are lhs @ rhs_g^T + bias_g; rows of no group are 0."""

    lhs: Operand
    rhs: Stack
    groups: Groups
    bias: Tensor | None
    out: Tensor
    mode: Mode


class GroupedK(NamedTuple):
    """out [G, m, n] (+)= lhs_g @ rhs_g^T over the k of group g; zeros for a group without any."""

    lhs: Operand
    rhs: Operand
    groups: Groups
    out: Tensor
    accumulate: bool
    mode: Mode
