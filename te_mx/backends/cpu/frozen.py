"""A few rows times a weight that stands still: the quantizer and the GEMM that a table or the
registry chooses, by records that are prepared once. One token waits for the host as long as for
the weight otherwise. The bits are those of the steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES, format_fields
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.envelope import why_not
from te_mx.backends.cpu.gemm import Panel
from te_mx.backends.native import FORMATS, words_of
from te_mx.dispatch.linear import FrozenCall, FrozenKernel
from te_mx.dispatch.problem import STREAM_ROWS, Problem
from te_mx.dispatch.registry import derived, pick, register
from te_mx.layouts import ROWS, spec_of
from te_mx.layouts.operand import Operand, Stack
from te_mx.runtime import workspace
from te_mx.runtime.cpu_memory import CPU

_ALIGN = 64


class _Plan(NamedTuple):
    """What does not change between calls of one size: records of both calls, where scales and the
    workspace of the GEMM lie behind the codes of x, and all bytes."""

    quantize: Any
    gemm: Any
    scales: int
    rest: int
    nbytes: int


class Frozen(FrozenKernel):
    """Inputs in MXFP8, weights in MXFP8 or MXFP4, as they lie."""

    name = "cpu_frozen"
    multiplies = False

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem)
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

    def form(self, row: Operand | Stack) -> Operand | Stack | None:
        """The weight itself."""
        return row.checked("the weight") if row.layout is ROWS else None

    def multiply(self, p: Problem, call: FrozenCall) -> tuple[Tensor, str] | None:
        x, weight, bias_N, out_dtype, _, *more = call
        if any(one is not None for one in more) or not isinstance(weight, Operand):
            return None
        known, key = derived(), (self.name, p, weight.spec, weight.packed is None, out_dtype)
        if key not in known:
            known[key] = _plan(p, weight, out_dtype)
        plan = known[key]
        if plan is None:
            return None
        x_MK = x if x.dim() == 2 else x.reshape(p.m, p.k)
        row_stride, col_stride = x_MK.stride()
        if row_stride != 1 and col_stride != 1:
            x_MK = x_MK.contiguous()
            row_stride, col_stride = x_MK.stride()
        y = torch.empty((*x.shape[:-1], p.n), dtype=out_dtype, device=CPU)
        scratch = workspace.acquire(CPU, plan.nbytes)
        base, threads = scratch.data_ptr(), torch.get_num_threads()  # type: ignore[union-attr]
        made = plan.quantize.copy(
            x_data=x_MK.data_ptr(), x_row_stride=row_stride, x_col_stride=col_stride,
            row_codes=base, row_scales=base + plan.scales, threads=threads,
        )  # fmt: skip
        args = plan.gemm.copy(
            lhs_codes=base, lhs_scales=base + plan.scales, rhs_codes=weight.codes.data_ptr(),
            rhs_scales=weight.scales.data_ptr(), out=y.data_ptr(), threads=threads,
            workspace=base + plan.rest,
        )  # fmt: skip
        args.rhs_packed = _address(weight, plan.gemm.kernel)
        if bias_N is not None:
            bias_N = bias_N.contiguous()
            args.bias, args.bias_dtype = bias_N.data_ptr(), FLOAT_DTYPES[bias_N.dtype]
        native = binding.native()
        status, ran = native.quantize(made), 0  # type: ignore[union-attr]
        if not status:
            status, ran = native.gemm(args)  # type: ignore[union-attr]
        workspace.release(scratch, plan.nbytes)
        if status and not binding.supported(status):
            return None
        return y, binding.KERNELS[ran]


def _address(weight: Operand, kernel: int) -> int:
    """Of a packed form of this kernel's; 0 for that of another one."""
    return binding.packed_at(weight.packed, (kernel, binding.ROLES["a"], weight.rows, weight.k))


def _plan(p: Problem, weight: Operand, out_dtype: torch.dtype) -> _Plan | None:
    """None where the steps would not run on this backend's GEMM."""
    name = spec_of(p.lhs).format.name
    spec = f"{name}@{ROWS.name}"
    kernel = pick("gemm", CPU, spec, weight.spec, (p.m, p.n, p.k), out_dtype)
    if not isinstance(kernel, Panel):
        return None
    native: Any = binding.native()
    codes, scales = ROWS.shapes(spec_of(spec).format, p.m, p.k)
    at_scales = _aligned(codes[0] * codes[1])
    rest = at_scales + _aligned(scales[0] * scales[1])
    x, w = (format_fields(words_of(one)[0]) for one in (spec, weight.spec))
    quantize = native.QuantizeArgs(
        x_rows=p.m, x_cols=p.k, x_dtype=FLOAT_DTYPES[p.dtype], rule=SCALE_RULES[p.rule], **x
    )
    lhs = native.Operand(rows=p.m, k=p.k, **x)
    rhs = native.Operand(rows=p.n, k=p.k, **w)
    gemm = native.GemmArgs(
        lhs=lhs, rhs=rhs, out_dtype=FLOAT_DTYPES[out_dtype], ldo=p.n,
        kernel=binding.KERNEL_IDS[kernel.name],
    )  # fmt: skip
    nbytes = native.workspace_bytes(gemm.copy(rhs_packed=_address(weight, gemm.kernel)))
    gemm.workspace_bytes = nbytes
    return _Plan(quantize, gemm, at_scales, rest, rest + nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


register(Frozen())
