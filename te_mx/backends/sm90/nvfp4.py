"""NVFP4 weights that stand still on Hopper: inputs as they are times codes times block scales,
which are exact in 16 bits, from the one copy of 0.5625 bytes a weight; and its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_mx.backends.base import FLOAT_DTYPES, why_not_dtype
from te_mx.backends.reference.grouped import QuantizeWeightsReference
from te_mx.backends.reference.quantize import ReferenceRest
from te_mx.backends.sm90 import binding, grouped
from te_mx.backends.sm90.envelope import why_not
from te_mx.backends.sm90.layouts.nvfp4 import FORMATS, ROWS, SM90_NVFP4
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.fused import ACT_IDS
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.linear import FrozenCall, FrozenKernel
from te_mx.dispatch.problem import FROZEN_ROWS, MOST, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import Layout
from te_mx.layouts.operand import Operand, Quantized, Stack

PRODUCT = "sm90_nvfp4"
_NARROW = torch.bfloat16, torch.float16


class _Sized:
    """Calls of one size, by a record that is made once."""

    __slots__ = ("index", "native", "record", "sizes")

    def __init__(self, p: Problem, m: int, n: int, k: int) -> None:
        self.native, self.index, self.sizes = binding.native(), p.place.index, (m, n, k)
        self.record = self.native.Nvfp4Args(m=m, n=n, k=k, device=self.index)

    def of(self, weight: Operand | Stack) -> tuple[Any, Tensor]:
        """The record of a call on a weight, and the scale that must live until it is enqueued."""
        whole = weight.tensor_scale
        assert whole is not None
        whole = whole.contiguous()
        args = self.record.copy(
            w=weight.codes.data_ptr(), w_scales=weight.scales.data_ptr(), scale=whole.data_ptr(),
            scale_rows=whole.dim() >= 2, stream=binding.stream(self.index),
        )  # fmt: skip
        return args, whole


class Products(_Sized):
    def __init__(self, p: Problem) -> None:
        super().__init__(p, p.m, p.n, p.k)

    def __call__(self, call: FrozenCall) -> tuple[Tensor, str] | None:
        x, weight, bias, out_dtype, offs, act, gate = call
        if gate is not None:
            return None
        m, n, k = self.sizes
        x_MK = x.reshape(m, k)
        # The copy engine takes rows that start at whole 16 bytes.
        if x_MK.stride(1) != 1 or x_MK.stride(0) % 8 or x_MK.stride(0) < k or x_MK.data_ptr() % 16:
            x_MK = pad(x_MK.clone(memory_format=torch.contiguous_format), (0, -k % 8))
        y = torch.empty((*x.shape[:-1], n), dtype=out_dtype, device=x.device)
        args, _alive = self.of(weight)
        args.x, args.ldx, args.x_dtype = x_MK.data_ptr(), x_MK.stride(0), FLOAT_DTYPES[x.dtype]
        args.out, args.ldo, args.out_dtype = y.data_ptr(), n, FLOAT_DTYPES[out_dtype]
        if bias is not None:
            bias = bias.contiguous()
            args.bias, args.bias_dtype = bias.data_ptr(), FLOAT_DTYPES[bias.dtype]
        if offs is not None:
            offs = grouped.offs_on_device(offs, x.device)
            args.groups = grouped.groups_of(offs, 0, m)
        if act is not None:
            args.activates, args.act = True, ACT_IDS[act]
        return (y, PRODUCT) if binding.supported(self.native.nvfp4_product(args)) else None


class Product(FrozenKernel):
    """bfloat16 or float16 as it is; up to 64 rows, or in groups, each has the same bits whatever
    rows are beside it."""

    name, planner = PRODUCT, Products
    as_it_lies = True

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(lhs=""), SM90_NVFP4.name, formats=FORMATS)
        if reason is None and problem.lhs:
            reason = "takes inputs as they are"
        if reason is None and problem.dtype not in _NARROW:
            reason = f"takes bfloat16 and float16, not {problem.dtype}"
        if reason is None and problem.n % ROWS:
            reason = f"takes weights of whole {ROWS} rows, not {problem.n}"
        if reason is None and max(problem.m, problem.n, problem.k) > MOST:
            reason = f"counts sizes up to {MOST}"
        return reason

    def sums(self, problem: Problem) -> str:
        alike = problem.groups or problem.m <= FROZEN_ROWS
        return self.name if alike else super().sums(problem)

    def reads(self, layout: Layout) -> bool:
        return layout is SM90_NVFP4

    def form(self, row: Operand | Stack) -> Operand | Stack | None:
        return row if row.layout is SM90_NVFP4 else None


class Values(_Sized):
    def __init__(self, p: Problem) -> None:
        super().__init__(p, 0, p.m, p.n)
        self.record.ldo = p.n

    def __call__(
        self, operand: Operand, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor | None:
        if dtype == torch.float32:  # exactly what bfloat16 holds, times the tensor scale
            whole = operand.tensor_scale
            assert whole is not None
            bare = self(operand._replace(tensor_scale=torch.ones_like(whole)), torch.bfloat16)
            return None if bare is None else torch.mul(bare.float(), whole, out=into)
        _, n, k = self.sizes
        out = into
        if out is None:
            out = torch.empty((n, k), dtype=dtype, device=operand.codes.device)
        args, _alive = self.of(operand)
        args.out, args.out_dtype = out.data_ptr(), FLOAT_DTYPES[dtype]
        return out if binding.supported(self.native.nvfp4_to_values(args)) else None


class Dequantize(Kernel):
    """The values of such a weight."""

    op, name, planner = "dequantize", PRODUCT, Values

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, SM90_NVFP4.name, formats=FORMATS)
        if reason is None and problem.lhs.endswith("@any"):
            reason = f"takes the layout {SM90_NVFP4.name}"
        return reason or why_not_dtype(problem, "gives")


class Rest(ReferenceRest):
    """The one copy, of whole 64 rows and of scales that are not negative."""

    name = layout = SM90_NVFP4.name
    rank = 0

    def accepts(self, problem: Problem) -> str | None:
        if problem.m % ROWS:
            return f"keeps weights of whole {ROWS} rows, not {problem.m}"
        return why_not(problem, formats=FORMATS)

    def rest(self, row: Operand | Stack) -> Operand | Stack:
        if bool((row.scales > 0x7F).any()):
            return row
        if isinstance(row, Stack):
            each = [SM90_NVFP4.pack(row.format, *one, row.k) for one in zip(*row[:2], strict=True)]
            codes, scales = (torch.stack(parts) for parts in zip(*each, strict=True))
        else:
            codes, scales = SM90_NVFP4.pack(row.format, row.codes, row.scales, row.k)
        return row._replace(codes=codes, scales=scales, spec=f"{row.format.name}@{self.layout}")


class Quantizer:
    """Matrices of one size, and the transpose of each, from one read."""

    def __init__(self, p: Problem) -> None:
        self.native, self.index, self.problem = binding.native(), p.place.index, p
        self.record = self.native.Nvfp4QuantizeArgs(
            x_rows=p.m, x_cols=p.n, x_dtype=FLOAT_DTYPES[p.dtype], device=self.index,
            square=FORMATS[1] in p.lhs + p.rhs,
        )  # fmt: skip

    def __call__(self, what: Quantize) -> Quantized | None:
        x, m, n = what.x, self.problem.m, self.problem.n
        if x.stride(1) != 1:
            x = x.contiguous()
        scale, amax = x.new_empty((), dtype=torch.float32), x.new_empty(1, dtype=torch.int32)
        args = self.record.copy(
            x_data=x.data_ptr(), x_row_stride=x.stride(0), scale=scale.data_ptr(),
            amax=amax.data_ptr(), stream=binding.stream(self.index),
        )  # fmt: skip
        row = col = None
        if what.row:
            row = binding.empty_operand(what.row, m, n, x.device)._replace(tensor_scale=scale)
            args.row_codes, args.row_scales = row.codes.data_ptr(), row.scales.data_ptr()
        if what.col:
            col = binding.empty_operand(what.col, n, m, x.device)._replace(tensor_scale=scale)
            args.col_codes, args.col_scales = col.codes.data_ptr(), col.scales.data_ptr()
        if not binding.supported(self.native.nvfp4_quantize(args)):
            return None
        sums = x.sum(0, dtype=torch.float32).to(what.sum_dtype) if what.col_sum else None
        return Quantized(row, col, sums)


class HopperNvfp4(Kernel):
    """By the rule of Transformer Engine, to rows."""

    op, name, planner = "quantize", PRODUCT, Quantizer

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(rule="rceil"), "rows", formats=FORMATS)
        specs = {spec for spec in (problem.lhs, problem.rhs) if spec}
        if reason is None and len(specs) > 1:
            reason = "takes one format for both directions"
        if reason is None and problem.rule != "te":
            reason = f"knows the scale rule te, not {problem.rule}"
        if reason is None and "@any" in problem.lhs + problem.rhs:
            reason = "takes the layout rows"
        return reason or why_not_dtype(problem)


class HopperNvfp4Weights(QuantizeWeightsReference):
    """One after the other by the same kernel."""

    name, rank = PRODUCT, 0

    def accepts(self, problem: Problem) -> str | None:
        return HopperNvfp4().accepts(problem)


register(HopperNvfp4())
register(HopperNvfp4Weights())
register(Product())
register(Dequantize())
register(Rest())
