"""The native quantizer of the CPU, and the way back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES as DTYPES
from te_mx.backends.base import TENSOR_SCALES, UPRIGHT, matrix, pointer, why_not_dtype
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.binding import why_not, why_not_empty
from te_mx.backends.native import (
    BLOCKWISE,
    MX,
    fields_of,
    fields_to,
    is_native,
    set_tensor_scale,
    words_of,
)
from te_mx.backends.reference.fused import inverse
from te_mx.dispatch import run
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.fused import ACT_IDS, ActParts, ActStep, NormParts, NormStep, Target
from te_mx.dispatch.kernels import Kernel, Plan
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
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


def empty_operand(spec: str, rows: int, k: int, groups: int | None = None) -> Operand:
    """An operand to write; with a number of groups, that of tokens in groups."""
    fmt, layout = spec_of(spec)
    if groups is None:
        codes, scales = layout.shapes(fmt, rows, k)
    else:
        codes, scales = layout.grouped_shapes(fmt, rows, k, groups)
    whole = None
    if fmt.tensor_scaled:
        shape = fmt.tensor_scale_shape(rows)
        if groups is None:
            whole = torch.empty(shape, dtype=torch.float32, device=CPU)
        else:  # a group without rows has 1
            whole = torch.ones(shape or groups, dtype=torch.float32, device=CPU)
    return Operand(
        cpu_memory.empty(codes, _U8),
        torch.empty(scales, dtype=fmt.scaling.storage, device=CPU), spec, rows, k, None, whole,
    )  # fmt: skip


def _set_tensor_scale(args: Any, side: str, made: Operand) -> None:
    whole = made.tensor_scale
    if whole is not None:
        setattr(args, f"{side}_tensor_scale", whole.data_ptr())
        if whole.dim() == 1:
            setattr(args, f"{side}_tensor_scales", TENSOR_SCALES["groups"])


def set_outputs(
    args: Any, row: str, col: str, sizes: Sequence[int], col_sum: bool, groups: int | None = None
) -> tuple[Quantized, Tensor | None]:
    """Write into a native record where what is made of a matrix, or of one in so many groups, goes:
    the operands and sums that it fills, and scratch memory."""
    made_row = made_col = sums = partial = None
    rows, cols = sizes
    if row:
        made_row = empty_operand(row, rows, cols, groups)
        args.row_codes, args.row_scales = made_row[0].data_ptr(), made_row[1].data_ptr()
        _set_tensor_scale(args, "row", made_row)
    if col:
        made_col = empty_operand(col, cols, rows, groups)
        args.col_codes, args.col_scales = made_col[0].data_ptr(), made_col[1].data_ptr()
        _set_tensor_scale(args, "col", made_col)
    if col_sum:
        each, many = binding.native().COL_SUM_ROWS, () if groups is None else (groups,)
        sums = torch.empty((*many, cols), dtype=torch.float32, device=CPU)
        parts = -(-rows // each) if groups is None else rows // each + groups
        partial = torch.empty((parts, cols), dtype=torch.float32, device=CPU)
        args.col_sum, args.col_sum_ws = sums.data_ptr(), partial.data_ptr()
    return Quantized(made_row, made_col, sums), partial


def _turned(made: Operand | None, spec: str) -> Operand | None:
    """The operand of blocks of 128 x 1 that the other direction's is."""
    return None if made is None else Operand(made.codes, made.scales, spec, made.k, made.rows)


class Quantizer:
    """Matrices of one size and dtype, quantized as a problem says; the record is made once."""

    __slots__ = ("col", "native", "record", "row", "sizes")

    def __init__(self, p: Problem) -> None:
        self.native, self.row, self.col, self.sizes = binding.native(), p.lhs, p.rhs, (p.m, p.n)
        self.record = self.native.QuantizeArgs(
            x_rows=p.m, x_cols=p.n, x_dtype=DTYPES[p.dtype], **fields_to(p.lhs, p.rhs, p.rule)
        )

    def __call__(self, what: Quantize) -> Quantized | None:
        x, _, _, _, col_sum, sum_dtype, seed, first = what
        row_stride, col_stride = x.stride()
        if row_stride != 1 and col_stride != 1:
            x = x.contiguous()
            row_stride, col_stride = x.stride()
        args = self.record.copy(
            x_data=x.data_ptr(), x_row_stride=row_stride, x_col_stride=col_stride,
            seed=pointer(seed), first=first, threads=torch.get_num_threads(),
        )  # fmt: skip
        made, _partial = set_outputs(args, self.row, self.col, self.sizes, col_sum)
        status = self.native.quantize(args)
        if status and not binding.supported(status):
            return None
        if made.col_sum is not None and sum_dtype != torch.float32:
            made = made._replace(col_sum=made.col_sum.to(sum_dtype))
        return made


def why_not_nvfp4(problem: Problem) -> str | None:
    """Why NVFP4 is left to plain torch where it is transformed, or is of float16."""
    for spec in (problem.lhs, problem.rhs):
        fmt = spec_of(spec).format if spec else None
        if fmt is None or not fmt.tensor_scaled or fmt.transform is None:
            continue
        if fmt.scaling.block[0] != 1:
            return "transforms NVFP4 with scales of 1 x 16"
    if problem.rule == "compressed_tensors" and problem.dtype == torch.float16:
        return "does not take float16 for compressed_tensors"
    return None


class CpuQuantize(Kernel):
    op, name = "quantize", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True, columnwise=True, random=True, nvfp4=True)
        reason = reason or why_not_nvfp4(problem) or takes(problem.lhs, problem.rhs)
        return reason or why_not_empty(problem) or why_not_dtype(problem)

    def make_plan(self, problem: Problem) -> Plan:
        row, col = problem.lhs, problem.rhs
        if not _is_upright(row or col):
            return Quantizer(problem)
        lying = Quantizer(problem._replace(lhs=_across(col), rhs=_across(row)))

        def upright(what: Quantize) -> "Quantized | None":
            made = lying(what)
            if made is None:
                return None
            return Quantized(_turned(made.col, row), _turned(made.row, col), made.col_sum)

        return upright


class CpuDequantize(Kernel):
    op, name = "dequantize", "cpu"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True, columnwise=True, nvfp4=True)
        reason = reason or why_not_empty(problem)
        return reason or why_not_dtype(problem, "gives")  # fp64 is for tests: torch does it

    def run(
        self, operand: Operand, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor | None:
        codes, scales = operand.codes.contiguous(), operand.scales.contiguous()
        rows, k = operand.rows, operand.k
        k_first = operand.layout.k_first
        out = into
        if out is None or k_first:
            out = cpu_memory.empty((k, rows) if k_first else (rows, k), dtype)
        native = binding.native()
        args = native.DequantizeArgs(
            codes=codes.data_ptr(), scales=scales.data_ptr(), rows=rows, k=k, out=out.data_ptr(),
            out_dtype=DTYPES[dtype], threads=torch.get_num_threads(), **fields_of(operand.spec),
        )  # fmt: skip
        set_tensor_scale(args, "", operand)
        if not binding.supported(native.dequantize(args)):
            return None
        return out.t() if k_first else out


register(CpuQuantize())
register(CpuDequantize())


# ------------------------------------------------------------------------------------- fused steps
# The fused steps of the CPU: tiles of values go from the first-level cache to the quantizer, plain
# operands alone, columns as they lie.
_F32 = torch.float32


def _rows(x: Tensor) -> Tensor:
    """x with adjacent elements in each row."""
    return x if x.stride(1) == 1 else x.contiguous()


class _Ends:
    """In what the steps of a problem end: the operands of its specs where native code makes these,
    else values that the quantizer reads."""

    def __init__(self, p: Problem) -> None:
        self.native, self.specs = binding.native(), (p.lhs, p.rhs)
        lie = p.lhs.partition("@")[2] in ("", "rows") and p.rhs.partition("@")[2] in ("", "cols")
        self.known = lie and is_native(Target(p.lhs, p.rhs, p.rule), MX + BLOCKWISE)
        self.fields = fields_to(p.lhs, p.rhs, p.rule) if self.known else {}


class _Fused(Kernel):
    name = "cpu"

    def __init__(self, op: str, planner: type | None = None) -> None:
        self.op, self.planner = op, planner

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(lhs="", rhs="", rule="rceil"))
        return reason or why_not_empty(problem) or why_not_dtype(problem)


class Norms(_Ends):
    """Normalizations of matrices of one size."""

    def __init__(self, p: Problem) -> None:
        super().__init__(p)
        self.record = self.native.NormArgs(x_rows=p.m, x_cols=p.n, inverse=inverse(p.n))
        self.ending = self.record.copy(**self.fields)

    def __call__(self, s: NormStep) -> NormParts:
        x, weight, bias, norm, dtype, keep, target = s
        ends = self.known and not target.col_sum
        x, weight = _rows(x), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        (rows, cols), rms = x.shape, norm.kind == "RMSNorm"
        mean = None if rms else torch.empty(rows, dtype=_F32, device=CPU)
        rstd = torch.empty(rows, dtype=_F32, device=CPU)
        z = cpu_memory.empty((rows, cols), dtype) if keep or not ends else None
        args = (self.ending if ends else self.record).copy(
            x_data=x.data_ptr(), x_row_stride=x.stride(0), x_dtype=DTYPES[x.dtype], rms=rms,
            eps=norm.eps, weight=weight.data_ptr(), bias=pointer(bias), mean=pointer(mean),
            rstd=rstd.data_ptr(), z=pointer(z), z_dtype=DTYPES[dtype],
            threads=torch.get_num_threads(),
        )  # fmt: skip
        made = set_outputs(args, *self.specs, (rows, cols), False)[0] if ends else None
        binding.supported(self.native.normalize(args))
        if made is None:
            assert z is not None
            made = run.quantized(z, target)
        return NormParts(mean, rstd, z if keep else None, made)


class CpuNormBackward(_Fused):
    def run(
        self, dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        native = binding.native()
        dz, x, weight = dz.contiguous(), _rows(x), weight.contiguous()
        mean, rstd = None if mean is None else mean.contiguous(), rstd.contiguous()
        rows, cols = x.shape
        dx = cpu_memory.empty((rows, cols), dtype)
        dweight = torch.empty(cols, dtype=_F32, device=CPU)
        dbias = torch.empty(cols, dtype=_F32, device=CPU)
        partial = torch.empty(2, -(-rows // native.COL_SUM_ROWS), cols, dtype=_F32, device=CPU)
        args = native.NormGradArgs(
            dz=matrix(native, dz), x=matrix(native, x), rms=mean is None, inverse=inverse(cols),
            weight=weight.data_ptr(), mean=pointer(mean), rstd=rstd.data_ptr(), dx=dx.data_ptr(),
            dx_dtype=DTYPES[dtype], dweight=dweight.data_ptr(), dbias=dbias.data_ptr(),
            partial=partial.data_ptr(), threads=torch.get_num_threads(),
        )  # fmt: skip
        binding.supported(native.normalize_backward(args))
        return dx, dweight, dbias


class Activations(_Ends):
    """Activations of matrices of one size, and their gradients."""

    def __init__(self, p: Problem) -> None:
        super().__init__(p)
        self.record = self.native.ActArgs(h_rows=p.m, h_cols=p.n, h_row_stride=p.n)
        self.ending = self.record.copy(**self.fields)

    def __call__(self, s: ActStep) -> ActParts:
        made = self._made(s) if self.known else None
        if made is not None:
            return made
        # Blocks that straddle the halves of a gated gradient, or another layout.
        values = self._made(s._replace(keep=True, target=Target("", "", "rceil")), False)
        assert values is not None and values.out is not None
        return ActParts(values.out if s.keep else None, run.quantized(values.out, s.target))

    def _made(self, s: ActStep, ends: bool = True) -> ActParts | None:
        """One native call, which ends in the quantizer or not; None for what it does not take."""
        h, grad, act, dtype, keep, target = s
        h, grad = h.contiguous(), None if grad is None else grad.contiguous()
        rows, width = h.shape
        cols = width // 2 if act.gated and grad is None else width
        out = cpu_memory.empty((rows, cols), dtype) if keep else None
        args = (self.ending if ends else self.record).copy(
            h_data=h.data_ptr(), h_dtype=DTYPES[h.dtype], act=ACT_IDS[act.base], gated=act.gated,
            limit=act.limit, alpha=act.alpha, offset=act.offset, out=pointer(out),
            out_dtype=DTYPES[dtype], threads=torch.get_num_threads(),
        )  # fmt: skip
        if grad is not None:
            args.grad = matrix(self.native, grad)
        made, _partial = Quantized(), None
        if ends:
            made, _partial = set_outputs(args, *self.specs, (rows, cols), target.col_sum)
        return ActParts(out, made) if binding.supported(self.native.activate(args)) else None


register(_Fused("norm_quantize", Norms))
register(CpuNormBackward("norm_backward"))
register(_Fused("act_quantize", Activations))
