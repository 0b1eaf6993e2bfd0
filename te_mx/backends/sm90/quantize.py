"""The quantizers of Hopper: both directions of a matrix from one read, plain or packed for the
GEMM; two matrices at once; and the way back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES as DTYPES
from te_mx.backends.base import LAYOUTS, pointer, why_not_dtype
from te_mx.backends.native import FP4, MX, fields_of, fields_to, one_read, record_of, words_of
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.envelope import why_not, why_not_each
from te_mx.dispatch.calls import Quantize
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats.scaling import is_stochastic, split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack


class Quantizer:
    """Matrices of one size and dtype, quantized as a problem says; the record is made once."""

    __slots__ = ("col", "index", "native", "record", "row", "sizes")

    def __init__(self, p: Problem) -> None:
        self.native, self.index = binding.native(), p.place.index
        self.row, self.col, self.sizes = p.lhs, p.rhs, (p.m, p.n)
        self.record = self.native.QuantizeArgs(
            x_rows=p.m, x_cols=p.n, x_row_stride=p.n, x_dtype=DTYPES[p.dtype], device=self.index,
            **fields_to(p.lhs, p.rhs, p.rule),
        )  # fmt: skip

    def __call__(self, what: Quantize) -> Quantized | None:
        args, made, _alive = self.filled(what)
        return made if binding.supported(self.native.quantize(args)) else None

    def filled(self, what: Quantize) -> tuple[Any, Quantized, object]:
        """The record of a call, what it fills, and what must live until it is enqueued."""
        x, _, _, _, col_sum, sum_dtype, seed, first = what
        if x.stride(1) != 1:
            x = x.contiguous()
        args = self.record.copy(
            x_data=x.data_ptr(), x_row_stride=x.stride(0), stream=binding.stream(self.index),
            seed=pointer(seed), first=first,
        )  # fmt: skip
        made, partial = binding.set_outputs(
            args, self.row, self.col, self.sizes, x.device, col_sum, sum_dtype
        )
        return args, made, (x, partial)

    def two(
        self, what: Quantize, other: "Quantizer", other_what: Quantize
    ) -> tuple[Quantized, Quantized] | None:
        """Both matrices at the same time where the GPU has room; the first without col_sum."""
        (args, made, _alive), (args2, made2, _too) = self.filled(what), other.filled(other_what)
        return (made, made2) if binding.supported(self.native.quantize_two(args, args2)) else None

    def joined(self, parts: Sequence[Tensor]) -> Quantized | None:
        """Matrices as one, read where they lie; None where they must be joined first."""
        x, rows = parts[0], [len(part) for part in parts]
        stride = x.stride()
        if stride[1] != 1 or 0 in rows or any(part.stride() != stride for part in parts):
            return None
        if words_of(self.col or self.row)[1] != "sm90" or self.record.scale_type:
            return None
        args = self.record.copy(x_row_stride=stride[0], stream=binding.stream(self.index))
        made, _ = binding.set_outputs(args, self.row, self.col, self.sizes, x.device, False)
        status = self.native.quantize_joined(args, [part.data_ptr() for part in parts], rows)
        return made if binding.supported(status) else None


class Rows(Quantizer):
    """The same of plain rowwise operands alone."""

    __slots__ = ()

    def rows(self, x: Tensor, into: tuple[Tensor, Tensor] | None = None) -> Operand | None:
        """In new memory or in that of `into`; None for what native code does not take."""
        if not x.is_contiguous():
            return None
        if into is None:
            operand = binding.empty_operand(self.row, *self.sizes, x.device)
        else:
            operand = Operand(*into, self.row, *self.sizes)
        args = self.record.copy(
            x_data=x.data_ptr(), row_codes=operand.codes.data_ptr(),
            row_scales=operand.scales.data_ptr(), stream=binding.stream(self.index),
        )  # fmt: skip
        return operand if binding.supported(self.native.quantize(args)) else None


class HopperQuantize(Kernel):
    op, name = "quantize", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols", "sm90")
        if reason is None and not _plain_and_packed(problem):
            reason = one_read(problem.lhs, problem.rhs)
        return reason or why_not_dtype(problem)

    def make_plan(self, problem: Problem) -> Quantizer:
        alone = problem.lhs and not problem.rhs and words_of(problem.lhs)[1] == "k_last"
        return (Rows if alone else Quantizer)(problem)


class RandomQuantizer(Quantizer):
    """With sums in a launch of their own where that of the codes makes none."""

    __slots__ = ("sums",)

    def __init__(self, p: Problem) -> None:
        super().__init__(p)
        alone = p._replace(lhs="", rhs="", rule="rceil")
        self.sums = None if sums_too(p.dtype, p.lhs, p.rhs) else Quantizer(alone)

    def __call__(self, what: Quantize) -> Quantized | None:
        if self.sums is None or not what.col_sum:
            return super().__call__(what)
        sums = self.sums(what._replace(row="", col="", rule="rceil", seed=None))
        made = super().__call__(what._replace(col_sum=False))
        return None if made is None or sums is None else made._replace(col_sum=sums.col_sum)


class HopperRandomQuantize(Kernel):
    """With stochastic rounding to MXFP4, or after a Hadamard transform; both directions from one
    read of bfloat16 to MXFP4, each in a form of its own, whose rows are not transformed."""

    op, name, planner = "quantize", "sm90_random", RandomQuantizer

    def accepts(self, problem: Problem) -> str | None:
        return why_not_randomly(problem, HopperQuantize())


def why_not_randomly(problem: Problem, plain: Kernel) -> str | None:
    """Why matrices, or groups, are not rounded stochastically or transformed where `plain` takes
    the same without either; None when they are."""
    specs = [spec for spec in (problem.lhs, problem.rhs) if spec]
    stochastic = is_stochastic(problem.rule)
    transforms = any(spec_of(spec).format.transform is not None for spec in specs)
    if not (stochastic or transforms):
        return "is for stochastic rounding and Hadamard transforms"
    lhs, rhs = _untransformed(problem.lhs), _untransformed(problem.rhs)
    rounded = problem._replace(lhs=lhs, rhs=rhs, rule=split_rule(problem.rule)[0])
    sides = [rounded]
    if _in_one_read(problem):
        sides = [rounded._replace(rhs=""), rounded._replace(lhs="")]
    elif transforms and len(specs) > 1:
        return "transforms one direction at a time, but columns of bfloat16 to MXFP4"
    reason = next(filter(None, map(plain.accepts, sides)), None)
    if reason is None and stochastic and words_of(specs[0])[0] != "e2m1":
        reason = f"rounds MXFP4 stochastically, not {spec_of(specs[0]).format.name}"
    return reason


def _plain_and_packed(problem: Problem) -> bool:
    """Whether plain rows and packed columns of one format are asked for, as under "invariant"."""
    if not (problem.lhs and problem.rhs):
        return False
    (row, rows), (col, columns) = map(spec_of, (problem.lhs, problem.rhs))
    return row == col and rows.name == "rows" and hasattr(columns, "spread")


def _in_one_read(problem: Problem) -> bool:
    """Whether both directions are made in one read where one is random or transformed."""
    if not (problem.lhs and problem.rhs) or problem.dtype != torch.bfloat16:
        return False
    rows, columns = (spec_of(spec).format for spec in (problem.lhs, problem.rhs))
    return rows.transform is None and rows.name == columns.untransformed.name == "mxfp4"


def sums_too(dtype: torch.dtype, row: str, col: str) -> bool:
    """Whether the launch that makes these of a matrix sums its columns as well: sums are those of
    values that are not transformed."""
    formats = [spec_of(spec).format for spec in (row, col) if spec]
    if all(fmt.transform is None for fmt in formats):
        return True
    fp4 = all(fmt.untransformed.name in FP4 for fmt in formats)
    return fp4 and dtype == torch.bfloat16 and row == _untransformed(row)


def _untransformed(spec: str) -> str:
    """A spec without the transform of its format."""
    if not spec:
        return ""
    fmt, layout = spec_of(spec)
    return spec if fmt.transform is None else f"{fmt.untransformed.name}@{layout.name}"


class Dequantizer:
    """The values of operands of one size, by a record that is made once."""

    __slots__ = ("dtype", "index", "k_first", "native", "record", "shape")

    def __init__(self, p: Problem) -> None:
        self.native, self.index, self.dtype = binding.native(), p.place.index, p.dtype
        self.k_first = spec_of(p.lhs).layout.k_first
        self.shape = (p.n, p.m) if self.k_first else (p.m, p.n)
        self.record = self.native.DequantizeArgs(
            rows=p.m, k=p.n, out_dtype=DTYPES[p.dtype], device=self.index, **fields_of(p.lhs)
        )

    def __call__(
        self, operand: Operand, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor | None:
        made = self.as_codes_lie(operand, None if self.k_first else into)
        return made.t() if made is not None and self.k_first else made

    def as_codes_lie(self, operand: Operand, out: Tensor | None = None) -> Tensor | None:
        """The values as codes lie, in new memory or in `out`."""
        codes, scales = operand.codes.contiguous(), operand.scales.contiguous()
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=codes.device)
        args = self.record.copy(
            codes=codes.data_ptr(), scales=scales.data_ptr(), out=out.data_ptr(),
            stream=binding.stream(self.index),
        )  # fmt: skip
        return out if binding.supported(self.native.dequantize(args)) else None


class HopperDequantize(Kernel):
    op, name, planner = "dequantize", "sm90", Dequantizer
    formats = MX

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols", formats=self.formats)
        return reason or why_not_dtype(problem, "gives")


class HopperConvert(Kernel):
    """Plain operands to packed ones."""

    op, name = "convert", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        return why_not_each(problem, ("rows", "cols"), ("sm90",))

    def run(self, operand: Operand, spec: str) -> Operand:
        native = binding.native()
        operand = operand.checked("operand")
        with torch.inference_mode(False):  # what is packed may outlive the mode
            sizes = operand.rows, operand.k
            made = binding.empty_operand(spec, *sizes, operand.codes.device)
        binding.expect(native.pack(pack_args(operand, made)), f"an operand of {operand.spec}")
        return made


def pack_args(plain: Operand | Stack, made: Operand | Stack) -> Any:
    """The native record of plain operands, which lie without gaps, that are packed."""
    args = binding.native().PackArgs(
        operand=record_of(binding.native(), plain), out_codes=made.codes.data_ptr(),
        out_scales=made.scales.data_ptr(), out_layout=LAYOUTS["sm90"],
        spread=spec_of(made.spec).layout.spread,  # type: ignore[attr-defined]
    )  # fmt: skip
    binding.set_execution(args, plain.codes.device.index)
    return args


register(HopperConvert())
register(HopperQuantize())
register(HopperRandomQuantize())
register(HopperDequantize())
