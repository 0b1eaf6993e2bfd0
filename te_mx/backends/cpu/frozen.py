"""A few rows times a weight that stands still: the quantizer and the GEMM that a table or the
registry chooses, by records that are made once. One token waits for the host as long as for
the weight otherwise. The bits are those of the steps."""

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, set_epilogue, why_not_dtype
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.binding import why_not, why_not_empty
from te_mx.backends.cpu.gemm import PANELS, Panel, Products, run
from te_mx.backends.cpu.grouped import GroupedGemmCall, run_call
from te_mx.backends.native import FORMATS, fields_of, fields_to, set_tensor_scale
from te_mx.dispatch.calls import Epilogue
from te_mx.dispatch.groups import host_bounds
from te_mx.dispatch.kernels import Plan
from te_mx.dispatch.linear import FrozenCall, FrozenKernel
from te_mx.dispatch.problem import FROZEN_ROWS, STREAM_ROWS, Problem
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


# ------------------------------------------------------------------------------------ frozen as is
# A few rows as they are times a weight that stands still: stream kernels decode its codes as they
# read them. A row has the same bits beside whatever other rows a kernel takes.
# Beyond, decoding once for all rows and torch's product are faster.
MOST_ROWS = {f"{level}_stream": STREAM_ROWS for level in PANELS}
MOST_ROWS |= {"avx512_bf16_stream": FROZEN_ROWS, "amx_stream": 2 * STREAM_ROWS}
MOST_ROWS["portable_stream"] = 4


def stream_for(dtype: torch.dtype) -> str:
    """The stream kernel of the level in use for a dtype: on bf16 that of bf16, else of fp32."""
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

    def run(call: FrozenCall) -> "tuple[Tensor, str] | None":
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
