"""Calls on plain rowwise codes: the GEMM that reads those of 4 bits; and, by native records that
are made once, calls that make codes of matrices of one size, and values of such codes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from te_mx.backends.base import (
    FLOAT_DTYPES,
    FORMATS,
    LAYOUTS,
    SCALE_RULES,
    Epilogue,
    code_bytes,
    pointer,
)
from te_mx.backends.base import Operand as NativeOperand
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


def gemm(
    a: NativeOperand, b: NativeOperand, epilogue: Epilogue, out: Tensor, aux: Tensor | None,
    spread: int, scratch: Callable[[int], Tensor | None], parts: int = 1,
) -> tuple[bool, Tensor | None]:  # fmt: skip
    """Enqueue out = epilogue(b @ a^T), where a is plain MXFP4: (whether native code took it, the
    bias gradient of the result or None). b is packed before unless it is packed, by native code
    itself where it is plain MXFP4 too."""
    native = binding.native()
    assert native is not None
    args, bias_grad, _alive = binding.gemm_record(a, b, epilogue, out, aux, parts)
    if a.codes.data_ptr() % 16:
        return False, None
    room, scales_at = 0, 0
    if b.order != "sm90" and (b.fmt != "e2m1" or b.order != "k_last"):
        room, scales_at = native.packed_bytes(b.rows, b.k)
        args.lhs = args.lhs.copy(layout=LAYOUTS["sm90"])
    args.workspace_bytes = own = native.codes_workspace_bytes(args)
    if own + room:
        base = pointer(scratch(own + room))
        if room:
            binding.pack_into(b, spread, base, base + scales_at)
            args.lhs = args.lhs.copy(codes=base, scales=base + scales_at)
        args.workspace = base + room
    return binding.supported(native.gemm_codes(args)), bias_grad
