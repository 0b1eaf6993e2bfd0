"""te_mx::quantize, te_mx::dequantize, te_mx::convert: matrices to codes and scales, back, and from
one layout to another."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import checks
from te_mx._ops.library import define, is_direct
from te_mx._ops.settled import plain
from te_mx.dispatch import run
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.fused import Target
from te_mx.dispatch.registry import planned
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack
from te_mx.layouts.registry import tensor_scaled
from te_mx.runtime.kernel_log import note_read


def quantize_2d(
    x: Tensor, row: str = "", col: str = "", *, rule: str = "rceil", col_sum: bool = False,
    sum_dtype: torch.dtype = torch.float32, seed: Tensor | None = None,
) -> Quantized:  # fmt: skip
    """Quantize x [rows, cols] (fp32, bf16 or fp16, any strides) along its rows, its columns or
    both, in one read.

    Args:
        x: the matrix.
        row, col: specs ("<format>@<layout>") of [rows, k = cols] and [cols, k = rows]; "" for none.
        rule: a scale rule that the format knows: "rceil", "floor" or "even" of MX formats; with
            "+sr" behind it, codes are rounded stochastically.
        col_sum: also sum x over its rows in fp32, for a bias gradient.
        sum_dtype: what these sums are rounded to: fp32, bf16 or fp16.
        seed: of stochastic rounding, int64 [1] on the device of x.
    """
    if is_direct(x, seed):
        checks.quantizable(x, row, col, rule, seed)
        return run.quantize(Quantize(x, row, col, rule, col_sum, sum_dtype, seed))
    parts = _QUANTIZE(x, row, col, rule, col_sum, sum_dtype, seed)
    return quantized_of(parts, row, col, col_sum, x.shape)


def rows_2d(x: Tensor, row: str, rule: str) -> Operand:
    """The rowwise operand of quantize_2d, of many matrices of one size."""
    call = rows_call(x, row, rule)
    made = None if call is None else call(x)
    if made is not None:
        return made
    found = quantize_2d(x, row, rule=rule).row
    assert found is not None
    return found


def rows_beyond_2d(x: Tensor, most: int, row: str, *, rule: str = "rceil") -> Operand:
    """The rowwise operand of x [rows, k] where it has more rows than `most`, for graphs of any
    number of rows; of fewer rows it is not made, and its bytes mean nothing."""
    made = quantized_of(_QUANTIZE_BEYOND(x, most, row, rule), row, "", False, x.shape).row
    assert made is not None
    return made


def rows_call(x: Tensor, row: str, rule: str) -> Callable[..., Operand | None] | None:
    """The call of rows_2d for such matrices, of a kernel that makes rowwise operands alone; it
    takes memory for codes and scales behind x. None where there is none."""
    if not is_direct(x):
        return None
    plan = planned("quantize", x.device, row, "", (*x.shape, 1), x.dtype, rule=rule)[1]
    return getattr(plan, "rows", None)


def quantize_two_2d(first: Quantize, second: Quantize) -> tuple[Quantized, Quantized]:
    """Two matrices, at the same time where a kernel can; the first without col_sum."""
    x, other = second.x, first.x
    if is_direct(x, other):
        for w in (first, second):
            checks.quantizable(w.x, w.row, w.col, w.rule, w.seed)
        if x.is_cuda and other.device == x.device:
            both = run.quantize_two(first, second)
            if both is not None:
                return both
        return run.quantize(first), run.quantize(second)
    one = quantize_2d(first.x, first.row, first.col, rule=first.rule, seed=first.seed)
    return one, quantize_2d(
        second.x, second.row, second.col, rule=second.rule, col_sum=second.col_sum,
        sum_dtype=second.sum_dtype, seed=second.seed,
    )  # fmt: skip


def quantized(values: Tensor, target: Target) -> Quantized:
    """Values [rows, cols] as a target says, in one read; perhaps their sums alone."""
    if target.codes:
        row, col, rule, col_sum, seed = target
        return quantize_2d(values, row, col, rule=rule, col_sum=col_sum, seed=seed)
    sums = values.sum(0, dtype=torch.float32) if target.col_sum else None
    return Quantized(None, None, sums)


def dequantize_2d(operand: Operand, dtype: torch.dtype) -> Tensor:
    """The values [rows, k] of an operand, rounded once to dtype (with a tensor scale to fp32 before
    it); NaN where a scale says so. Of a weight that stands still: those of its codes."""
    if operand.layout.reads_as:
        operand = plain(operand)
    if is_direct(operand.codes, operand.scales):
        return run.dequantize(_dequantizable(operand, dtype), dtype)
    codes, scales, spec, rows, k, _, whole = operand
    return _DEQUANTIZE(codes, scales, spec, rows, k, dtype, whole)


def dequantize_joined_2d(parts: Sequence[Operand], dtype: torch.dtype) -> Tensor:
    """The values of operands of one k, their rows behind each other: as `dequantize_2d` of each,
    written to one memory where a kernel does that."""
    parts = [plain(part) if part.layout.reads_as else part for part in parts]
    if not is_direct(*[tensor for part in parts for tensor in part[:2]]):
        return torch.cat([dequantize_2d(part, dtype) for part in parts])
    rows = [part.rows for part in parts]
    made = torch.empty((sum(rows), parts[0].k), dtype=dtype, device=parts[0].codes.device)
    for part, into in zip(parts, made.split(rows), strict=True):
        run.dequantize(_dequantizable(part, dtype), dtype, into)
    return made


def restored_2d(operand: Operand, dtype: torch.dtype) -> Tensor:
    """What was quantized to an operand, [rows, k]: its values, transformed back in fp32 (in fp64
    for dtype float64) where its format has a transform."""
    transform = operand.format.transform
    if transform is None:
        return dequantize_2d(operand, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return transform.invert(dequantize_2d(operand, wide)).to(dtype)


def convert_2d(operand: Operand, spec: str) -> Operand:
    """An operand in the layout of another spec of its format."""
    if operand.spec == spec:
        return operand
    if is_direct(operand.codes, operand.scales):
        return run.convert(operand.checked("the matrix"), spec)
    codes, scales = _CONVERT(*operand[:5], spec, operand.tensor_scale)
    return operand._replace(codes=codes, scales=scales, spec=spec, packed=None)


# ---------------------------------------------------------------------------------------------- ops
def parts_of(made: Quantized) -> list[Tensor]:
    """The tensors of a quantized matrix, in order."""
    parts = tensors_of(made.row, made.col)
    return parts if made.col_sum is None else [*parts, made.col_sum]


def tensors_of(*sides: Operand | Stack | None) -> list[Tensor]:
    """Codes, scales and tensor scales of those that there are, in order."""
    each = ((one.codes, one.scales, one.tensor_scale) for one in sides if one is not None)
    return [tensor for parts in each for tensor in parts if tensor is not None]


def quantized_of(
    parts: Iterable[Tensor], row: str, col: str, col_sum: bool, shape: Sequence[int]
) -> Quantized:
    """What an op returned as `parts_of` a quantized matrix of this shape [rows, cols]."""
    (rows, cols), rest = shape, iter(parts)
    return Quantized(
        operand_of(rest, row, rows, cols) if row else None,
        operand_of(rest, col, cols, rows) if col else None,
        next(rest) if col_sum else None,
    )


def operand_of(tensors: Iterator[Tensor], spec: str, rows: int, k: int) -> Operand:
    """The operand whose tensors are the next ones."""
    codes, scales = next(tensors), next(tensors)
    whole = next(tensors) if tensor_scaled(spec) else None
    return Operand(codes, scales, spec, rows, k, None, whole)


def empty_parts(
    x: Tensor, row: str, col: str, shape: Sequence[int], sums: torch.dtype | None = None,
    groups: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Room for `parts_of` what is made of a matrix [rows, cols], or of its rows in groups, on the
    device of x. sums: their dtype."""
    rows, cols = shape
    parts: list[Tensor] = []
    for spec, sizes in ((row, (rows, cols)), (col, (cols, rows))):
        if spec:
            fmt, layout = spec_of(spec)
            if groups is None:
                parts += layout.empty(fmt, *sizes, x.device)
            else:
                parts += layout.grouped_empty(fmt, *sizes, groups, x.device)
            if fmt.tensor_scaled:
                shape = fmt.tensor_scale_shape(sizes[0])
                shape = shape if shape or groups is None else (groups,)
                parts.append(x.new_empty(shape, dtype=torch.float32))
    if sums is None:
        return parts
    size = (cols,) if groups is None else (groups, cols)
    return [*parts, x.new_empty(size, dtype=sums)]


def _quantize(*args: Any) -> list[Tensor]:
    what = Quantize(*args)
    checks.quantizable(what.x, what.row, what.col, what.rule, what.seed)
    note_read(what.x)
    return parts_of(run.quantize(what))


def _quantize_fake(*args: Any) -> list[Tensor]:
    x, row, col, rule, col_sum, sum_dtype, seed, _ = Quantize(*args)
    checks.quantizable(x, row, col, rule, seed)
    return empty_parts(x, row, col, x.shape, sum_dtype if col_sum else None)


def _quantize_beyond(x: Tensor, most: int, row: str, rule: str) -> list[Tensor]:
    if x.shape[0] > most:
        return _quantize(x, row, "", rule, False, torch.float32)
    return _quantize_beyond_fake(x, most, row, rule)


def _quantize_beyond_fake(x: Tensor, most: int, row: str, rule: str) -> list[Tensor]:
    return _quantize_fake(x, row, "", rule, False, torch.float32)


def _dequantizable(operand: Operand, dtype: torch.dtype) -> Operand:
    if dtype != torch.float64:  # for tests
        checks.float_dtype(dtype)
    return operand.checked("the matrix")


def _held(args: tuple[Any, ...]) -> Operand:
    """Of the arguments of both ops below: codes to k, a word, perhaps tensor scales."""
    codes, scales, spec, rows, k, _, *whole = args
    return Operand(codes, scales, spec, rows, k, None, *whole)


def _dequantize(*args: Any) -> Tensor:
    # An op's result is contiguous, so that its fake kernel can say how it lies.
    return run.dequantize(_dequantizable(_held(args), args[5]), args[5]).contiguous()


def _dequantize_fake(*args: Any) -> Tensor:
    codes, scales, _, rows, k, _, whole = _held(args)
    names = "the scales of the matrix", "its tensor scale"
    checks.one_device(codes.device, names, (scales, whole))
    return codes.new_empty((rows, k), dtype=args[5])


def _convert(*args: Any) -> tuple[Tensor, Tensor]:
    made = run.convert(_held(args).checked("the matrix"), args[5])
    return _apart(made.codes, args[0]), _apart(made.scales, args[1])


def _apart(made: Tensor, given: Tensor) -> Tensor:
    """A result as an op may return it: no view of what it was given."""
    if made.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
        return made.clone(memory_format=torch.contiguous_format)
    return made


def _convert_fake(*args: Any) -> tuple[Tensor, Tensor]:
    made = empty_parts(args[0], args[5], "", args[3:5])
    return made[0], made[1]


_QUANTIZE = define(
    "quantize(Tensor x, str row, str col, str rule, bool col_sum, ScalarType sum_dtype, "
    "Tensor? seed=None) -> Tensor[]",
    _quantize,
    _quantize_fake,
)
_QUANTIZE_BEYOND = define(
    "quantize_beyond(Tensor x, int most, str row, str rule) -> Tensor[]",
    _quantize_beyond,
    _quantize_beyond_fake,
)
_DEQUANTIZE = define(
    "dequantize(Tensor codes, Tensor scales, str spec, SymInt rows, SymInt k, ScalarType dtype, "
    "Tensor? tensor_scale=None) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
_CONVERT = define(
    "convert(Tensor codes, Tensor scales, str spec, SymInt rows, SymInt k, str to, "
    "Tensor? tensor_scale=None) -> (Tensor, Tensor)",
    _convert,
    _convert_fake,
)
