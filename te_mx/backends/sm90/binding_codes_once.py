"""Calls that make plain rowwise codes of matrices of one size, and values of such codes, whose
native records are made once."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, FORMATS, LAYOUTS, SCALE_RULES, code_bytes
from te_mx.backends.sm90 import binding
from te_mx.dispatch.problem import Problem
from te_mx.layouts.operand import Operand

_U8 = torch.uint8
_ROWS = LAYOUTS["k_last"]


class CodesOnce:
    """The rowwise operand of x [rows, cols]."""

    __slots__ = ("index", "native", "record", "shapes", "sizes", "spec")

    def __init__(self, problem: Problem, fmt: str) -> None:
        rows, cols = self.sizes = problem.m, problem.n
        self.index, self.spec, native = problem.place.index, problem.lhs, binding.native()
        assert native is not None
        self.native = native
        self.shapes = (rows, code_bytes(fmt, cols)), (rows, (cols + 31) // 32)
        self.record = native.QuantizeArgs(
            x_rows=rows, x_cols=cols, x_row_stride=cols, x_dtype=FLOAT_DTYPES[problem.dtype],
            element=FORMATS[fmt], rule=SCALE_RULES[problem.rule], device=self.index,
        )  # fmt: skip

    def run(self, x: Tensor, into: tuple[Tensor, Tensor] | None = None) -> Operand | None:
        """In new memory or in that of `into`; None for what native code does not take."""
        if not x.is_contiguous():
            return None
        if into is None:
            codes, scales = (torch.empty(s, dtype=_U8, device=x.device) for s in self.shapes)
        else:
            codes, scales = into
        args = self.record.copy(
            x_data=x.data_ptr(), row_codes=codes.data_ptr(), row_scales=scales.data_ptr(),
            stream=binding.stream(self.index),
        )  # fmt: skip
        done = binding.supported(self.native.quantize(args))
        return Operand(codes, scales, self.spec, *self.sizes) if done else None


class ValuesOnce:
    """The values [rows, k] of an operand."""

    __slots__ = ("dtype", "index", "native", "record", "shape")

    def __init__(self, problem: Problem, fmt: str) -> None:
        self.shape, self.dtype = (problem.m, problem.n), problem.dtype
        self.index, native = problem.place.index, binding.native()
        assert native is not None
        self.native = native
        self.record = native.DequantizeArgs(
            rows=problem.m, k=problem.n, element=FORMATS[fmt], layout=_ROWS,
            out_dtype=FLOAT_DTYPES[problem.dtype], device=self.index,
        )  # fmt: skip

    def run(self, operand: Operand, into: Tensor | None = None) -> Tensor | None:
        """In new memory or in `into`; None for what native code does not take."""
        codes, scales, out = operand.codes, operand.scales, into
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=codes.device)
        args = self.record.copy(
            codes=codes.data_ptr(), scales=scales.data_ptr(), out=out.data_ptr(),
            stream=binding.stream(self.index),
        )  # fmt: skip
        return out if binding.supported(self.native.dequantize(args)) else None
