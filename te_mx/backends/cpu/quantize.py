"""The native quantizer of the CPU, and the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES as DTYPES
from te_mx.backends.base import LAYOUTS, SCALE_RULES, UPRIGHT, format_fields, pointer
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.envelope import why_not
from te_mx.backends.native import native_operand, transform_of, words_of
from te_mx.dispatch.calls import FLOAT_DTYPES, Quantize
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized
from te_mx.runtime import cpu_memory
from te_mx.runtime.cpu_memory import CPU

_U8 = torch.uint8


def _is_upright(spec: str) -> bool:
    return bool(spec) and words_of(spec)[0] in UPRIGHT


def takes(row: str, col: str) -> str | None:
    """Why the two directions are not made in one read; None when they are."""
    if row and col and words_of(row)[0] != words_of(col)[0]:
        return "makes both directions in one format"
    upright = _is_upright(row or col)
    lying = _across(col) if upright else row
    if lying and words_of(lying)[1] != "k_last":
        if upright:
            return "makes columnwise copies of blocks of 128 x 1 as they lie, not transposed"
        return "makes rowwise copies that lie by rows"
    return None


def _across(spec: str) -> str:
    """The other direction's operand with the same blocks: 128 x 1 along rows is 1 x 128 along
    columns, codes and scales turned."""
    if not spec:
        return ""
    name, layout = spec.split("@")
    return f"{name.replace('128x1', '1x128')}@{'cols' if layout == 'rows' else 'rows'}"


def _empty(spec: str, rows: int, k: int) -> Operand:
    """An operand to write."""
    fmt, layout = spec_of(spec)
    codes, scales = layout.shapes(fmt, rows, k)
    return Operand(
        cpu_memory.empty(codes, _U8),
        torch.empty(scales, dtype=fmt.scaling.storage, device=CPU), spec, rows, k,
    )  # fmt: skip


def _turned(made: Operand | None, spec: str) -> Operand | None:
    """The operand of blocks of 128 x 1 that the other direction's is."""
    return None if made is None else Operand(made.codes, made.scales, spec, made.k, made.rows)


class CpuQuantize(Kernel):
    op, name = "quantize", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True, columnwise=True, random=True)
        reason = reason or takes(problem.lhs, problem.rhs)
        if reason is None and problem.empty:
            reason = "takes matrices that are not empty"
        if reason is None and problem.dtype not in FLOAT_DTYPES:
            reason = f"takes float32, bfloat16 and float16, not {problem.dtype}"
        return reason

    def run(self, what: Quantize) -> Quantized | None:
        x, row, col, rule, col_sum, sum_dtype, seed, first = what
        if _is_upright(row or col):
            made = self.run(what._replace(row=_across(col), col=_across(row)))
            if made is None:
                return None
            return Quantized(_turned(made.col, row), _turned(made.row, col), made.col_sum)
        native = binding.native()
        assert native is not None
        rows, cols = x.shape
        row_stride, col_stride = x.stride()
        if row_stride != 1 and col_stride != 1:
            x = x.contiguous()
            row_stride, col_stride = x.stride()
        word, order = words_of(col or row)
        name, epsilon = split_rule(rule)
        args = native.QuantizeArgs(
            x_data=x.data_ptr(), x_rows=rows, x_cols=cols, x_row_stride=row_stride,
            x_col_stride=col_stride, x_dtype=DTYPES[x.dtype], rule=SCALE_RULES[name],
            amax_epsilon=epsilon, seed=pointer(seed), first=first,
            threads=torch.get_num_threads(), **format_fields(word),
        )  # fmt: skip
        row_operand = col_operand = sums = partial = None
        if row:
            row_operand = _empty(row, rows, cols)
            args.row_codes = row_operand.codes.data_ptr()
            args.row_scales = row_operand.scales.data_ptr()
            args.row_hadamard, args.row_signs = transform_of(row)
        if col:
            col_operand = _empty(col, cols, rows)
            args.col_codes = col_operand.codes.data_ptr()
            args.col_scales = col_operand.scales.data_ptr()
            args.col_layout = LAYOUTS[order]
            args.col_hadamard, args.col_signs = transform_of(col)
        if col_sum:
            sums = torch.empty(cols, dtype=torch.float32, device=CPU)
            parts = -(-rows // native.COL_SUM_ROWS), cols
            partial = torch.empty(parts, dtype=torch.float32, device=CPU)
            args.col_sum, args.col_sum_ws = sums.data_ptr(), partial.data_ptr()
        status = native.quantize(args)
        if status and not binding.supported(status):
            return None
        if sums is not None and sums.dtype != sum_dtype:
            sums = sums.to(sum_dtype)
        return Quantized(row_operand, col_operand, sums)


class CpuDequantize(Kernel):
    op, name = "dequantize", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True, columnwise=True)
        if reason is None and problem.empty:
            reason = "takes matrices that are not empty"
        if reason is None and problem.dtype not in FLOAT_DTYPES:  # fp64 is for tests: torch does it
            reason = f"gives float32, bfloat16 and float16, not {problem.dtype}"
        return reason

    def run(self, operand: Operand, dtype: torch.dtype) -> Tensor | None:
        plain = native_operand(operand)
        plain = plain._replace(codes=plain.codes.contiguous(), scales=plain.scales.contiguous())
        values = binding.dequantize(plain, dtype)
        return values if values is None or plain.order == "k_last" else values.t()


register(CpuQuantize())
register(CpuDequantize())
