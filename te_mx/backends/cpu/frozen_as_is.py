"""A few rows as they are times a weight that stands still: stream kernels decode its codes as they
read them. A row has the same bits beside whatever other rows a kernel takes."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, set_epilogue, why_not_dtype
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.envelope import why_not, why_not_empty
from te_mx.backends.cpu.frozen import OneCopy
from te_mx.backends.cpu.gemm import PANELS, run
from te_mx.backends.cpu.grouped import GroupedGemmCall, run_call
from te_mx.backends.native import fields_of, set_tensor_scale
from te_mx.dispatch.calls import Epilogue
from te_mx.dispatch.groups import host_bounds
from te_mx.dispatch.kernels import Plan
from te_mx.dispatch.linear import FrozenCall
from te_mx.dispatch.problem import FROZEN_ROWS, STREAM_ROWS, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import ROWS, spec_of
from te_mx.layouts.operand import Operand, Stack
from te_mx.runtime.cpu_memory import CPU

# Beyond, decoding once for all rows and torch's product are faster.
MOST_ROWS = {f"{level}_stream": STREAM_ROWS for level in PANELS}
MOST_ROWS |= {"avx512_bf16_stream": FROZEN_ROWS, "amx_stream": 2 * STREAM_ROWS}
MOST_ROWS["portable_stream"] = 4


def stream_for(dtype: torch.dtype) -> str:
    """The stream kernel of the level in use that multiplies values of a dtype: on bf16 those of
    bf16, else on fp32."""
    levels = [one for one in PANELS if dtype == torch.bfloat16 or PANELS[one].endswith("_f32")]
    return next(
        name for name in (f"{one}_stream" for one in levels) if binding.kernel_available(name)
    )


class AsTheyAre:
    """Products of one size, by a record that is made once."""

    def __init__(self, p: Problem) -> None:
        self.native, self.sizes = binding.native(), (p.m, p.n, p.k)
        rows = f"{spec_of(p.rhs).format.name}@{ROWS.name}"
        self.record = self.native.GemmArgs(
            lhs_rows=p.m, lhs_k=p.k, rhs_rows=p.n, rhs_k=p.k, ldo=p.n,
            values_dtype=FLOAT_DTYPES[p.dtype], kernel=binding.KERNEL_IDS[stream_for(p.dtype)],
            **fields_of(rows, "rhs"),
        )  # fmt: skip

    def __call__(self, call: FrozenCall) -> tuple[Tensor, str] | None:
        x, weight, bias_N, out_dtype, *more = call
        if any(one is not None for one in more) or not isinstance(weight, Operand):
            return None
        m, n, k = self.sizes
        x_MK = x.reshape(m, k)
        if x_MK.stride(1) != 1:
            x_MK = x_MK.contiguous()
        y_MN = torch.empty((m, n), dtype=out_dtype, device=CPU)
        args = self.record.copy(
            values_data=x_MK.data_ptr(), values_row_stride=x_MK.stride(0), out=y_MN.data_ptr(),
            rhs_codes=weight.codes.data_ptr(), rhs_scales=weight.scales.data_ptr(),
            out_dtype=FLOAT_DTYPES[out_dtype], threads=torch.get_num_threads(),
        )  # fmt: skip
        set_tensor_scale(args, "rhs_", weight)
        _alive = set_epilogue(args, Epilogue(bias_N), None)
        ran = run(self.native, args)
        return None if ran is None else (y_MN.view(*x.shape[:-1], n), ran)


def grouped(p: Problem) -> Plan:
    """Products of the rows of groups: one native call, one parallel region."""
    name = stream_for(p.dtype)

    def run(call: FrozenCall) -> tuple[Tensor, str] | None:
        x, weights, bias_GN, out_dtype, offs, *more = call
        if any(one is not None for one in more) or not isinstance(weights, Stack) or offs is None:
            return None
        x_RK = x.reshape(-1, p.k)
        if x_RK.stride(1) != 1:
            x_RK = x_RK.contiguous()
        y_RN = torch.empty((len(x_RK), p.n), dtype=out_dtype, device=CPU)
        bounds = host_bounds(offs, 0, len(x_RK))
        made = GroupedGemmCall((name, name), x_RK, weights, bounds, y_RN, bias_GN)
        ran = run_call(made)
        return None if ran is None else (y_RN.view(*x.shape[:-1], p.n), ran or name)

    return run


class AsIs(OneCopy):
    """Weights in every format that the GEMM takes, as they lie; inputs that are not quantized."""

    name = "cpu_as_is"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True, nvfp4=True) or why_not_empty(problem)
        if reason is None and problem.lhs:
            reason = "takes inputs as they are"
        if reason is None:
            reason = why_not_dtype(problem)
        most = MOST_ROWS[stream_for(problem.dtype)] * (problem.groups or 1) if reason is None else 0
        if reason is None and problem.m > most:
            reason = f"takes at most {most} rows"
        return reason

    def make_plan(self, problem: Problem) -> Plan:
        return grouped(problem) if problem.groups else AsTheyAre(problem)

    def sums(self, problem: Problem) -> str:
        return stream_for(problem.dtype)  # a row's, whatever rows are beside it


register(AsIs())
