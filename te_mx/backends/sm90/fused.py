"""The fused steps of Hopper: tiles of 128 x 128 go to the quantizer without being written; and
normalizations of few rows, by a kernel that starts while the one before ends and lets a decode
kernel behind it ask for its weights."""

from functools import lru_cache

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES as DTYPES
from te_mx.backends.base import matrix, pointer, why_not_dtype
from te_mx.backends.native import FP4, MX, fields_to, is_native
from te_mx.backends.reference.fused import inverse
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.binding import rows_of
from te_mx.backends.sm90.blockwise import makes_both
from te_mx.backends.sm90.envelope import why_not
from te_mx.dispatch import run
from te_mx.dispatch.fused import ACT_IDS, ActParts, ActStep, NormParts, NormRows, NormStep, Target
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of

_F32, _I32 = torch.float32, torch.int32
BLOCKWISE = "fp8_e4m3_1x128"  # what fused kernels make with fp32 scales


@lru_cache(maxsize=256)
def makes(row: str, col: str, rule: str, dtype: torch.dtype, norm: bool = False) -> bool:
    """Whether the fused kernels end in a target, for results of a dtype: MXFP4 and blockwise FP8 of
    bf16 alone, E5M2 of no normalization, for it is the format of gradients."""
    formats = {spec_of(spec).format.name for spec in (row, col) if spec}
    if norm and "mxfp8_e5m2" in formats:
        return False
    if formats == {BLOCKWISE}:
        return dtype == torch.bfloat16 and makes_both(row, col, rule) is None
    known = is_native(Target(row, col, rule), MX)
    return known and (dtype == torch.bfloat16 or not formats & set(FP4))


class _Ends:
    """In what the steps of a problem end: the operands of its specs where the fused kernels make
    these, else values that the quantizer reads."""

    norm = False

    def __init__(self, p: Problem) -> None:
        self.native, self.index, self.problem = binding.native(), p.place.index, p
        known = makes(p.lhs, p.rhs, p.rule, torch.bfloat16, self.norm)
        self.fields = fields_to(p.lhs, p.rhs, p.rule) if known else {}

    def specs(self, dtype: torch.dtype) -> tuple[str, str] | None:
        """What the fused kernels quantize results of a dtype to; None where they do not."""
        p = self.problem
        return (p.lhs, p.rhs) if makes(p.lhs, p.rhs, p.rule, dtype, self.norm) else None


class _Fused(Kernel):
    name = "sm90"

    def __init__(self, op: str, planner: type) -> None:
        self.op, self.planner = op, planner

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem._replace(lhs="", rhs="", rule="rceil")) or why_not_dtype(problem)


class Norms(_Ends):
    """Normalizations of matrices of one size."""

    norm = True

    def __init__(self, p: Problem) -> None:
        super().__init__(p)
        self.record = self.native.NormArgs(
            x_rows=p.m, x_cols=p.n, inverse=inverse(p.n), device=self.index
        )
        self.ending = self.record.copy(**self.fields)

    def __call__(self, s: NormStep) -> NormParts | None:
        x, weight, bias, norm, dtype, keep, target = s
        if x.dtype not in (dtype, _F32):
            x = x.to(_F32)  # exact
        x, weight = rows_of(x), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        specs = None if target.col_sum else self.specs(dtype)
        (rows, cols), device, rms = x.shape, x.device, norm.kind == "RMSNorm"
        mean = None if rms else torch.empty(rows, dtype=_F32, device=device)
        rstd = torch.empty(rows, dtype=_F32, device=device)
        z = None
        if keep or specs is None:
            z = torch.empty((rows, cols), dtype=dtype, device=device)
        counters = torch.empty(1 + (rows + 127) // 128, dtype=_I32, device=device)
        args = (self.record if specs is None else self.ending).copy(
            x_data=x.data_ptr(), x_row_stride=x.stride(0), x_dtype=DTYPES[x.dtype], rms=rms,
            eps=norm.eps, weight=weight.data_ptr(), bias=0 if bias is None else bias.data_ptr(),
            mean=0 if mean is None else mean.data_ptr(), rstd=rstd.data_ptr(),
            z=0 if z is None else z.data_ptr(), z_dtype=DTYPES[dtype],
            counters=counters.data_ptr(), stream=binding.stream(self.index),
        )  # fmt: skip
        made = None
        if specs is not None:
            made, _ = binding.set_outputs(args, *specs, (rows, cols), device, False)
        if not binding.supported(self.native.normalize(args)):
            return None
        if made is None:
            assert z is not None
            made = run.quantized(z, target)
        return NormParts(mean, rstd, z if keep else None, made)


class NormGradients:
    """Gradients of normalizations of matrices of one size."""

    def __init__(self, p: Problem) -> None:
        self.native, self.index = binding.native(), p.place.index
        self.partial = self.native.norm_partial_sums(p.m)
        self.record = self.native.NormGradArgs(
            dz_rows=p.m, dz_cols=p.n, x_rows=p.m, x_cols=p.n, inverse=inverse(p.n),
            device=self.index,
        )  # fmt: skip

    def __call__(
        self, dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
        if dz.dtype != x.dtype:
            x = x.to(_F32)  # exact, as the next line
        if dz.dtype != x.dtype and dz.dtype not in (torch.bfloat16, torch.float16):
            dz = dz.to(_F32)
        dz, x, weight = rows_of(dz), rows_of(x), weight.contiguous()
        mean, rstd = None if mean is None else mean.contiguous(), rstd.contiguous()
        (rows, cols), device = x.shape, x.device
        dx = torch.empty((rows, cols), dtype=dtype, device=device)
        sums = torch.empty((2, cols), dtype=_F32, device=device)
        # In one piece: partial sums [parts, 2, cols], sums of rows [rows, 2], counters.
        row_sums = self.partial * 2 * cols
        counters = row_sums + 2 * rows
        tiles = 1 + (rows + 127) // 128
        scratch = torch.empty(counters + tiles, dtype=_F32, device=device)
        at, dweight = scratch.data_ptr(), sums.data_ptr()
        args = self.record.copy(
            dz_data=dz.data_ptr(), dz_row_stride=dz.stride(0), dz_dtype=DTYPES[dz.dtype],
            x_data=x.data_ptr(), x_row_stride=x.stride(0), x_dtype=DTYPES[x.dtype],
            rms=mean is None, weight=weight.data_ptr(), mean=0 if mean is None else mean.data_ptr(),
            rstd=rstd.data_ptr(), dx=dx.data_ptr(), dx_dtype=DTYPES[dtype], dweight=dweight,
            dbias=dweight + 4 * cols, partial=at, row_sums=at + 4 * row_sums,
            counters=at + 4 * counters, stream=binding.stream(self.index),
        )  # fmt: skip
        done = binding.supported(self.native.normalize_backward(args))
        return (dx, sums[0], sums[1]) if done else None


class Activations(_Ends):
    """Activations of matrices of one size, and their gradients."""

    def __init__(self, p: Problem) -> None:
        super().__init__(p)
        self.record = self.native.ActArgs(h_rows=p.m, h_cols=p.n, device=self.index)
        self.ending = self.record.copy(**self.fields)

    def __call__(self, s: ActStep) -> ActParts | None:
        h, grad, act, dtype, keep, target = s
        computed, specs = dtype, self.specs(dtype)
        if h.dtype != dtype or (grad is not None and grad.dtype != dtype):
            # The value in fp32, rounded, quantized.
            h, grad = h.to(_F32), None if grad is None else grad.to(_F32)
            computed, specs = _F32, None
        h = rows_of(h)
        (rows, width), device = h.shape, h.device
        cols = width // 2 if act.gated and grad is None else width
        out = None
        if keep or specs is None:
            out = torch.empty((rows, cols), dtype=computed, device=device)
        args = (self.record if specs is None else self.ending).copy(
            h_data=h.data_ptr(), h_row_stride=h.stride(0), h_dtype=DTYPES[h.dtype],
            act=ACT_IDS[act.base], gated=act.gated, limit=act.limit, alpha=act.alpha,
            offset=act.offset, out=pointer(out), out_dtype=DTYPES[computed],
            stream=binding.stream(self.index),
        )  # fmt: skip
        if grad is not None:
            grad = rows_of(grad)
            args.grad = matrix(self.native, grad)
        made = None
        if specs is not None:
            made, _partial = binding.set_outputs(args, *specs, (rows, cols), device, target.col_sum)
        if not binding.supported(self.native.activate(args)):
            return None
        if made is None:
            assert out is not None
            out = out.to(dtype)
            made = run.quantized(out, target)
        return ActParts(out if keep else None, made)


class HopperNormRows(Kernel):
    """Any float dtypes."""

    op, name = "norm_rows", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem) or why_not_dtype(problem)

    def run(self, step: NormRows) -> Tensor | None:
        x, weight, bias, norm, zero_centered, dtype = step
        x, weight = rows_of(x), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        z = torch.empty(x.shape, dtype=dtype, device=x.device)
        native = binding.native()
        args = native.NormRowsArgs(
            x=matrix(native, x), rms=norm.kind == "RMSNorm", zero_centered=zero_centered,
            eps=norm.eps, inverse=inverse(x.shape[1]), weight=weight.data_ptr(),
            bias=pointer(bias), weight_dtype=DTYPES[weight.dtype], z=z.data_ptr(),
            z_dtype=DTYPES[dtype],
        )  # fmt: skip
        binding.set_execution(args, x.device.index)
        return z if binding.supported(native.normalize_rows(args)) else None


register(_Fused("norm_quantize", Norms))
register(_Fused("norm_backward", NormGradients))
register(_Fused("act_quantize", Activations))
register(HopperNormRows())
