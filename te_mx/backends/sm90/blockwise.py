"""Blockwise FP8 on Hopper: quantizers, and the GEMM on FP8 tensor cores with fp32 scales."""

from __future__ import annotations

import torch

from te_mx.backends.native import BLOCKWISE, native_operand, one_read
from te_mx.backends.sm90 import binding, binding_blockwise
from te_mx.backends.sm90.envelope import why_not
from te_mx.backends.sm90.gemm import Scratched, Scratches
from te_mx.backends.sm90.quantize import HopperDequantize
from te_mx.dispatch import run
from te_mx.dispatch.calls import FLOAT_DTYPES, Product, Quantize, Ran
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import Kernel, Wants, register
from te_mx.formats import Format
from te_mx.layouts import SM90_FACTORS, spec_of
from te_mx.layouts.operand import Operand, Quantized

NAME, LAYOUT = "sm90_blockwise", SM90_FACTORS.name
# The tensor cores do not know the elements without negative zero.
FORMATS = tuple(name for name in BLOCKWISE if "fnuz" not in name)


class BlockwiseQuantize(Kernel):
    """Both directions from one read."""

    op, name = "quantize", NAME

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols", LAYOUT, formats=FORMATS)
        if reason is None and not (problem.lhs or problem.rhs):
            reason = "makes codes"
        if reason is None:
            reason = one_read(problem.lhs, problem.rhs)
        if reason is None and problem.dtype not in FLOAT_DTYPES:
            reason = f"takes float32, bfloat16 and float16, not {problem.dtype}"
        return reason

    def run(self, what: Quantize) -> Quantized | None:
        return binding_blockwise.quantize(what)


class BlockwiseDequantize(HopperDequantize):
    name = NAME
    formats = FORMATS


class BlockwiseConvert(Kernel):
    """Plain operands to the layout of the GEMM: their codes as they are, their scales reordered."""

    op, name = "convert", NAME

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem._replace(rhs=""), "rows", "cols", formats=FORMATS) or why_not(
            problem._replace(lhs=problem.rhs, rhs=""), LAYOUT, formats=FORMATS
        )

    def run(self, operand: Operand, spec: str) -> Operand:
        fmt, layout = spec_of(operand.spec)
        with torch.inference_mode(False):  # what is packed may outlive the mode
            plain = layout.unpack(fmt, operand.codes, operand.scales, operand.k)
            made = SM90_FACTORS.pack(fmt, *plain, operand.k)
        return Operand(*made, spec, operand.rows, operand.k)


class Blockwise(Scratched):
    """FP8 tensor cores; sums of 128 products times both scales are added up in fp32."""

    name, rank = NAME, 2

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols", LAYOUT, formats=FORMATS)
        if reason is not None:
            return reason
        if problem.precision != "adaptive":
            return f"is for precision 'adaptive', this asks for {problem.precision!r}"
        sides = [spec_of(spec) for spec in (problem.lhs, problem.rhs)]
        if sides[0].layout.name == "any" and _is_low(sides[1].format):
            return None  # a question for layouts, which both sides have in common
        if not _is_low(sides[0].format):
            return f"takes blocks of 1x128 on the left, not {sides[0].format.name}"
        return None

    def wants(self, problem: Problem) -> Wants:
        return Wants(LAYOUT, LAYOUT)

    def note(self, problem: Problem) -> str:
        return (
            "FP8 tensor cores keep 13 bits of the sums of 32 products; sums of 128 times their "
            "scales are added up in fp32; docs/numerics.md has the error"
        )

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        return run.convert(operand, f"{operand.format.name}@{LAYOUT}")

    def multiply(self, p: Product, scratch: Scratches) -> Ran | None:
        lhs, rhs = (
            native_operand(run.convert(side, f"{side.format.name}@{LAYOUT}"))
            for side in (p.lhs, p.rhs)
        )
        done, bias_grad = binding.gemm(rhs, lhs, p.epilogue, p.out, p.aux, 0, scratch)
        if not done:
            return None
        if p.epilogue.bias_grad == "operand":
            bias_grad = p.lhs.values(torch.float64).sum(1).to(torch.float32)
        return Ran(self.name, bias_grad)


def _is_low(fmt: Format) -> bool:
    """Whether blocks have one row."""
    return fmt.scaling.block[0] == 1


for _kernel in (BlockwiseQuantize, BlockwiseDequantize, BlockwiseConvert, Blockwise):
    register(_kernel())
