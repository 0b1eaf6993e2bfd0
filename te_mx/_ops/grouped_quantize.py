"""te_mx::quantize_grouped, te_mx::quantize_weights, te_mx::columns_of_weights: the tokens and the
weights of all groups in one call each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import checks
from te_mx._ops.library import define, is_direct
from te_mx._ops.quantize import empty_parts, parts_of, quantized_of, tensors_of
from te_mx._ops.settled import plain
from te_mx.dispatch import run
from te_mx.dispatch.calls import (
    Groups,
    QuantizeGroups,
    QuantizeWeights,
    StackedParts,
    stack_of,
    stacks_of,
)
from te_mx.dispatch.groups import known_to_host
from te_mx.dispatch.problem import Problem, place_of
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Quantized, Stack
from te_mx.runtime.kernel_log import note_read


def ends_of(offs: Tensor) -> str:
    """Where ends of groups are known: Problem.ends."""
    return "host" if known_to_host(offs) or len(offs) == 0 else "device"


# ------------------------------------------------------------------------------------------- tokens
def quantize_grouped(
    x: Tensor, groups: Groups, row: str = "", col: str = "", *, rule: str, col_sum: bool = False,
    seed: Tensor | None = None,
) -> Quantized:  # fmt: skip
    """Quantize the rows of all groups of x [R, cols] (fp32, bf16 or fp16, any strides).

    Rowwise parts are those of quantize_2d. Columnwise blocks never hold rows of two groups: see
    layouts/plain.py, GroupedCols. Codes and scales that belong to no group are 0.

    Args:
        x: the matrix.
        groups: end offsets int32 or int64 [G], on the device of x or on the CPU. On the CPU,
            offsets that are out of bounds raise ValueError; elsewhere they are clamped.
        row, col: specs of [R, k = cols] and [cols, k = R]; "" for none.
        rule: as for quantize_2d.
        col_sum: also sum the rows of every group, fp32 [G, cols].
        seed: of stochastic rounding, int64 [1] on the device of x. Elements are counted in x.
    """
    what = QuantizeGroups(x, groups, row, col, rule, col_sum, seed)
    if is_direct(x, groups.offs, seed):
        return _run_tokens(what)
    parts = _TOKENS(x, *groups, row, col, rule, col_sum, seed)
    return quantized_of(parts, row, col, col_sum, x.shape)


def _run_tokens(what: QuantizeGroups) -> Quantized:
    offs = what.groups.offs
    checks.quantizable(what.x, what.row, what.col, what.rule, what.seed)
    checks.quantized_groups(what.x, offs, what.row, what.col)
    rows, cols = what.x.shape
    problem = Problem(
        "quantize_grouped", place_of(what.x.device), what.row, what.col, rows, cols,
        groups=len(offs), ends=ends_of(offs), dtype=what.x.dtype, rule=what.rule,
    )  # fmt: skip
    return run.run(problem, what)


def _tokens_call(args: tuple[Any, ...]) -> QuantizeGroups:
    x, offs, capacity, *rest = args
    return QuantizeGroups(x, Groups(offs, capacity), *rest)


def _tokens(*args: Any) -> list[Tensor]:
    return parts_of(_run_tokens(_tokens_call(args)))


def _tokens_fake(*args: Any) -> list[Tensor]:
    x, (offs, _), row, col, _, col_sum, _ = _tokens_call(args)
    checks.offsets(offs, x.device)
    sums = torch.float32 if col_sum else None
    return empty_parts(x, row, col, x.shape, sums, len(offs))


_TOKENS = define(
    "quantize_grouped(Tensor x, Tensor offs, SymInt capacity, str row, str col, str rule, "
    "bool col_sum, Tensor? seed=None) -> Tensor[]",
    _tokens,
    _tokens_fake,
)


# ------------------------------------------------------------------------------------------ weights
def quantize_weights(
    weights: Sequence[Tensor] | Tensor, row: str, col: str = "", *, rule: str
) -> tuple[Stack, Stack | None]:
    """Quantize the weights of all groups, each [rows, cols] or all in one tensor [G, rows, cols]:
    the operand for fprop, and the one for dgrad if `col` names its spec.

    Every weight gives the bytes of quantize_2d."""
    made, made_col = _quantized_weights(QuantizeWeights(weights, row, col, rule))
    assert made is not None
    return made, made_col


def weight_columns(weights: Sequence[Tensor] | Tensor, col: str, *, rule: str) -> Stack:
    """The operand for dgrad alone."""
    _, made = _quantized_weights(QuantizeWeights(weights, "", col, rule))
    assert made is not None
    return made


def _quantized_weights(what: QuantizeWeights) -> StackedParts:
    weights = what.weights
    if is_direct(weights) if isinstance(weights, Tensor) else is_direct(*weights):
        return _run_weights(what)
    return stacks_of(_WEIGHTS(list(weights), what.row, what.col, what.rule), what)


def _run_weights(what: QuantizeWeights) -> StackedParts:
    first = what.weights[0]
    if not isinstance(what.weights, Tensor):
        checks.alike(what.weights)
    checks.quantizable(first, what.row, what.col, what.rule)
    rows, cols = first.shape
    problem = Problem(
        "quantize_weights", place_of(first.device), what.row, what.col, rows, cols,
        groups=len(what.weights), ends="host", dtype=first.dtype, rule=what.rule,
    )  # fmt: skip
    return run.run(problem, what)


def _weights(weights: list[Tensor], row: str, col: str, rule: str) -> list[Tensor]:
    for weight in weights:
        note_read(weight)
    return tensors_of(*_run_weights(QuantizeWeights(weights, row, col, rule)))


def _weights_fake(weights: list[Tensor], row: str, col: str, rule: str) -> list[Tensor]:
    checks.alike(weights)
    rows, cols = weights[0].shape
    parts: list[Tensor] = []
    for spec, sizes in ((row, (rows, cols)), (col, (cols, rows))):
        if spec:
            parts += stack_empty(weights[0], spec, len(weights), *sizes)
    return parts


def stack_empty(x: Tensor, spec: str, groups: int, rows: int, k: int) -> list[Tensor]:
    """Room for the operands of all groups, on the device of x."""
    fmt, layout = spec_of(spec)
    one = layout.empty(fmt, rows, k, torch.device("meta"))
    made = []
    for part in one:
        # Rows of codes may be padded: strides are those of one operand.
        ld = part.stride(0) if part.dim() == 2 and part.numel() else part.shape[-1]
        whole = x.new_empty((groups, *part.shape[:-1], ld if part.dim() == 2 else part.shape[-1]),
                            dtype=part.dtype)  # fmt: skip
        made.append(whole[..., : part.shape[-1]])
    if fmt.tensor_scaled:
        shape = groups, *fmt.tensor_scale_shape(rows)
        made.append(x.new_empty(shape, dtype=torch.float32))
    return made


_WEIGHTS = define(
    "quantize_weights(Tensor[] weights, str row, str col, str rule) -> Tensor[]",
    _weights,
    _weights_fake,
)


# ----------------------------------------------------------------------------------------- one copy
def columns_of_weights(row: Stack, col: str, rule: str) -> Stack:
    """The operand for dgrad of weights kept as plain rowwise codes alone: these codes where blocks
    are square, else what they decode to (Format.exact_dtype), quantized along the columns.

    Args:
        row: logical [G, rows, cols], by rows or as a weight that stands still; the result is
            logical [G, cols, rows].
        col: its spec.
        rule: as for quantize_2d.
    """
    if row.layout.name.endswith("cols"):
        raise ValueError(f"te_mx: row must lie by rows, got layout {row.layout.name!r}")
    row = plain(row)
    if is_direct(row.codes, row.scales):
        return _run_columns(row, col, rule)
    codes, scales, spec, groups, rows, k, _, whole = row
    made = iter(_COLUMNS(codes, scales, spec, rows, k, col, rule, whole))
    return stack_of(made, col, groups, k, rows)


def _run_columns(row: Stack, col: str, rule: str) -> Stack:
    if row.layout.name != "rows":
        raise ValueError(f"te_mx: row must lie by rows, got layout {row.layout.name!r}")
    row = row.checked("row")
    problem = Problem(
        "columns_of_weights", place_of(row.codes.device), row.spec, col, row.rows, row.k,
        groups=row.groups, ends="host", rule=rule,
    )  # fmt: skip
    return run.run(problem, row, col, rule)


def _columns(*args: Any) -> list[Tensor]:
    codes, scales, spec, rows, k, col, rule, whole = (*args, None)[:8]
    stack = Stack(codes, scales, spec, len(codes), rows, k, None, whole)
    return tensors_of(_run_columns(stack, col, rule))


def _columns_fake(*args: Any) -> list[Tensor]:
    codes, _, _, rows, k, col = args[:6]
    return stack_empty(codes, col, len(codes), k, rows)


_COLUMNS = define(
    "columns_of_weights(Tensor codes, Tensor scales, str spec, SymInt rows, SymInt k, str col, "
    "str rule, Tensor? tensor_scale=None) -> Tensor[]",
    _columns,
    _columns_fake,
)


# ------------------------------------------------------------------------------------------ joined
# te_mx::quantize_joined: matrices that make one, their rows behind each other, to the codes and
# scales of the whole. Kernels that read them where they lie save writing and reading the whole.
def quantize_joined_2d(
    parts: Sequence[Tensor], row: str = "", col: str = "", *, rule: str = "rceil"
) -> Quantized:
    """torch.cat(parts) quantized, with the bytes of `quantize_2d`.

    Args:
        parts: matrices [rows_i, cols] of one dtype (fp32, bf16 or fp16) and device.
        row, col, rule: as of `quantize_2d`, of [sum(rows_i), cols]; the rule is not stochastic.
    """
    if not parts or is_direct(*parts):
        _check(parts, row, col, rule)
        return run.quantize_joined(parts, row, col, rule)
    made = _QUANTIZE_JOINED(parts, row, col, rule)
    return quantized_of(made, row, col, False, _shape(parts))


def _shape(parts: Sequence[Tensor]) -> tuple[int, int]:
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


def _check(parts: Sequence[Tensor], row: str, col: str, rule: str) -> None:
    """Raise ValueError or TypeError unless these make one matrix that can be quantized."""
    if not parts:
        raise ValueError("te_mx: there is nothing to join")
    first = parts[0]
    for part in parts:
        checks.quantizable(part, row, col, rule)
        if part.shape[1] != first.shape[1] or part.dtype != first.dtype:
            raise ValueError(
                "te_mx: matrices that are joined must have one width and dtype, got "
                f"{tuple(first.shape)} in {first.dtype} and {tuple(part.shape)} in {part.dtype}"
            )
    names = [f"part {i}" for i in range(len(parts))]
    checks.one_device(first.device, names, parts)


def _quantize_joined(parts: list[Tensor], row: str, col: str, rule: str) -> list[Tensor]:
    _check(parts, row, col, rule)
    for part in parts:
        note_read(part)
    return parts_of(run.quantize_joined(parts, row, col, rule))


def _fake(parts: list[Tensor], row: str, col: str, rule: str) -> list[Tensor]:
    _check(parts, row, col, rule)
    return empty_parts(parts[0], row, col, _shape(parts))


_QUANTIZE_JOINED = define(
    "quantize_joined(Tensor[] parts, str row, str col, str rule) -> Tensor[]",
    _quantize_joined,
    _fake,
)
