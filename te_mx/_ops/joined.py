"""te_mx::quantize_joined: matrices that make one, their rows behind each other, to the codes and
scales of the whole. Kernels that read them where they lie save writing and reading the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from te_mx._ops import checks
from te_mx._ops.library import define, is_direct
from te_mx._ops.quantize import empty_parts, parts_of, quantized_of
from te_mx.dispatch import run
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
