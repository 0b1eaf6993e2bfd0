"""Native calls of the Hopper backend that know fp32 scales only; its GEMMs are those of binding.py
and binding_grouped.py."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import ALIGNED, FLOAT_DTYPES, LAYOUTS, SCALE_RULES, format_fields
from te_mx.backends.native import BLOCKWISE, is_aligned, words_of
from te_mx.backends.sm90 import binding, binding_grouped
from te_mx.backends.sm90.layouts.groups import group_tiles
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.grouped_calls import QuantizeGroups, QuantizeWeights
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack


def quantize(what: Quantize) -> Quantized | None:
    """Both directions of a matrix that is not empty; None when the native code does not take it."""
    args, made, _alive = _prepare(what)
    return made if binding.supported(_native().quantize(args)) else None


def quantize_two(first: Quantize, second: Quantize) -> tuple[Quantized, Quantized] | None:
    """Both at the same time where the GPU has room; the first without col_sum."""
    (args, made, _alive), (args2, made2, _alive2) = _prepare(first), _prepare(second)
    return (made, made2) if binding.supported(_native().quantize_two(args, args2)) else None


def _native() -> Any:
    return binding.native()  # the envelope asked whether it is there


def _prepare(what: Quantize) -> tuple[Any, Quantized, object]:
    """The native record of a call, what it fills, and what must live until it is enqueued."""
    x = binding.rows_of(what.x)
    rows, cols = x.shape
    args = _native().QuantizeArgs(
        x_data=x.data_ptr(), x_rows=rows, x_cols=cols, x_row_stride=x.stride(0),
        x_dtype=FLOAT_DTYPES[x.dtype], **words_of_specs(what.row, what.col, what.rule),
    )  # fmt: skip
    sum_dtype = what.sum_dtype if what.col_sum else None
    made, partial = set_outputs(args, rows, cols, x.device, what.row, what.col, sum_dtype)
    binding.set_execution(args, x.device.index)
    return args, made, (x, partial)


def set_outputs(
    args: Any, rows: int, cols: int, device: torch.device, row_spec: str, col_spec: str,
    sum_dtype: torch.dtype | None,
) -> tuple[Quantized, Tensor | None]:  # fmt: skip
    """Write into a native record what it fills, and scratch memory; sum_dtype: of column sums,
    None without."""
    row = col = sums = partial = None
    if row_spec:
        row = _empty(row_spec, rows, cols, device)
        args.row_codes, args.row_scales = row.codes.data_ptr(), row.scales.data_ptr()
    if col_spec:
        col = _empty(col_spec, cols, rows, device)
        args.col_codes, args.col_scales = col.codes.data_ptr(), col.scales.data_ptr()
    if sum_dtype is not None:
        sums = torch.empty(cols, dtype=sum_dtype, device=device)
        partial = torch.empty(((rows + 127) // 128, cols), dtype=torch.float32, device=device)
        args.col_sum, args.col_sum_dtype = sums.data_ptr(), FLOAT_DTYPES[sum_dtype]
        args.col_sum_ws = partial.data_ptr()
    return Quantized(row, col, sums), partial


@lru_cache(maxsize=1024)
def words_of_specs(row: str, col: str, rule: str) -> dict[str, Any]:
    """What a native record says of the specs that a matrix is quantized to: its format, how its
    scales follow, and the layouts."""
    name, epsilon = split_rule(rule)
    words = {"rule": SCALE_RULES[name], "amax_epsilon": epsilon}
    words |= format_fields(BLOCKWISE_WORDS[spec_of(row or col).format.name])
    for side, spec in (("row", row), ("col", col)):
        if spec:
            words |= _layout(side, spec)
    return words


def _layout(side: str, spec: str) -> dict[str, int]:
    order = words_of(spec)[1]
    if not is_aligned(spec):
        return {f"{side}_layout": LAYOUTS[order]}
    spread: int = spec_of(spec).layout.spread  # type: ignore[attr-defined]
    return {f"{side}_layout": ALIGNED[order], "spread": spread}


def _set_source(args: Any, x: Tensor, spec: str, rule: str) -> None:
    """Write into a native record what is quantized, and to which format."""
    args.x_data, (args.x_rows, args.x_cols) = x.data_ptr(), x.shape
    args.x_row_stride, args.x_dtype = x.stride(0), FLOAT_DTYPES[x.dtype]
    set_format(args, spec, rule)


def set_format(args: Any, spec: str, rule: str) -> None:
    """Write the format of a spec into a native record, and how its scales follow."""
    name, epsilon = split_rule(rule)
    args.rule, args.amax_epsilon = SCALE_RULES[name], epsilon
    short = BLOCKWISE_WORDS[spec_of(spec).format.name]
    for field, value in format_fields(short).items():
        setattr(args, field, value)


BLOCKWISE_WORDS = {name: name.removeprefix("fp8_") for name in BLOCKWISE}


def _set_side(args: Any, side: str, to: Operand | Stack) -> None:
    """Write one direction into a native record."""
    setattr(args, f"{side}_codes", to.codes.data_ptr())
    setattr(args, f"{side}_scales", to.scales.data_ptr())
    for field, value in _layout(side, to.spec).items():
        setattr(args, field, value)


def _empty(spec: str, rows: int, k: int, device: torch.device) -> Operand:
    """An operand to write."""
    fmt, layout = spec_of(spec)
    return Operand(*layout.empty(fmt, rows, k, device), spec, rows, k)


# ------------------------------------------------------------------------------------------ groups
def quantize_groups(what: QuantizeGroups) -> Quantized:
    """The tokens of all groups, of which there are some."""
    x, (offs, capacity), row_spec, col_spec, rule, col_sum = what[:6]
    (rows, cols), groups, device = x.shape, len(offs), x.device
    x, offs = binding.rows_of(x), binding_grouped.offs_on_device(offs, device)
    args = _native().GroupedQuantizeArgs()
    _set_source(args, x, row_spec or col_spec, rule)
    args.groups = binding_grouped.groups_of(offs, capacity, rows)
    row = col = sums = partial = None
    if row_spec:
        row = _empty_tokens(row_spec, rows, cols, groups, device)
        _set_side(args, "row", row)
    if col_spec:
        col = _empty_tokens(col_spec, cols, rows, groups, device)
        _set_side(args, "col", col)
    if col_sum:
        sums = torch.empty((groups, cols), dtype=torch.float32, device=device)
        partial = torch.empty((group_tiles(rows, groups), cols), dtype=torch.float32, device=device)
        args.col_sum, args.col_sum_ws = sums.data_ptr(), partial.data_ptr()
    binding.set_execution(args, device.index)
    status = _native().quantize_grouped(args)
    binding_grouped.expect(status, f"{groups} groups of rows of {tuple(x.shape)}")
    return Quantized(row, col, sums)


def _empty_tokens(spec: str, rows: int, k: int, groups: int, device: torch.device) -> Operand:
    fmt, layout = spec_of(spec)
    return Operand(*layout.grouped_empty(fmt, rows, k, groups, device), spec, rows, k)


def quantize_weights(what: QuantizeWeights) -> tuple[Stack | None, Stack | None]:
    """The weights of all groups, which are not empty."""
    weights, row_spec, col_spec, rule = what
    groups, (rows, cols), device = len(weights), weights[0].shape, weights[0].device
    addresses, stride, dtype, _alive = binding_grouped.sources(weights)
    args = _native().QuantizeArgs(
        x_rows=rows, x_cols=cols, x_row_stride=stride, x_dtype=FLOAT_DTYPES[dtype]
    )
    set_format(args, row_spec or col_spec, rule)
    row = col = None
    if row_spec:
        row = _empty_stack(row_spec, groups, rows, cols, device)
        _set_side(args, "row", row)
    if col_spec:
        col = _empty_stack(col_spec, groups, cols, rows, device)
        _set_side(args, "col", col)
    binding.set_execution(args, device.index)
    status = _native().quantize_stacked(args, addresses)
    binding_grouped.expect(status, f"{groups} weights of {(rows, cols)}")
    return row, col


def _empty_stack(spec: str, groups: int, rows: int, k: int, device: torch.device) -> Stack:
    fmt, layout = spec_of(spec)
    (height, width), scales = layout.shapes(fmt, rows, k)
    plain = layout.name in ("rows", "cols")
    ld = width if plain else (width + 15) & -16
    codes = torch.empty((groups, height, ld), dtype=torch.uint8, device=device)
    made = torch.empty((groups, *scales), dtype=layout.scales_dtype(fmt), device=device)
    return Stack(codes[..., :width], made, spec, groups, rows, k)
