"""te_mx::quantize_grouped: the tokens of all groups in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from te_mx.backends import cpu, cpu_grouped, reference_grouped, sm90, sm90_grouped
from te_mx.backends import sm90_grouped_layout as packed_layout
from te_mx.backends.base import PLAIN, Operand, QuantizedParts, blocks
from te_mx.backends.grouped import (
    Bounds,
    device_bounds,
    first_scale_row,
    host_bounds,
    known_to_host,
    scale_rows,
)
from te_mx.engine.explain import warn_fallback
from te_mx.ops import checks
from te_mx.ops.library import define, is_direct
from te_mx.ops.quantize import quantize_2d


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
    spread: int = PLAIN,
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
        spread: 0 to 8 packs for Hopper with this alignment spread, as orders "sm90_rows" and
            "sm90_k" of backends/sm90_grouped_layout.py; x is then not empty.
    """
    if is_direct(x, offs):
        run = _on_cpu if x.is_cpu else _on_cuda
        return run(x, offs, fmt, rowwise, columnwise, scale_rule, col_sum, capacity, spread)
    parts = iter(_OP(x, offs, fmt, rowwise, columnwise, scale_rule, col_sum, capacity, spread))
    wanted = (rowwise, rowwise, columnwise, columnwise, col_sum)
    return QuantizedParts(*(next(parts) if want else None for want in wanted))


def _check(x: Tensor, offs: Tensor, fmt: str, rule: str, spread: int) -> None:
    checks.quantizable(x, fmt, rule, spread=spread)
    checks.offsets(offs, x.device)


def _on_cpu(
    x: Tensor, offs: Tensor, fmt: str, rowwise: bool, columnwise: bool, rule: str, col_sum: bool,
    capacity: int, spread: int,
) -> QuantizedParts:  # fmt: skip
    _check(x, offs, fmt, rule, spread)
    bounds = host_bounds(offs, capacity, len(x))
    if spread >= 0:
        return _packed(x, bounds, fmt, rowwise, columnwise, rule, col_sum, spread)
    if cpu.native() is not None and x.numel():
        parts = cpu_grouped.quantize(x, bounds, fmt, rowwise, columnwise, rule, col_sum)
        if parts is not None:
            return parts
    if x.numel():
        why = cpu.missing_reason() or "the native code does not take this problem"
        warn_fallback("quantize_grouped on the CPU", why)
    return _loop(x, bounds, fmt, rowwise, columnwise, rule, col_sum)


def _on_cuda(
    x: Tensor, offs: Tensor, fmt: str, rowwise: bool, columnwise: bool, rule: str, col_sum: bool,
    capacity: int, spread: int,
) -> QuantizedParts:  # fmt: skip
    _check(x, offs, fmt, rule, spread)
    if spread < 0 or x.numel() == 0 or sm90.problem(x.device.index) is not None:
        return _on_other(x, offs, fmt, rowwise, columnwise, rule, col_sum, capacity, spread)
    if known_to_host(offs):
        host_bounds(offs, capacity, len(x))  # says what is wrong with them
    return sm90_grouped.quantize(x, offs, capacity, fmt, rowwise, columnwise, rule, col_sum, spread)


def _on_other(
    x: Tensor, offs: Tensor, fmt: str, rowwise: bool, columnwise: bool, rule: str, col_sum: bool,
    capacity: int, spread: int,
) -> QuantizedParts:  # fmt: skip
    _check(x, offs, fmt, rule, spread)
    if known_to_host(offs):
        bounds = host_bounds(offs, capacity, len(x))
        if spread >= 0:
            return _packed(x, bounds, fmt, rowwise, columnwise, rule, col_sum, spread)
        return _loop(x, bounds, fmt, rowwise, columnwise, rule, col_sum)
    starts, ends = device_bounds(offs, capacity, len(x))
    if len(ends) == 0:
        return _loop(x, Bounds([], []), fmt, rowwise, columnwise, rule, col_sum)
    warn_fallback(
        f"quantize_grouped on {x.device} with splits on the device",
        "only Hopper GPUs at precision 'adaptive' have a kernel for them; splits given as a list "
        "loop over the groups",
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


def _packed(
    x: Tensor, bounds: Bounds, fmt: str, rowwise: bool, columnwise: bool, rule: str, col_sum: bool,
    spread: int,
) -> QuantizedParts:  # fmt: skip
    """One quantize_2d a group, put where the group lies: what the native quantizer must produce."""
    (rows, cols), groups = x.shape, len(bounds.ends)
    row, col = (
        Operand(
            x.new_zeros(codes, dtype=torch.uint8), x.new_zeros(words, dtype=torch.int32), fmt, order
        )
        for order, (codes, words) in (
            ("sm90_rows", packed_layout.shapes_rows(rows, cols, groups)),
            ("sm90_k", packed_layout.shapes_k(rows, cols, groups)),
        )
    )  # fmt: skip
    row = row._replace(codes=row.codes[:, :cols])
    sums = x.new_zeros((groups, cols), dtype=torch.float32) if col_sum else None
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        if start == end:
            continue
        parts = quantize_2d(
            x[start:end], fmt, rowwise=rowwise, columnwise="transposed" if columnwise else None,
            scale_rule=rule, col_sum=col_sum, spread=spread,
        )  # fmt: skip
        if parts.row_codes is not None and parts.row_scales is not None:
            own = Operand(parts.row_codes, parts.row_scales, fmt, "sm90")
            packed_layout.put_rows(row, own, start, end, i)
        if parts.col_codes is not None and parts.col_scales is not None:
            own = Operand(parts.col_codes, parts.col_scales, fmt, "sm90")
            packed_layout.put_k(col, own, start, end, i)
        if sums is not None and parts.col_sum is not None:
            sums[i] = parts.col_sum
    return QuantizedParts(
        row.codes if rowwise else None, row.scales if rowwise else None,
        col.codes if columnwise else None, col.scales if columnwise else None, sums,
    )  # fmt: skip


def _shapes(
    rows: int, cols: int, groups: int, rowwise: bool, columnwise: bool
) -> list[tuple[int, int]]:
    shapes = [(rows, cols), (rows, blocks(cols))] if rowwise else []
    return shapes + ([(rows, cols), (scale_rows(rows, groups), cols)] if columnwise else [])


def _make_op(run: Callable[..., QuantizedParts]) -> Callable[..., list[Tensor]]:
    def op(
        x: Tensor, offs: Tensor, fmt: str, rowwise: bool, columnwise: bool, rule: str,
        col_sum: bool, capacity: int, spread: int,
    ) -> list[Tensor]:  # fmt: skip
        parts = run(x, offs, fmt, rowwise, columnwise, rule, col_sum, capacity, spread)
        return [part for part in parts if part is not None]

    return op


def _fake(
    x: Tensor, offs: Tensor, fmt: str, rowwise: bool, columnwise: bool, rule: str, col_sum: bool,
    capacity: int, spread: int,
) -> list[Tensor]:  # fmt: skip
    checks.offsets(offs, x.device)
    rows, cols = x.shape
    parts: list[Tensor] = []
    if spread >= 0:
        if rowwise:
            codes, words = packed_layout.shapes_rows(rows, cols, len(offs))
            parts += [
                x.new_empty(codes, dtype=torch.uint8)[:, :cols],
                x.new_empty(words, dtype=torch.int32),
            ]
        if columnwise:
            codes, words = packed_layout.shapes_k(rows, cols, len(offs))
            parts += [
                x.new_empty(codes, dtype=torch.uint8),
                x.new_empty(words, dtype=torch.int32),
            ]
    else:
        shapes = _shapes(rows, cols, len(offs), rowwise, columnwise)
        parts += [x.new_empty(shape, dtype=torch.uint8) for shape in shapes]
    sums = [x.new_empty((len(offs), cols), dtype=torch.float32)] if col_sum else []
    return [*parts, *sums]


_OP = define(
    "quantize_grouped(Tensor x, Tensor offs, str fmt, bool rowwise, bool columnwise, "
    "str scale_rule, bool col_sum, SymInt capacity, int spread) -> Tensor[]",
    cpu=_make_op(_on_cpu),
    cuda=_make_op(_on_cuda),
    other=_make_op(_on_other),
    fake=_fake,
)
