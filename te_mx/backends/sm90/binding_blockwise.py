"""Native calls of the Hopper backend that know fp32 scales only; its GEMM is that of binding.py."""

from __future__ import annotations

import torch

from te_mx.backends.base import FLOAT_DTYPES, LAYOUTS, SCALE_RULES, format_fields
from te_mx.backends.native import words_of
from te_mx.backends.sm90 import binding
from te_mx.dispatch.calls import Quantize
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized


def quantize(what: Quantize) -> Quantized | None:
    """Both directions of a matrix that is not empty; None when the native code does not take it."""
    native = binding.native()
    assert native is not None  # the envelope asked
    x = binding.rows_of(what.x)
    rows, cols = x.shape
    rule, epsilon = split_rule(what.rule)
    args = native.QuantizeArgs(
        x_data=x.data_ptr(), x_rows=rows, x_cols=cols, x_row_stride=x.stride(0),
        x_dtype=FLOAT_DTYPES[x.dtype], rule=SCALE_RULES[rule], amax_epsilon=epsilon,
        **format_fields(words_of(what.row or what.col)[0]),
    )  # fmt: skip
    row = col = sums = partial = None
    if what.row:
        row = _empty(what.row, rows, cols, x.device)
        args.row_codes, args.row_scales = row.codes.data_ptr(), row.scales.data_ptr()
        args.row_layout = LAYOUTS[words_of(what.row)[1]]
    if what.col:
        col = _empty(what.col, cols, rows, x.device)
        args.col_codes, args.col_scales = col.codes.data_ptr(), col.scales.data_ptr()
        args.col_layout = LAYOUTS[words_of(what.col)[1]]
    if what.col_sum:
        sums = torch.empty(cols, dtype=what.sum_dtype, device=x.device)
        partial = torch.empty(((rows + 127) // 128, cols), dtype=torch.float32, device=x.device)
        args.col_sum, args.col_sum_dtype = sums.data_ptr(), FLOAT_DTYPES[what.sum_dtype]
        args.col_sum_ws = partial.data_ptr()
    binding.set_execution(args, x.device.index)
    return Quantized(row, col, sums) if binding.supported(native.quantize(args)) else None


def _empty(spec: str, rows: int, k: int, device: torch.device) -> Operand:
    """An operand to write."""
    fmt, layout = spec_of(spec)
    return Operand(*layout.empty(fmt, rows, k, device), spec, rows, k)
