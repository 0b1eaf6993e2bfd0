"""The fused steps of the CPU: tiles of values go from the first-level cache to the quantizer, plain
operands alone, columns as they lie."""

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES as DTYPES
from te_mx.backends.base import matrix, pointer, why_not_dtype
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.binding import why_not, why_not_empty
from te_mx.backends.cpu.quantize import set_outputs
from te_mx.backends.native import BLOCKWISE, MX, fields_to, is_native
from te_mx.backends.reference.fused import inverse
from te_mx.dispatch import run
from te_mx.dispatch.fused import ACT_IDS, ActParts, ActStep, NormParts, NormStep, Target
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts.operand import Quantized
from te_mx.runtime import cpu_memory
from te_mx.runtime.cpu_memory import CPU

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
