"""A few rows times a weight that stands still: the quantizer and the GEMM that a table or the
registry chooses, by records that are made once. One token waits for the host as long as for
the weight otherwise. The bits are those of the steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.envelope import why_not
from te_mx.backends.cpu.gemm import Panel, Products
from te_mx.backends.native import FORMATS, fields_to, set_tensor_scale
from te_mx.dispatch.linear import FrozenCall, FrozenKernel
from te_mx.dispatch.problem import STREAM_ROWS, Problem
from te_mx.dispatch.registry import pick, register
from te_mx.layouts import ROWS, spec_of
from te_mx.layouts.operand import Operand, Stack
from te_mx.runtime import workspace
from te_mx.runtime.cpu_memory import CPU

_ALIGN = 64


class FewRows:
    """Products of one size: records of both calls, where the scales of x and the workspace of the
    GEMM lie behind its codes. The GEMM is found at the first call for a dtype of results."""

    def __init__(self, problem: Problem) -> None:
        p = problem
        self.problem, self.gemms = p, dict[torch.dtype, Any]()
        self.x_spec = f"{spec_of(p.lhs).format.name}@{ROWS.name}"
        codes, scales = ROWS.shapes(spec_of(self.x_spec).format, p.m, p.k)
        self.scales = _aligned(codes[0] * codes[1])
        self.rest = self.scales + _aligned(scales[0] * scales[1])
        self.native = binding.native()
        self.quantize = self.native.QuantizeArgs(
            x_rows=p.m, x_cols=p.k, x_dtype=FLOAT_DTYPES[p.dtype],
            **fields_to(self.x_spec, "", p.rule),
        )  # fmt: skip

    def __call__(self, call: FrozenCall) -> tuple[Tensor, str] | None:
        x, weight, bias_N, out_dtype, _, *more = call
        if any(one is not None for one in more) or not isinstance(weight, Operand):
            return None
        p = self.problem
        if out_dtype not in self.gemms:
            self.gemms[out_dtype] = self._gemm(weight, out_dtype)
        gemm = self.gemms[out_dtype]
        if gemm is None:
            return None
        x_MK = x if x.dim() == 2 else x.reshape(p.m, p.k)
        row_stride, col_stride = x_MK.stride()
        if row_stride != 1 and col_stride != 1:
            x_MK = x_MK.contiguous()
            row_stride, col_stride = x_MK.stride()
        y = torch.empty((*x.shape[:-1], p.n), dtype=out_dtype, device=CPU)
        threads, native = torch.get_num_threads(), self.native
        args = gemm.copy(
            rhs_codes=weight.codes.data_ptr(), rhs_scales=weight.scales.data_ptr(),
            out=y.data_ptr(), threads=threads,
        )  # fmt: skip
        set_tensor_scale(args, "rhs_", weight)
        if weight.packed is not None:  # 0 for a form of another kernel's
            form = gemm.kernel, binding.ROLES["a"], weight.rows, weight.k
            args.rhs_packed = binding.packed_at(weight.packed, form)
        if bias_N is not None:
            bias_N = bias_N.contiguous()
            args.bias, args.bias_dtype = bias_N.data_ptr(), FLOAT_DTYPES[bias_N.dtype]
        own = args.workspace_bytes = native.workspace_bytes(args)
        nbytes = self.rest + own
        scratch = workspace.acquire(CPU, nbytes)
        base: int = scratch.data_ptr()  # type: ignore[union-attr]
        args.lhs_codes, args.lhs_scales = base, base + self.scales
        args.workspace = base + self.rest
        made = self.quantize.copy(
            x_data=x_MK.data_ptr(), x_row_stride=row_stride, x_col_stride=col_stride,
            row_codes=base, row_scales=base + self.scales, threads=threads,
        )  # fmt: skip
        status, ran = native.quantize(made), 0
        if not status:
            status, ran = native.gemm(args)
        workspace.release(scratch, nbytes)
        if status and not binding.supported(status):
            return None
        return y, binding.KERNELS[ran]

    def _gemm(self, weight: Operand, out_dtype: torch.dtype) -> Any:
        """The record of the product; None where the steps would not run on this backend's GEMM."""
        p, w = self.problem, weight.spec
        sizes = p.m, p.n, p.k
        kernel = pick("gemm", CPU, self.x_spec, w, sizes, out_dtype, p.precision)
        if not isinstance(kernel, Panel):
            return None
        return Products(
            kernel.name, p._replace(lhs=self.x_spec, rhs=w, dtype=out_dtype)
        ).record  # fmt: skip


class OneCopy(FrozenKernel):
    """What reads plain codes as they lie, and keeps no form of its own."""

    def form(self, row: Operand | Stack) -> Operand | Stack | None:
        """The weight itself."""
        return row.checked("the weight") if row.layout is ROWS else None


class Frozen(OneCopy):
    """Inputs in MXFP8, weights in MXFP8, MXFP4 or NVFP4, as they lie."""

    name, planner = "cpu_frozen", FewRows
    multiplies, invariant = False, True

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, nvfp4=True)
        if reason is None and not problem.lhs:
            reason = "takes inputs that are quantized"
        if reason is None and spec_of(problem.lhs).format.name not in FORMATS:
            reason = f"takes inputs in {' and '.join(FORMATS)}"
        if reason is None and (problem.empty or problem.dtype not in FLOAT_DTYPES):
            reason = "takes float32, bfloat16 and float16, nothing empty"
        if reason is None and problem.groups:
            reason = "takes one weight"
        if reason is None and problem.m > STREAM_ROWS:
            reason = f"takes at most {STREAM_ROWS} rows"
        return reason


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


register(Frozen())
