"""Words of the calls that kernels run: what to quantize, epilogues, groups, how GPUs multiply."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.dispatch.fused import ActStep
from te_mx.layouts.operand import Operand, Stack
from te_mx.layouts.registry import tensor_scaled

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEFAULT_SPREAD = 8
GELUS = ("tanh", "erf")
BIAS_GRADS = ("operand", "result")


class Quantize(NamedTuple):
    """One matrix x [rows, cols] to quantize, of which a plan makes a Quantized. Plans may have, for
    the ops that ask: `two` (first, other plan, second), both at the same time, the first without
    col_sum; `joined` (parts), matrices as one, read where they lie; `rows` (x, into), the rowwise
    operand alone, in given memory. None from these where they cannot.

    row, col: specs of the operands [rows, k = cols] and [cols, k = rows]; "" for none. col_sum:
    also sum x over its rows in fp32, rounded to sum_dtype, for a bias gradient. seed: int64 [1] of
    stochastic rounding (rules that end in "+sr"), which counts rows from `first` on."""

    x: Tensor
    row: str
    col: str
    rule: str
    col_sum: bool = False
    sum_dtype: torch.dtype = torch.float32
    seed: Tensor | None = None
    first: int = 0


class Mode(NamedTuple):
    """How a GPU without block-scaled tensor cores multiplies: "adaptive" or "exact", and the
    alignment spread of the first; whether K may be cut. CPUs are always exact and never cut."""

    precision: str = "adaptive"
    spread: int = DEFAULT_SPREAD
    split_k: bool = False


class Epilogue(NamedTuple):
    """What happens to the fp32 sums of D [m, n], in this order: + bias [n]; aux is stored; GELU
    ("tanh" or "erf"); or times the derivative of GELU at gelu_in [m, n]; bias gradient; + out if
    accumulate; rounding to the dtype of out.

    bias_grad: "operand" sums lhs over k, fp32 [m]; "result" sums D over m, fp32 [n]."""

    bias: Tensor | None = None
    gelu: str | None = None
    gelu_in: Tensor | None = None
    bias_grad: str | None = None
    accumulate: bool = False


class Product(NamedTuple):
    """A GEMM: out [m, n] = epilogue(lhs [m, k] @ rhs [n, k]^T); kernels write out and aux."""

    lhs: Operand
    rhs: Operand
    epilogue: Epilogue
    out: Tensor
    aux: Tensor | None
    mode: Mode


class Ran(NamedTuple):
    """The name of the GEMM kernel that ran, and the bias gradient or None."""

    name: str
    bias_grad: Tensor | None


class GemmParts(NamedTuple):
    """out [m, n]; aux [m, n], the value before GELU, or None; bias_grad fp32 or None."""

    out: Tensor
    aux: Tensor | None
    bias_grad: Tensor | None


# ----------------------------------------------------------------------------------- grouped calls
# Words of grouped calls: which rows belong to which group, and what is asked of a kernel.
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
