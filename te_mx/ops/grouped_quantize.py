"""te_mx::quantize_grouped and te_mx::quantize_weights: the tokens of all groups, and the weights of
all groups, in one call each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from te_mx.backends import cpu, cpu_grouped, reference_grouped
from te_mx.backends.base import QuantizedParts, blocks
from te_mx.backends.grouped import (
    INDEX_DTYPES,
    Bounds,
    StackedOperand,
    device_bounds,
    first_scale_row,
    host_bounds,
    known_to_host,
    scale_rows,
)
from te_mx.engine.explain import warn_fallback
from te_mx.ops.library import define, is_direct
from te_mx.ops.quantize import quantize_2d


def check_offs(offs: Tensor, groups: int | None = None) -> None:
    """Raise ValueError unless offs is what an op takes as end offsets."""
    if offs.dim() != 1 or offs.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"offs must be a vector of end offsets in int32 or int64, got {offs.dtype} "
            f"{tuple(offs.shape)}"
        )
    if groups is not None and len(offs) != groups:
        raise ValueError(f"offs must have an entry for each of {groups} groups, got {len(offs)}")


def quantize_grouped(
    x: Tensor,
    offs: Tensor,
    fmt: str,
    *,
    rowwise: bool,
    columnwise: bool,
    scale_rule: str,
    col_sum: bool = False,
    capacity: int = 0,
) -> QuantizedParts:
    """Quantize the rows of all groups of x [R, cols] (fp32, bf16 or fp16, any strides) to MXFP8.

    Rowwise parts are those of quantize_2d. Columnwise blocks never hold rows of two groups: codes
    [R, cols] and scales [R // 32 + G, cols], see backends/grouped.py. col_sum is fp32 [G, cols].
    Codes and scales that belong to no group are 0.

    Args:
        x: the matrix.
        offs: end offsets int32 or int64 [G], on the device of x or on the CPU. On the CPU, offsets
            that are out of bounds raise ValueError; elsewhere they are clamped.
        fmt, rowwise, columnwise, scale_rule, col_sum: as for quantize_2d.
        capacity: 0 when groups follow each other; else group i starts at row i * capacity.
    """
    if is_direct(x):
        run = _on_cpu if x.is_cpu else _on_other
        return run(x, offs, fmt, rowwise, columnwise, scale_rule, col_sum, capacity)
    parts = iter(_OP(x, offs, fmt, rowwise, columnwise, scale_rule, col_sum, capacity))
    wanted = (rowwise, rowwise, columnwise, columnwise, col_sum)
    return QuantizedParts(*(next(parts) if want else None for want in wanted))


def _on_cpu(
    x: Tensor, offs: Tensor, fmt: str, rowwise: bool, columnwise: bool, rule: str, col_sum: bool,
    capacity: int,
) -> QuantizedParts:  # fmt: skip
    check_offs(offs)
    bounds = host_bounds(offs, capacity, len(x))
    if cpu.native() is not None and x.numel():
        parts = cpu_grouped.quantize(x, bounds, fmt, rowwise, columnwise, rule, col_sum)
        if parts is not None:
            return parts
    if x.numel():
        why = cpu.missing_reason() or "the native code does not take this problem"
        warn_fallback("quantize_grouped on the CPU", why)
    return _loop(x, bounds, fmt, rowwise, columnwise, rule, col_sum)


def _on_other(
    x: Tensor, offs: Tensor, fmt: str, rowwise: bool, columnwise: bool, rule: str, col_sum: bool,
    capacity: int,
) -> QuantizedParts:  # fmt: skip
    check_offs(offs)
    if known_to_host(offs):
        bounds = host_bounds(offs, capacity, len(x))
        return _loop(x, bounds, fmt, rowwise, columnwise, rule, col_sum)
    starts, ends = device_bounds(offs, capacity, len(x))
    if len(ends) == 0:
        return _loop(x, Bounds([], []), fmt, rowwise, columnwise, rule, col_sum)
    warn_fallback(
        f"quantize_grouped on {x.device} with splits on the device",
        "no native kernel takes them yet; splits given as a list loop over the groups",
    )
    return reference_grouped.quantize(
        x, starts, ends, fmt, rowwise, columnwise, rule, col_sum
    )  # fmt: skip


def _loop(
    x: Tensor, bounds: Bounds, fmt: str, rowwise: bool, columnwise: bool, rule: str, col_sum: bool
) -> QuantizedParts:
    """One quantize_2d a group: the specification."""
    rows, cols = x.shape
    groups = len(bounds.ends)
    shapes = _shapes(rows, cols, groups, rowwise, columnwise)
    made = iter([x.new_zeros(shape, dtype=torch.uint8) for shape in shapes])
    row_codes, row_scales = (next(made), next(made)) if rowwise else (None, None)
    col_codes, col_scales = (next(made), next(made)) if columnwise else (None, None)
    sums = x.new_zeros((groups, cols), dtype=torch.float32) if col_sum else None
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        parts = quantize_2d(
            x[start:end], fmt, rowwise=rowwise, columnwise="plain" if columnwise else None,
            scale_rule=rule, col_sum=col_sum,
        )  # fmt: skip
        first = first_scale_row(start, i)
        for out, part, at in (
            (row_codes, parts.row_codes, start),
            (row_scales, parts.row_scales, start),
            (col_codes, parts.col_codes, start),
            (col_scales, parts.col_scales, first),
        ):
            if out is not None and part is not None:
                out[at : at + len(part)] = part
        if sums is not None and parts.col_sum is not None:
            sums[i] = parts.col_sum
    return QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums)


def _shapes(
    rows: int, cols: int, groups: int, rowwise: bool, columnwise: bool
) -> list[tuple[int, int]]:
    shapes = [(rows, cols), (rows, blocks(cols))] if rowwise else []
    return shapes + ([(rows, cols), (scale_rows(rows, groups), cols)] if columnwise else [])


def _make_op(run: Callable[..., QuantizedParts]) -> Callable[..., list[Tensor]]:
    def op(
        x: Tensor, offs: Tensor, fmt: str, rowwise: bool, columnwise: bool, rule: str,
        col_sum: bool, capacity: int,
    ) -> list[Tensor]:  # fmt: skip
        parts = run(x, offs, fmt, rowwise, columnwise, rule, col_sum, capacity)
        return [part for part in parts if part is not None]

    return op


def _fake(
    x: Tensor, offs: Tensor, fmt: str, rowwise: bool, columnwise: bool, rule: str, col_sum: bool,
    capacity: int,
) -> list[Tensor]:  # fmt: skip
    rows, cols = x.shape
    shapes = _shapes(rows, cols, len(offs), rowwise, columnwise)
    parts = [x.new_empty(shape, dtype=torch.uint8) for shape in shapes]
    sums = [x.new_empty((len(offs), cols), dtype=torch.float32)] if col_sum else []
    return [*parts, *sums]


_OP = define(
    "quantize_grouped(Tensor x, Tensor offs, str fmt, bool rowwise, bool columnwise, "
    "str scale_rule, bool col_sum, SymInt capacity) -> Tensor[]",
    cpu=_make_op(_on_cpu),
    cuda=_make_op(_on_other),
    other=_make_op(_on_other),
    fake=_fake,
)


# ------------------------------------------------------------------------------------------ weights
def quantize_weights(
    weights: Sequence[Tensor], fmt: str, *, columnwise: bool, scale_rule: str
) -> tuple[StackedOperand, StackedOperand | None]:
    """Quantize the weights of all groups, each [rows, cols]: the operand for fprop, and the one for
    dgrad if `columnwise`.

    Every weight gives the bytes of quantize_2d.
    """
    weights = list(weights)
    if is_direct(weights[0]):
        run = _weights_on_cpu if weights[0].is_cpu else _weights_loop
        parts = run(weights, fmt, columnwise, scale_rule)
    else:
        parts = _OP_WEIGHTS(weights, fmt, columnwise, scale_rule)
    col = StackedOperand(parts[2], parts[3], fmt, "k_first") if columnwise else None
    return StackedOperand(parts[0], parts[1], fmt, "k_last"), col


def _weights_on_cpu(weights: list[Tensor], fmt: str, columnwise: bool, rule: str) -> list[Tensor]:
    if cpu.native() is not None and weights[0].numel():
        parts = cpu_grouped.quantize_weights(weights, fmt, columnwise, rule)
        if parts is not None:
            return parts
    return _weights_loop(weights, fmt, columnwise, rule)


def _weights_loop(weights: list[Tensor], fmt: str, columnwise: bool, rule: str) -> list[Tensor]:
    form = "plain" if columnwise else None
    made = [
        quantize_2d(weight, fmt, rowwise=True, columnwise=form, scale_rule=rule)
        for weight in weights
    ]
    wanted = 4 if columnwise else 2
    return [torch.stack([parts[i] for parts in made]) for i in range(wanted)]  # type: ignore[misc]


def _weights_fake(weights: list[Tensor], fmt: str, columnwise: bool, rule: str) -> list[Tensor]:
    groups, (rows, cols) = len(weights), weights[0].shape
    shapes = [(groups, rows, cols), (groups, rows, blocks(cols))]
    if columnwise:
        shapes += [(groups, rows, cols), (groups, blocks(rows), cols)]
    return [weights[0].new_empty(shape, dtype=torch.uint8) for shape in shapes]


_OP_WEIGHTS = define(
    "quantize_weights(Tensor[] weights, str fmt, bool columnwise, str scale_rule) -> Tensor[]",
    cpu=_weights_on_cpu,
    cuda=_weights_loop,
    other=_weights_loop,
    fake=_weights_fake,
)
