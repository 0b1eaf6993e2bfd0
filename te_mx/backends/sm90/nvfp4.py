"""NVFP4 and MXFP4 on Hopper. Weights that stand still: inputs as they are, or with MXFP4 the bf16
values of their codes, times codes times block scales, which are exact in 16 bits, from the one copy
of 0.5625 or 0.5313 bytes a weight. Training in NVFP4: quantizers, which write what is multiplied at
once as these values, and products of them by cuBLAS."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES, pointer, typed_address, why_not_dtype
from te_mx.backends.base import FORMATS as FORMAT_IDS
from te_mx.backends.native import MX, NVFP4, unknown, words_of
from te_mx.backends.reference.gemm import finish, whole_of
from te_mx.backends.reference.quantize import ReferenceRest
from te_mx.backends.sm90 import binding, grouped
from te_mx.backends.sm90.envelope import why_not
from te_mx.backends.sm90.layouts.nvfp4 import BIAS, FORMATS, MXFP4, SM90_NVFP4, SM90_VALUES
from te_mx.dispatch import run
from te_mx.dispatch.calls import Product as Multiply
from te_mx.dispatch.calls import Quantize, Ran
from te_mx.dispatch.fused import ACT_IDS, Target
from te_mx.dispatch.kernels import Kernel, Plan, PreferredLayouts
from te_mx.dispatch.linear import FrozenCall, FrozenKernel
from te_mx.dispatch.problem import FROZEN_ROWS, MOST, Problem
from te_mx.dispatch.registry import register
from te_mx.formats.scaling import split_rule
from te_mx.layouts import Layout, spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack
from te_mx.runtime import workspace

PRODUCT, QUANTIZED = "sm90_nvfp4", "sm90_mxfp4"
_NARROW = torch.bfloat16, torch.float16
VALUES = tuple(layout.name for layout in SM90_VALUES)  # of rows and of columns


def is_tall(spec: str) -> bool:
    """Whether blocks are 16 x 16."""
    return spec_of(spec).format.scaling.block[0] > 1


MOST_SCALE, LEAST_SCALE = 254 - BIAS, 2  # of MXFP4
# Rows up to which MXFP4 is multiplied in bf16: more of them pay for codes that are unpacked once a
# call, for FP8.
MOST_DENSE, MOST_GROUPED = 512, 384  # of groups: of each, in the mean
GATED = ("silu", "qgelu", "gelu")  # x times a sigmoid


class _Sized:
    """Calls of one size, by a record that is made once."""

    __slots__ = ("index", "native", "record", "sizes")

    def __init__(self, p: Problem, m: int, n: int, k: int) -> None:
        self.native, self.index, self.sizes = binding.native(), p.place.index, (m, n, k)
        mx = MXFP4 in (spec_of(spec).format.name for spec in (p.lhs, p.rhs) if spec)
        self.record = self.native.Nvfp4Args(m=m, n=n, k=k, mx=mx, device=self.index)

    def of(self, weight: Operand | Stack) -> tuple[Any, Tensor | None]:
        """The record of a call on a weight, and the scale that must live until it is enqueued."""
        whole = weight.tensor_scale
        args = self.record.copy(
            w=weight.codes.data_ptr(), w_scales=weight.scales.data_ptr(),
            stream=binding.stream(self.index),
        )  # fmt: skip
        if whole is not None:
            whole = whole.contiguous()
            args.scale, args.scale_rows = whole.data_ptr(), whole.dim() >= 2
        return args, whole


class FrozenProducts(_Sized):
    def __init__(self, p: Problem) -> None:
        super().__init__(p, p.m, p.n, p.k)
        self.nbytes, self.target, self.groups = 0, None, p.groups
        self.name = QUANTIZED if p.lhs else PRODUCT
        if p.lhs and spec_of(p.lhs).format.name == MXFP4:
            self.target = Target(f"{MXFP4}@rows", "", p.rule)
        elif p.lhs:
            self.record.quantizes, self.record.rule = True, SCALE_RULES[p.rule]
            self.record.x_element = FORMAT_IDS[words_of(p.lhs)[0]]
            self.nbytes = self.record.workspace_bytes = self.native.nvfp4_workspace(p.m, p.k)

    def __call__(self, call: FrozenCall) -> tuple[Tensor, str] | None:
        return self.of_rows(call, None)

    def of_rows(
        self, call: FrozenCall, places: Tensor | None, experts: Tensor | None = None, each: int = 1,
        stands: bool = False,
    ) -> tuple[Tensor, str] | None:  # fmt: skip
        """places: row r of the product is row places[r] of x [.., k], of those that are quantized
        in 16 bits here. experts: it is row r / each, and has the weights of experts[r], int32;
        stands: which the product before has read."""
        x, weight, bias, out_dtype, offs, act, gate = call
        if not (gate is places is None or self.nbytes):
            return None
        m, n, k = self.sizes
        x_MK = x.reshape(-1, k)
        if self.target is not None:
            row = run.quantized(x_MK, self.target).row
            assert row is not None
            x_MK = run.dequantize(row, torch.bfloat16)
        step, apart = x_MK.stride(1), x_MK.stride(0)
        if self.nbytes:
            x_MK = x_MK if step == 1 else x_MK.contiguous()
        # The copy engine takes rows that start at whole 16 bytes.
        elif step != 1 or apart % 8 or apart < k or x_MK.data_ptr() % 16:
            x_MK = pad(x_MK.clone(memory_format=torch.contiguous_format), (0, -k % 8))
        shape = x.shape[:-1] if places is experts is None else (m,)
        y = torch.empty((*shape, n), dtype=out_dtype, device=x.device)
        args, _alive = self.of(weight)
        args.places, args.x_rows = pointer(places), len(x_MK)
        args.x, args.ldx, args.x_dtype = x_MK.data_ptr(), x_MK.stride(0), FLOAT_DTYPES[x_MK.dtype]
        args.out, args.ldo, args.out_dtype = y.data_ptr(), n, FLOAT_DTYPES[out_dtype]
        if bias is not None:
            bias = bias.contiguous()
            args.bias, args.bias_dtype = bias.data_ptr(), FLOAT_DTYPES[bias.dtype]
        if offs is not None:
            offs = grouped.offs_on_device(offs, x.device)
            args.groups = grouped.groups_of(offs, 0, m)
        if experts is not None:
            args.experts, args.each, args.stands = experts.data_ptr(), each, stands
            args.groups_count = self.groups
        if act is not None:
            args.activates, args.act = True, ACT_IDS[act]
        if gate is not None:
            values = binding.rows_of(gate.values.reshape(m, k))
            args.gate, args.ldgate = values.data_ptr(), values.stride(0)
            args.x_act = ACT_IDS[gate.act]
        scratch = workspace.acquire(x.device, self.nbytes) if self.nbytes else None
        args.workspace = pointer(scratch)
        done = binding.supported(self.native.nvfp4_product(args))
        if scratch is not None:
            workspace.release(scratch, self.nbytes)
        return (y, self.name) if done else None


class Halves(FrozenProducts):
    """fp16 as it is times MXFP4: every number is the sum of two of bf16, which are rows of their
    own."""

    def __init__(self, p: Problem) -> None:
        super().__init__(p._replace(m=2 * p.m))

    def __call__(self, call: FrozenCall) -> tuple[Tensor, str] | None:
        x, _, bias, out_dtype, offs, act, gate = call
        if act is not None or gate is not None:
            return None
        high = x.to(torch.bfloat16)
        low = torch.where(high.isfinite(), x.float() - high.float(), 0.0).to(torch.bfloat16)
        rows = torch.stack([high, low], -2).flatten(0, -2)
        if offs is not None:
            offs = 2 * offs
        made = super().__call__(call._replace(
            x=rows, bias=None, out_dtype=torch.float32, offs=offs
        ))  # fmt: skip
        if made is None:
            return None
        y = made[0].view(*x.shape[:-1], 2, -1).sum(-2)
        if bias is not None:
            each = bias.float()
            if offs is not None:
                ends = (offs // 2).to(x.device)
                at = torch.arange(len(y), device=x.device)
                group = torch.searchsorted(ends, at, right=True)
                there = (group < len(ends)).unsqueeze(1)
                each = torch.where(there, each[group.clamp(max=len(ends) - 1)], 0.0)
            y = y + each
        return y.to(out_dtype), PRODUCT


class Product(FrozenKernel):
    """bfloat16 or float16 as it is; up to 64 rows, or in groups, each has the same bits whatever
    rows are beside it."""

    name = PRODUCT
    as_it_lies = True

    def make_plan(self, problem: Problem) -> Plan:
        halves = problem.dtype == torch.float16 and _is_mx(problem.rhs)
        return (Halves if halves else FrozenProducts)(problem)

    def accepts(self, problem: Problem) -> str | None:
        reason = self._why_not(problem, (*FORMATS, MXFP4))
        if reason is None and problem.lhs:
            reason = "takes inputs as they are"
        if reason is None and problem.dtype not in _NARROW:
            reason = f"takes bfloat16 and float16, not {problem.dtype}"
        return reason

    @staticmethod
    def _why_not(problem: Problem, formats: tuple[str, ...]) -> str | None:
        reason = why_not(problem._replace(lhs=""), SM90_NVFP4.name, formats=formats)
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


class QuantizedProduct(Product):
    """Inputs quantized to MXFP8 or MXFP4, as the bf16 values of their codes, times MXFP4."""

    name, gates = QUANTIZED, GATED

    def make_plan(self, problem: Problem) -> Plan:
        return FrozenProducts(problem)

    def accepts(self, problem: Problem) -> str | None:
        reason = self._why_not(problem, (MXFP4,))
        x = spec_of(problem.lhs).format.name if problem.lhs else ""
        if reason is None and x not in MX:
            reason = f"takes inputs quantized to {', '.join(MX)}, not {x or 'as they are'}"
        most = problem.groups * MOST_GROUPED or MOST_DENSE
        if reason is None and problem.m > most and problem.precision == "adaptive":
            reason = f"leaves more than {most} rows to products in FP8"
        return reason or why_not_dtype(problem)


class Values(_Sized):
    """Without a tensor scale: codes times block scales."""

    def __init__(self, p: Problem) -> None:
        super().__init__(p, 0, p.m, p.n)
        self.record = self.record.copy(**values_fields(p.lhs, p.m, p.n))
        self.plain = spec_of(p.lhs).layout is not SM90_NVFP4

    def __call__(
        self, operand: Operand, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor | None:
        if dtype == torch.float32 and not self.plain:  # exactly what bfloat16 holds, times that
            whole = operand.tensor_scale
            bare = self(operand._replace(tensor_scale=None), torch.bfloat16)
            if bare is None or whole is None:
                return None if bare is None else bare.float()
            return torch.mul(bare.float(), whole, out=into)
        _, n, k = self.sizes
        k_first = operand.layout.k_first
        out = None if k_first else into
        if out is None:
            shape = (k, n) if k_first else (n, k)
            out = torch.empty(shape, dtype=dtype, device=operand.codes.device)
        args, _alive = self.of(operand)
        args.out, args.out_dtype = out.data_ptr(), FLOAT_DTYPES[dtype]
        run_it = self.native.nvfp4_from_rows if self.plain else self.native.nvfp4_to_values
        if not binding.supported(run_it(args)):
            return None
        return out.t() if k_first else out


class Dequantize(Kernel):
    """The values of such a weight, and of plain codes."""

    op, name, planner = "dequantize", PRODUCT, Values

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, SM90_NVFP4.name, "rows", "cols", formats=(*NVFP4, MXFP4))
        if reason is None and _is_mx(problem.lhs):
            lies = spec_of(problem.lhs).layout
            reason = None if lies is SM90_NVFP4 else f"takes {MXFP4} in {SM90_NVFP4.name}"
        if reason is None and problem.lhs.endswith("@any"):
            reason = f"takes the layouts {SM90_NVFP4.name}, rows and cols"
        return reason or why_not_dtype(problem, "gives")


class Convert(Kernel):
    """Plain codes to values that lie as they do."""

    op, name = "convert", PRODUCT

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(rhs=""), "rows", "cols", formats=NVFP4)
        layouts = [spec_of(spec).layout for spec in (problem.lhs, problem.rhs)]
        if reason is None and layouts[1] is not SM90_VALUES[layouts[0].k_first]:
            reason = f"makes {VALUES[0]} of rows, and {VALUES[1]} of cols"
        return reason

    def make_plan(self, problem: Problem) -> Any:
        values = Values(problem)

        def convert(operand: Operand, spec: str) -> "Operand | None":
            made = values(operand._replace(tensor_scale=None), torch.bfloat16)
            if made is None:
                return None
            codes = (made.t() if operand.layout.k_first else made).view(torch.uint8)
            none = operand.scales.new_empty(0)
            return operand._replace(codes=codes, scales=none, spec=spec, packed=None)

        return convert


class Products:
    """Products by cuBLAS, with fp32 sums, of what bf16 holds of both sides, codes times block
    scales. Scales of tensors, and bias, are the factor and the end of the product; what cublasLt
    does not take, scales of rows too, comes to the sums by a kernel."""

    def __init__(self, p: Problem) -> None:
        self.native, self.index = binding.native(), p.place.index
        self.record = self.native.Nvfp4FinishArgs(m=p.m, n=p.n, device=self.index)
        self.nbytes = self.native.nvfp4_multiply_workspace()
        self.sides = [spec_of(spec).layout for spec in (p.lhs, p.rhs)]
        self.whole = self.native.Nvfp4MultiplyArgs(
            m=p.m, n=p.n, k=p.k, device=self.index, workspace_bytes=self.nbytes
        )

    def __call__(self, p: Multiply) -> Ran:
        lhs, rhs, epilogue, out = p.lhs, p.rhs, p.epilogue, p.out
        (left, right), bias = map(_values, (lhs, rhs), self.sides), epilogue.bias
        _, gelu, gelu_in, bias_grad, _ = epilogue
        plain = gelu is gelu_in is bias_grad is None and out.is_contiguous()
        bias = None if bias is None else bias.contiguous()
        if plain and self.multiply(lhs, rhs, left, right, bias, epilogue.accumulate, out):
            return Ran(PRODUCT, None)
        sums = torch.mm(left, right.t(), out_dtype=torch.float32)
        if plain:
            args = self.record.copy(
                sums=sums.data_ptr(), out=out.data_ptr(), out_dtype=FLOAT_DTYPES[out.dtype],
                accumulate=epilogue.accumulate, stream=binding.stream(self.index),
            )  # fmt: skip
            for side, whole in (("lhs", lhs.tensor_scale), ("rhs", rhs.tensor_scale)):
                if whole is not None:
                    setattr(args, f"of_{side}", whole.data_ptr())
                    setattr(args, f"{side}_rows", whole.dim() >= 2)
            if bias is not None:
                args.bias, args.bias_dtype = typed_address(bias)
            if binding.supported(self.native.nvfp4_finish(args)):
                return Ran(PRODUCT, None)
        of_operand = lhs.values().sum(1) if epilogue.bias_grad == "operand" else None
        sums *= whole_of(lhs, rhs)
        return Ran(PRODUCT, finish(sums, of_operand, epilogue, out, p.aux))

    def multiply(
        self, lhs: Operand, rhs: Operand, left: Tensor, right: Tensor, bias: Tensor | None,
        accumulate: bool, out: Tensor,
    ) -> bool:  # fmt: skip
        of_lhs, of_rhs = lhs.tensor_scale, rhs.tensor_scale
        for whole in (of_lhs, of_rhs):
            if whole is not None and whole.dim():
                return False
        lhs_rows, rhs_rows = left.is_contiguous(), right.is_contiguous()
        if not (lhs_rows or left.t().is_contiguous()) or not (
            rhs_rows or right.t().is_contiguous()
        ):
            return False
        scratch = workspace.acquire(out.device, self.nbytes)
        args = self.whole.copy(
            lhs=left.data_ptr(), rhs=right.data_ptr(), lhs_k_first=not lhs_rows,
            rhs_k_first=not rhs_rows, of_lhs=pointer(of_lhs), of_rhs=pointer(of_rhs),
            out=out.data_ptr(), ldo=out.shape[1], out_dtype=FLOAT_DTYPES[out.dtype],
            accumulate=accumulate, workspace=pointer(scratch), stream=binding.stream(self.index),
        )  # fmt: skip
        if bias is not None:
            args.bias, args.bias_dtype = typed_address(bias)
        ran = binding.supported(self.native.nvfp4_multiply(args))
        workspace.release(scratch, self.nbytes)
        return ran


def _values(side: Operand, layout: Layout) -> Tensor:
    if layout in SM90_VALUES:
        made = side.codes.view(torch.bfloat16)
        return made.t() if layout.k_first else made
    return run.dequantize(side._replace(tensor_scale=None), torch.bfloat16)


class Gemm(Kernel):
    """Both sides as bf16, which holds codes times block scales: of NVFP4, and of MX beside it."""

    op, name, planner = "gemm", PRODUCT, Products

    def accepts(self, problem: Problem) -> str | None:
        layouts = "rows", "cols", SM90_NVFP4.name, *VALUES
        reason = why_not(problem._replace(rule="rceil"), *layouts, formats=(*MX, *NVFP4))
        sides = [spec_of(spec).format for spec in (problem.lhs, problem.rhs)]
        if reason is None and not any(fmt.tensor_scaled for fmt in sides):
            reason = "multiplies formats with a tensor scale, and what is beside them"
        return reason

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        if not all(spec_of(spec).format.tensor_scaled for spec in (problem.lhs, problem.rhs)):
            return PreferredLayouts()  # which MX formats have, too
        # Columns of inputs wait for backward, as codes. Those of weights have square blocks.
        return PreferredLayouts(VALUES[0], VALUES[1], "" if is_tall(problem.rhs) else "rows")

    def prepares(self, m: int, n: int, k: int) -> bool:
        return False


class Rest(ReferenceRest):
    """The one copy, of scales that are not negative, and of MXFP4 inside of bf16."""

    name = layout = SM90_NVFP4.name
    rank = 0

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem, formats=(*FORMATS, MXFP4))

    def rest(self, row: Operand | Stack) -> Operand | Stack:
        if not _fits(row):
            return row
        if isinstance(row, Stack):
            each = [SM90_NVFP4.pack(row.format, *one, row.k) for one in zip(*row[:2], strict=True)]
            codes, scales = (torch.stack(parts) for parts in zip(*each, strict=True))
        else:
            codes, scales = SM90_NVFP4.pack(row.format, row.codes, row.scales, row.k)
        return row._replace(codes=codes, scales=scales, spec=f"{row.format.name}@{self.layout}")


def _is_mx(spec: str) -> bool:
    return spec_of(spec).format.name == MXFP4


def _fits(row: Operand | Stack) -> bool:
    """Whether block scales have numbers in such a copy. Waits for their device."""
    if row.format.name != MXFP4:
        return not bool((row.scales > 0x7F).any())
    # Blocks of zeros have the smallest one.
    high = row.scales > MOST_SCALE
    return not bool(high.any()) and not bool((_is_there(row) & (row.scales < LEAST_SCALE)).any())


def _is_there(row: Operand | Stack) -> Tensor:
    """Which blocks have other codes than zeros."""
    there = (row.codes & 0x77) != 0
    width = row.format.scaling.block[1] // 2
    return pad(there, (0, row.scales.shape[-1] * width - there.shape[-1])).unflatten(
        -1, (-1, width)
    ).any(-1)  # fmt: skip


# Of the rules of Transformer Engine: sums of what, of two scales, and whether up to 256.
_TRIES: dict[str, dict[str, Any]] = {"te": {}} | {
    f"te_4over6{error}{top}": {"tries": tries, "narrow": not top}
    for error, tries in (("", 1), ("_mse", 2))
    for top in ("", "_448")
}


def quantizer_fields(
    row: str, col: str, rows: int, cols: int, dtype: torch.dtype, rule: str
) -> tuple[dict[str, Any], int]:
    """What a record says of matrices of one size and dtype, and the words of its scratch memory."""
    fields: dict[str, Any] = {
        "x_rows": rows, "x_cols": cols, "x_dtype": FLOAT_DTYPES[dtype],
        "square": is_tall(row or col), **_TRIES[split_rule(rule)[0]],
    }  # fmt: skip
    words = 0
    for side, spec, many in (("row", row, rows), ("col", col, cols)):
        fmt = spec_of(spec).format if spec else None
        by_rows = fmt is not None and fmt.tensor_scale_shape(1) != ()
        words += many if by_rows else 1
        fields[f"{side}_scale_rows"] = by_rows
        if fmt is not None and fmt.transform is not None:
            fields[f"{side}_transforms"] = True
            fields[f"{side}_by_32"] = fmt.transform.size == 32
            fields[f"{side}_signs"] = fmt.transform.signs
    return fields, words


def made_together(records: list[tuple[str, dict[str, Any]]]) -> bool:
    """Whether one call makes what the records of two matrices say; their words of scratch memory
    lie behind each other then."""
    (_, first), (_, second) = records
    said = [
        fields.get(f"{side}_{name}")
        for fields in (first, second)
        for side in ("row", "col")
        for name in ("by_32", "scale_rows")
    ]
    if any(said) or bool(first.get("tries")) != bool(second.get("tries")):
        return False
    second["amax"] = first["amax"]._replace(offset=first["amax"].offset + 8)
    return True


def values_fields(spec: str, rows: int, k: int) -> dict[str, Any]:
    """What a record says of an operand whose values are made."""
    return {
        "n": rows,
        "k": k,
        "ldo": k,
        "square": is_tall(spec),
        "k_first": spec_of(spec).layout.k_first,
    }


class Quantizer:
    """Matrices of one size, rows and columns from one read."""

    def __init__(self, p: Problem) -> None:
        self.native, self.index = binding.native(), p.place.index
        fields, self.words = quantizer_fields(p.lhs, p.rhs, p.m, p.n, p.dtype, p.rule)
        self.sides = []
        for side, spec, rows, k in (("row", p.lhs, p.m, p.n), ("col", p.rhs, p.n, p.m)):
            if spec:
                fmt, layout = spec_of(spec)
                shapes, whole = layout.shapes(fmt, rows, k), fmt.tensor_scale_shape(rows)
                self.sides.append((side, spec, rows, k, *shapes, layout in SM90_VALUES, whole))
                fields[f"{side}_k_first"] = layout.k_first
        self.record = self.native.Nvfp4QuantizeArgs(device=self.index, **fields)

    def __call__(self, what: Quantize) -> Quantized | None:
        x = what.x
        if x.stride(1) != 1:
            x = x.contiguous()
        amax = x.new_empty(self.words, dtype=torch.int32)
        args = self.record.copy(
            x_data=x.data_ptr(), x_row_stride=x.stride(0), seed=pointer(what.seed),
            first=what.first, amax=amax.data_ptr(), stream=binding.stream(self.index),
        )  # fmt: skip
        made: dict[str, Operand] = {}
        for side, spec, rows, k, of_codes, of_scales, is_values, whole in self.sides:
            codes = torch.empty(of_codes, dtype=torch.uint8, device=x.device)
            scales = torch.empty(of_scales, dtype=torch.uint8, device=x.device)
            scale = torch.empty(whole, dtype=torch.float32, device=x.device)
            made[side] = Operand(codes, scales, spec, rows, k, None, scale)
            setattr(args, f"{side}_codes", codes.data_ptr())
            setattr(args, f"{side}_scales", 0 if is_values else scales.data_ptr())
            setattr(args, f"{side}_scale", scale.data_ptr())
        if not binding.supported(self.native.nvfp4_quantize(args)):
            return None
        sums = x.sum(0, dtype=torch.float32).to(what.sum_dtype) if what.col_sum else None
        return Quantized(made.get("row"), made.get("col"), sums)


class HopperNvfp4(Kernel):
    """By the rules of Transformer Engine, also with stochastic rounding and after transforms of 16
    or 32: to rows, or to what codes and block scales stand for."""

    op, name, planner = "quantize", PRODUCT, Quantizer

    def accepts(self, problem: Problem) -> str | None:
        layouts = "rows", "cols", *VALUES
        untold = problem._replace(rule="rceil")
        reason = why_not(untold._replace(lhs="", rhs="")) or unknown(untold, layouts, NVFP4, True)
        specs = [spec for spec in (problem.lhs, problem.rhs) if spec]
        if reason is None and len(set(map(is_tall, specs))) > 1:
            reason = "takes blocks of one shape for both directions"
        rule = split_rule(problem.rule)[0]
        if reason is None and rule not in _TRIES:
            reason = f"knows the scale rules of Transformer Engine, not {problem.rule}"
        wrong = problem.lhs.endswith("cols") or problem.rhs.endswith(VALUES[0])
        if reason is None and (wrong or "@any" in problem.lhs + problem.rhs):
            reason = f"writes rows and {VALUES[0]}, of columns rows, cols and {VALUES[1]}"
        return reason or why_not_dtype(problem)


register(HopperNvfp4())
register(Product())
register(Gemm())
register(QuantizedProduct())
register(Dequantize())
register(Convert())
register(Rest())
