"""The quantizers of Hopper: both directions of a matrix from one read, plain or packed for the
GEMM; two matrices at once; and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from te_mx.backends.base import PLAIN, QuantizedParts
from te_mx.backends.base import Quantize as NativeQuantize
from te_mx.backends.native import native_operand, one_read, words_of
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.binding_codes import CodesOnce, ValuesOnce
from te_mx.backends.sm90.envelope import MX, why_not
from te_mx.backends.sm90.layouts.tiles import SM90Tiles
from te_mx.dispatch.calls import FLOAT_DTYPES, Quantize
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats.scaling import is_stochastic, split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized


def _native_call(what: Quantize) -> NativeQuantize:
    x, row, col, rule, col_sum, sum_dtype = what[:6]
    fmt, form, spread = _words(row, col)
    return NativeQuantize(x, fmt, bool(row), form, rule, col_sum, sum_dtype, spread)


@lru_cache(maxsize=256)
def _words(row: str, col: str) -> tuple[str, str | None, int]:
    """The format, how columns lie and the spread of operands of these specs."""
    fmt, order = words_of(col or row)
    layout = spec_of(col or row).layout if col or row else None
    spread = layout.spread if isinstance(layout, SM90Tiles) else PLAIN
    return fmt, None if not col else "plain" if order == "k_first" else "transposed", spread


def _quantized(
    what: Quantize, parts: QuantizedParts, shape: tuple[int, int] | None = None
) -> Quantized:
    """What was made; of a matrix of this shape where x is a part of it."""
    rows, cols = shape or what.x.shape
    return Quantized(
        Operand(parts.row_codes, parts.row_scales, what.row, rows, cols) if what.row else None,  # type: ignore[arg-type]
        Operand(parts.col_codes, parts.col_scales, what.col, cols, rows) if what.col else None,  # type: ignore[arg-type]
        parts.col_sum,
    )


class HopperQuantize(Kernel):
    op, name = "quantize", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols", "sm90")
        if reason is None:
            reason = one_read(problem.lhs, problem.rhs)
        if reason is None and problem.dtype not in FLOAT_DTYPES:
            reason = f"takes float32, bfloat16 and float16, not {problem.dtype}"
        return reason

    def run(self, what: Quantize) -> Quantized | None:
        parts = binding.quantize(_native_call(what))
        return None if parts is None else _quantized(what, parts)

    def once(self, problem: Problem) -> Callable[[Tensor], Operand | None] | None:
        fmt, order = words_of(problem.lhs) if problem.lhs and not problem.rhs else ("", "")
        return CodesOnce(problem, fmt).run if order == "k_last" else None

    def run_two(self, first: Quantize, second: Quantize) -> tuple[Quantized, Quantized] | None:
        """Both at the same time where the GPU has room; the first without col_sum."""
        both = binding.quantize_two(_native_call(first), _native_call(second))
        if both is None:
            return None
        return _quantized(first, both[0]), _quantized(second, both[1])

    def run_joined(
        self, parts: Sequence[Tensor], row: str, col: str, rule: str
    ) -> Quantized | None:
        """Matrices as one, read where they lie; None where they must be joined first."""
        first = parts[0]
        what = Quantize(first, row, col, rule)
        call = _native_call(what)
        if call.spread == PLAIN or any(part.stride() != first.stride() for part in parts):
            return None
        made = binding.quantize_joined(call, parts)
        shape = sum(len(part) for part in parts), first.shape[1]
        return None if made is None else _quantized(what, made, shape)


class HopperRandomQuantize(Kernel):
    """With stochastic rounding to MXFP4, or one direction after a Hadamard transform."""

    op, name = "quantize", "sm90_random"

    def accepts(self, problem: Problem) -> str | None:
        specs = [spec for spec in (problem.lhs, problem.rhs) if spec]
        stochastic = is_stochastic(problem.rule)
        transforms = any(spec_of(spec).format.transform is not None for spec in specs)
        if not (stochastic or transforms):
            return "is for stochastic rounding and Hadamard transforms"
        lhs, rhs = _untransformed(problem.lhs), _untransformed(problem.rhs)
        plain = problem._replace(lhs=lhs, rhs=rhs, rule=split_rule(problem.rule)[0])
        reason = HopperQuantize.accepts(self, plain)  # type: ignore[arg-type]
        if reason is None and transforms and len(specs) > 1:
            reason = "transforms one direction at a time"
        if reason is None and stochastic and words_of(specs[0])[0] != "e2m1":
            reason = f"rounds MXFP4 stochastically, not {spec_of(specs[0]).format.name}"
        return reason

    def run(self, what: Quantize) -> Quantized | None:
        row, col = _untransformed(what.row), _untransformed(what.col)
        plain = what._replace(row=row, col=col, rule=split_rule(what.rule)[0])
        transforms = [
            None if not spec else spec_of(spec).format.transform for spec in (what.row, what.col)
        ]
        parts = binding.quantize_randomly(_native_call(plain), transforms, what.seed, what.first)
        return None if parts is None else _quantized(what, parts)


def _untransformed(spec: str) -> str:
    """A spec without the transform of its format."""
    if not spec:
        return ""
    fmt, layout = spec_of(spec)
    return spec if fmt.transform is None else f"{fmt.untransformed.name}@{layout.name}"


class HopperDequantize(Kernel):
    op, name = "dequantize", "sm90"
    formats = MX

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols", formats=self.formats)
        if reason is None and problem.dtype not in FLOAT_DTYPES:
            reason = f"gives float32, bfloat16 and float16, not {problem.dtype}"
        return reason

    def once(self, problem: Problem) -> Callable[..., Tensor | None] | None:
        fmt, order = words_of(problem.lhs)
        mx = spec_of(problem.lhs).format.name in MX
        return ValuesOnce(problem, fmt).run if order == "k_last" and mx else None

    def run(self, operand: Operand, dtype: torch.dtype) -> Tensor | None:
        plain = native_operand(operand)
        plain = plain._replace(codes=plain.codes.contiguous(), scales=plain.scales.contiguous())
        values = binding.dequantize(plain, dtype)
        return values if values is None or plain.order == "k_last" else values.t()


class HopperConvert(Kernel):
    """Plain operands to packed ones."""

    op, name = "convert", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem._replace(rhs=""), "rows", "cols") or why_not(
            problem._replace(lhs=problem.rhs, rhs=""), "sm90"
        )

    def run(self, operand: Operand, spec: str) -> Operand:
        spread = spec_of(spec).layout.spread  # type: ignore[attr-defined]
        with torch.inference_mode(False):  # what is packed may outlive the mode
            made = binding.pack(native_operand(operand.checked("operand")), spread)
        return Operand(made.codes, made.scales, spec, operand.rows, operand.k)


register(HopperConvert())
register(HopperQuantize())
register(HopperRandomQuantize())
register(HopperDequantize())
