"""Calls of a panel GEMM whose native record is made once, on operands that are packed already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, LAYOUTS, format_fields, pointer
from te_mx.backends.cpu import binding
from te_mx.backends.native import words_of
from te_mx.dispatch.problem import Problem
from te_mx.layouts.operand import Operand
from te_mx.runtime import workspace
from te_mx.runtime.cpu_memory import CPU


class PreparedGemm:
    """GEMMs of one size by one kernel without an epilogue."""

    __slots__ = ("lhs", "lhs_form", "native", "record", "rhs", "rhs_form")

    def __init__(self, kernel: str, problem: Problem) -> None:
        native = binding.native()
        assert native is not None
        self.native: Any = native
        number, k = binding.KERNEL_IDS[kernel], problem.k
        self.lhs = self._side(problem.lhs, problem.m, k)
        self.rhs = self._side(problem.rhs, problem.n, k)
        self.lhs_form = number, binding.ROLES["b"], problem.m, k
        self.rhs_form = number, binding.ROLES["a"], problem.n, k
        self.record = native.GemmArgs(
            out_dtype=FLOAT_DTYPES[problem.dtype], ldo=problem.n, kernel=number
        )

    def _side(self, spec: str, rows: int, k: int) -> Any:
        fmt, order = words_of(spec)
        return self.native.Operand(rows=rows, k=k, layout=LAYOUTS[order], **format_fields(fmt))

    def run(self, lhs: Operand, rhs: Operand, out: Tensor) -> bool:
        """out = lhs @ rhs^T; False where an operand is not as this kernel packs it."""
        b, a = _given(self.lhs, lhs, self.lhs_form), _given(self.rhs, rhs, self.rhs_form)
        if a is None or b is None:
            return False
        native = self.native
        args = self.record.copy(
            lhs=b, rhs=a, out=out.data_ptr(), threads=torch.get_num_threads()
        )  # fmt: skip
        nbytes = native.workspace_bytes(args)
        scratch = None
        if nbytes:
            scratch = workspace.acquire(CPU, nbytes)
            args.workspace, args.workspace_bytes = pointer(scratch), nbytes
        done = binding.supported(native.gemm(args)[0])
        workspace.release(scratch, nbytes)
        return done


def _given(record: Any, operand: Operand, form: tuple[int, int, int, int]) -> Any:
    codes, scales = operand.codes, operand.scales
    packed = binding.packed_at(operand.packed, form)
    if not packed or not (codes.is_contiguous() and scales.is_contiguous()):
        return None
    return record.copy(codes=codes.data_ptr(), scales=scales.data_ptr(), packed=packed)
