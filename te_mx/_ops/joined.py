"""te_mx::quantize_joined: matrices that make one, their rows behind each other, to the codes and
scales of the whole; te_mx::quantize_beside: the same side by side. Kernels that read them where
they lie save writing and reading the whole.

te_mx::join_columns: matrices that make one, side by side. As ops these are no part of what compiled
code fuses: one kernel for all columns, each of which comes from another matrix, is slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_mx._ops import checks
from te_mx._ops.library import define, is_direct
from te_mx._ops.quantize import empty_like_spec, parts_of, quantized_of
from te_mx.dispatch import run
from te_mx.dispatch.calls import Quantize
from te_mx.layouts.operand import Quantized
from te_mx.runtime.ran import note_read


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


def _check(
    parts: Sequence[Tensor], row: str, col: str, rule: str, seed: Tensor | None = None,
    common: int = 1,
) -> None:  # fmt: skip
    """Raise ValueError or TypeError unless these make one matrix that can be quantized; `common` is
    the dimension that they have in common."""
    if not parts:
        raise ValueError("te_mx: there is nothing to join")
    first = parts[0]
    for part in parts:
        checks.quantizable(part, row, col, rule, seed)
        if part.shape[common] != first.shape[common] or part.dtype != first.dtype:
            raise ValueError(
                f"te_mx: matrices that are joined must have one {('height', 'width')[common]} and "
                "dtype, got "
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
    (rows, cols), first = _shape(parts), parts[0]
    made = empty_like_spec(first, row, rows, cols) if row else []
    return [*made, *(empty_like_spec(first, col, cols, rows) if col else [])]


_QUANTIZE_JOINED = define(
    "quantize_joined(Tensor[] parts, str row, str col, str rule) -> Tensor[]",
    _quantize_joined,
    _fake,
)


def quantize_beside_2d(
    parts: Sequence[Tensor],
    row: str = "",
    col: str = "",
    *,
    rule: str = "rceil",
    col_sum: bool = False,
    sum_dtype: torch.dtype = torch.float32,
    seed: Tensor | None = None,
) -> Quantized:
    """torch.cat(parts, 1) quantized, with the bytes of `quantize_2d`, whose arguments these are.
    parts: matrices [rows, cols_i] of one dtype (fp32, bf16 or fp16) and device."""
    if not parts or is_direct(*parts, seed):
        _check(parts, row, col, rule, seed, 0)
        return run.quantize_beside(
            parts, Quantize(parts[0], row, col, rule, col_sum, sum_dtype, seed)
        )
    made = _QUANTIZE_BESIDE(parts, row, col, rule, col_sum, sum_dtype, seed)
    return quantized_of(made, row, col, col_sum, (parts[0].shape[0], _width(parts)))


def _width(parts: Sequence[Tensor]) -> int:
    return sum(part.shape[1] for part in parts)


def _quantize_beside(
    parts: list[Tensor], row: str, col: str, rule: str, col_sum: bool, sum_dtype: torch.dtype,
    seed: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    _check(parts, row, col, rule, seed, 0)
    for part in parts:
        note_read(part)
    what = Quantize(parts[0], row, col, rule, col_sum, sum_dtype, seed)
    return parts_of(run.quantize_beside(parts, what))


def _beside_fake(
    parts: list[Tensor], row: str, col: str, rule: str, col_sum: bool, sum_dtype: torch.dtype,
    seed: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    _check(parts, row, col, rule, seed, 0)
    first, cols = parts[0], _width(parts)
    made = empty_like_spec(first, row, first.shape[0], cols) if row else []
    made += empty_like_spec(first, col, cols, first.shape[0]) if col else []
    return [*made, first.new_empty(cols, dtype=sum_dtype)] if col_sum else made


_QUANTIZE_BESIDE = define(
    "quantize_beside(Tensor[] parts, str row, str col, str rule, bool col_sum, "
    "ScalarType sum_dtype, Tensor? seed=None) -> Tensor[]",
    _quantize_beside,
    _beside_fake,
)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """[rows, sum(cols_i)] of matrices [rows, cols_i]."""
    return torch.cat(list(parts), 1) if is_direct(*parts) else _JOIN_COLUMNS(list(parts))


def _join_columns(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 1)


_JOIN_COLUMNS = define("join_columns(Tensor[] parts) -> Tensor", _join_columns, _join_columns)
