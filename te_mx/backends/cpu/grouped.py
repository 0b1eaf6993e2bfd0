"""Grouped problems on the CPU: one native call, one parallel region for all groups."""

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import BLOCK_ROWS, FLOAT_DTYPES, pointer, typed_address
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.binding import (
    HEADER_BYTES,
    KERNEL_IDS,
    KERNELS,
    ROLES,
    supported,
    why_not,
    why_not_empty,
)
from te_mx.backends.cpu.gemm import PANELS
from te_mx.backends.cpu.quantize import set_outputs, why_not_nvfp4
from te_mx.backends.native import (
    fields_to,
    one_read,
    one_read_of_weights,
    record_of,
    routed_record,
    words_of,
)
from te_mx.dispatch.calls import (
    GroupedK,
    GroupedRows,
    QuantizeGroups,
    QuantizeWeights,
    StackedParts,
)
from te_mx.dispatch.groups import Bounds, host_bounds
from te_mx.dispatch.kernels import Kernel, PreferredLayouts
from te_mx.dispatch.moe import RoutedGemm
from te_mx.dispatch.problem import INVARIANT, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack
from te_mx.runtime import cpu_memory, workspace
from te_mx.runtime.cpu_memory import CPU
from te_mx.runtime.kernel_log import note_written


def _strided(x: Tensor) -> tuple[Tensor, dict[str, int]]:
    """x with rows or columns that lie next to each other, as the quantizer reads them, and what a
    native record says of it."""
    if 1 not in x.stride():
        x = x.contiguous()
    (rows, cols), (row_stride, col_stride) = x.shape, x.stride()
    return x, {
        "x_data": x.data_ptr(), "x_rows": rows, "x_cols": cols, "x_row_stride": row_stride,
        "x_col_stride": col_stride, "x_dtype": FLOAT_DTYPES[x.dtype],
    }  # fmt: skip


def _groups(bounds: Bounds) -> tuple[Any, Any]:
    """The native record of groups, and what it holds the addresses of."""
    (count, starts, ends), keep = bounds.addresses()
    return binding.native().Groups(count=count, starts=starts, ends=ends), keep


def quantize(what: QuantizeGroups, bounds: Bounds) -> Quantized | None:
    """The tokens of all groups; None for what native code does not take."""
    _, _, row_spec, col_spec, rule, col_sum, seed = what
    native = binding.native()
    _x, source = _strided(what.x)
    args = native.GroupedQuantizeArgs(
        seed=pointer(seed), threads=torch.get_num_threads(), **source,
        **fields_to(row_spec, col_spec, rule),
    )  # fmt: skip
    made, _partial = set_outputs(args, row_spec, col_spec, what.x.shape, col_sum, len(bounds.ends))
    args.groups, _keep = _groups(bounds)
    return made if supported(native.quantize_grouped(args)) else None


# --------------------------------------------------------------------------------------------- pack
def packed_stride(kernel: str, stack: Stack) -> int:
    """Bytes of the packed form of one group; 0 when the kernel reads plain codes."""
    wide = words_of(stack.spec)[0] in BLOCK_ROWS
    sizes = stack.rows, stack.k
    nbytes: int = binding.native().packed_bytes(KERNEL_IDS[kernel], ROLES["a"], *sizes, wide)
    return (nbytes + 63) // 64 * 64


def pack(stack: Stack, kernel: str) -> Tensor | None:
    """The packed forms of all groups behind one header, uint8; None when there are none."""
    stride = packed_stride(kernel, stack)
    if stride == 0:
        return None
    packed = torch.empty(HEADER_BYTES + stack.groups * stride, dtype=torch.uint8, device=CPU)
    return packed if binding.pack(stack, kernel, "a", packed, stride) else None


def _packed_for(packed: Tensor | None, kernel: int, stack: Stack) -> tuple[int, int]:
    """(address, stride) of packed forms that this kernel reads for these weights, or zeros."""
    form = kernel, ROLES["a"], stack.rows, stack.k, stack.groups
    at = binding.packed_at(packed, form)
    if packed is None or not at:
        return 0, 0
    return at, (packed.numel() - HEADER_BYTES) // stack.groups


# --------------------------------------------------------------------------------------------- gemm
class GroupedGemmCall:
    """One native grouped GEMM. It keeps the tensors alive whose addresses it holds.

    kernels: the names for groups of many and of few rows of lhs. lhs: an operand, or values, for
    streams. rhs: the weights of all groups, or, of products along k, an operand."""

    __slots__ = ("args", "keep")

    def __init__(
        self, kernels: tuple[str, str], lhs: Operand | Tensor, rhs: Stack | Operand, bounds: Bounds,
        out: Tensor, bias: Tensor | None = None, accumulate: bool = False, precision: str = "",
    ) -> None:  # fmt: skip
        many, few = (KERNEL_IDS[name] for name in kernels)
        native = binding.native()
        args = native.GroupedGemmArgs(
            rhs=record_of(native, rhs), ldo=out.shape[-1], along_k=isinstance(rhs, Operand),
            accumulate=accumulate, kernel=many, few_rows_kernel=few,
            threads=torch.get_num_threads(), invariant=precision == INVARIANT,
        )  # fmt: skip
        if isinstance(lhs, Tensor):
            args.lhs_rows, args.lhs_k = lhs.shape
            args.values_data, args.values_dtype = typed_address(lhs)
            args.values_row_stride = lhs.stride(0)
        else:
            args.lhs = record_of(native, lhs)
        if isinstance(rhs, Stack):
            args.rhs_packed, args.rhs_packed_stride = _packed_for(rhs.packed, many, rhs)
        if bias is not None:
            bias = bias.contiguous()
        args.out, args.out_dtype = typed_address(out)
        args.bias, args.bias_dtype = typed_address(bias)
        args.groups, arrays = _groups(bounds)
        self.keep = (lhs, rhs, arrays, out, bias)
        self.args = args

    def workspace_bytes(self) -> int:
        """Scratch bytes that `run` needs: the native formula, the only one."""
        nbytes: int = binding.native().workspace_bytes_grouped(self.args)
        return nbytes

    def run(self, workspace: Tensor | None, nbytes: int) -> str | None:
        """Run it; the names of the kernels that ran, joined by " + "; or None."""
        args = self.args
        args.workspace, args.workspace_bytes = pointer(workspace), nbytes
        status, ran = binding.native().gemm_grouped(args)
        return names_of(ran) if supported(status) else None


def names_of(ran: int) -> str:
    """The kernels of a mask."""
    return " + ".join(name for i, name in enumerate(KERNELS) if ran >> i & 1)


# ------------------------------------------------------------------------------------------ kernels
def _why_not(problem: Problem, random: bool = False) -> str | None:
    reason = why_not(problem, "grouped_cols", blockwise=True, random=random, nvfp4=True)
    reason = reason or why_not_empty(problem)
    if reason is None and problem.ends == "device":
        reason = "needs ends of groups on the CPU"
    return reason


class CpuQuantizeGroups(Kernel):
    op, name = "quantize_grouped", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        reason = _why_not(problem, random=True) or why_not_nvfp4(problem)
        return reason or one_read(problem.lhs, problem.rhs)

    def run(self, what: QuantizeGroups) -> Quantized | None:
        return quantize(what, host_bounds(*what.groups, len(what.x)))


class CpuQuantizeWeights(Kernel):
    op, name = "quantize_weights", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        reason = _why_not(problem) or why_not_nvfp4(problem)
        return reason or one_read_of_weights(problem.lhs, problem.rhs)

    def run(self, what: QuantizeWeights) -> StackedParts | None:
        weights, row_spec, col_spec, rule = what
        groups, (rows, cols), native = len(weights), weights[0].shape, binding.native()
        made: dict[str, Stack] = {}
        for side, spec, height, k in (("row", row_spec, rows, cols), ("col", col_spec, cols, rows)):
            if spec:
                fmt, layout = spec_of(spec)
                codes, scales = layout.shapes(fmt, height, k)
                made[side] = Stack(
                    cpu_memory.empty((groups, *codes), torch.uint8),
                    torch.empty((groups, *scales), dtype=fmt.scaling.storage, device=CPU),
                    spec, groups, height, k, None,
                    torch.empty((groups, *fmt.tensor_scale_shape(height)), device=CPU)
                    if fmt.tensor_scaled else None,
                )  # fmt: skip
        plan = native.QuantizeArgs(**fields_to(row_spec, col_spec, rule))
        problems, sources = [], [_strided(weight) for weight in weights]
        for i, (_, source) in enumerate(sources):
            args = plan.copy(**source)
            for side, stack in made.items():
                setattr(args, f"{side}_codes", stack.codes[i].data_ptr())
                setattr(args, f"{side}_scales", stack.scales[i].data_ptr())
                if stack.tensor_scale is not None:
                    setattr(args, f"{side}_tensor_scale", stack.tensor_scale[i].data_ptr())
            problems.append(args)
        status = native.quantize_many(problems, torch.get_num_threads())
        return (made.get("row"), made.get("col")) if supported(status) else None


def few_and_many(precision: str = "") -> tuple[str, str]:
    """Names of the kernels that the level in use runs groups of many and of few rows on."""
    level = binding.ISA_LEVELS[binding.isa()]
    level = "amx" if level == "amx_emulated" else level
    return PANELS[level], PANELS[level] if precision == INVARIANT else f"{level}_stream"


class CpuGemmRows(Kernel):
    op, name, invariant = "gemm_rows", "cpu", True

    def accepts(self, problem: Problem) -> str | None:
        return _why_not(problem)

    def note(self, problem: Problem) -> str:
        return "one parallel region for all groups"

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts("rows", "grouped_cols")

    def prepare_stack(self, stack: Stack, problem: Problem) -> Stack:
        return stack._replace(packed=pack(stack.checked("rhs"), few_and_many()[0]))

    def run(self, p: GroupedRows) -> str | None:
        bounds = host_bounds(*p.groups, p.lhs.rows)
        precision = p.mode.precision
        call = GroupedGemmCall(
            few_and_many(precision), p.lhs, p.rhs, bounds, p.out, p.bias, precision=precision
        )
        return run_call(call)


class CpuGemmK(Kernel):
    op, name = "gemm_k", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        return _why_not(problem)

    def run(self, p: GroupedK) -> str | None:
        bounds = host_bounds(*p.groups, p.lhs.k)
        call = GroupedGemmCall(few_and_many(), p.lhs, p.rhs, bounds, p.out, None, p.accumulate)
        ran = run_call(call)
        if ran is not None:
            note_written(p.out)
        return ran


def run_call(call: GroupedGemmCall) -> str | None:
    """The names of the kernels that ran, or None for what native code does not take."""
    nbytes = call.workspace_bytes()
    scratch = workspace.acquire(CPU, nbytes)
    ran = call.run(scratch, nbytes)
    workspace.release(scratch, nbytes)
    return ran


for _kernel in (CpuQuantizeGroups, CpuQuantizeWeights, CpuGemmRows, CpuGemmK):
    register(_kernel())


# ------------------------------------------------------------------------------------- routed rows
# Products of routed rows on the CPU: the rows of an expert are gathered side by side, and all
# experts run in the one parallel region of grouped products, which reads each expert's codes once.
#
# Experts of few rows run on the stream kernel of the level; a table may choose another one for
# them.
_FEW = "few rows on "


def moe_gemm(p: RoutedGemm, kernels: tuple[str, str]) -> str | None:
    """Write the routed rows of p.out, whose lists the native code reads; the names of the kernels
    that ran. kernels: as of GroupedGemmCall."""
    native = binding.native()
    ids, (many, few) = p.routing.sorted_token_ids, kernels
    args, _keep = routed_record(
        native, p, positions=0 if ids is None else len(ids), kernel=binding.KERNEL_IDS[many],
        few_rows_kernel=binding.KERNEL_IDS[few], threads=torch.get_num_threads(),
        invariant=p.mode.precision == INVARIANT,
    )  # fmt: skip
    nbytes = native.moe_workspace_bytes(args)
    scratch = workspace.acquire(CPU, nbytes)
    args.workspace, args.workspace_bytes = pointer(scratch), nbytes
    status, ran = native.moe_gemm(args)
    workspace.release(scratch, nbytes)
    return names_of(ran) if binding.supported(status) else None


class CpuMoeGemm(Kernel):
    op, name, invariant = "moe_gemm", "cpu", True

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True, nvfp4=True) or why_not_empty(problem)
        if reason is None and spec_of(problem.lhs).format.name == "nvfp4_rows":
            reason = "gathers tokens that share a tensor scale"
        return reason

    def note(self, problem: Problem) -> str:
        few = self._few_and_many(problem.precision)[1]
        return f"one parallel region for all experts, each read once; few rows on {few}"

    def configurations(self, problem: Problem) -> tuple[str, ...]:
        _, usual = few_and_many()
        level = binding.ISA_LEVELS[binding.isa()]
        levels = list(PANELS)  # higher ones first
        able = levels[levels.index("amx" if level == "amx_emulated" else level) :]
        names = (name for one in able for name in (f"{one}_stream", PANELS[one]))
        return tuple(f"{_FEW}{name}" for name in names if name != usual)

    def _few_and_many(self, precision: str) -> tuple[str, str]:
        many, few = few_and_many(precision)
        return many, self.configuration.removeprefix(_FEW) or few

    def run(self, p: RoutedGemm) -> str | None:
        ran = moe_gemm(p, self._few_and_many(p.mode.precision))
        return None if ran is None else ran or self.name


register(CpuMoeGemm())
