"""Blockwise FP8 on Hopper: quantizers, and the GEMM on FP8 tensor cores with fp32 scales.

Where both sides have blocks of 1 x 128, every column of a product has a factor of its own, which
costs half as much again as the products. So columnwise copies whose scales are powers of two by
their rule leave the quantizer as aligned tiles (sm90/layouts/tiles.py), and wgrad runs in the
kernel of MXFP8."""

import torch

from te_mx.backends.base import why_not_dtype
from te_mx.backends.native import BLOCKWISE, is_aligned, one_read
from te_mx.backends.sm90 import gemm
from te_mx.backends.sm90.envelope import not_adaptive, why_not, why_not_each, why_not_second
from te_mx.backends.sm90.gemm import Products
from te_mx.backends.sm90.layouts.factors import SM90_FACTORS, factors_of_tiles
from te_mx.backends.sm90.quantize import HopperDequantize, Quantizer
from te_mx.dispatch import run
from te_mx.dispatch.kernels import Kernel, Plan, PreferredLayouts
from te_mx.dispatch.problem import INVARIANT, Problem
from te_mx.dispatch.registry import register
from te_mx.formats import Format
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand

NAME, LAYOUT = "sm90_blockwise", SM90_FACTORS.name
ALIGNED = "sm90"  # up to the colon
# The tensor cores do not know the elements without negative zero.
FORMATS = tuple(name for name in BLOCKWISE if "fnuz" not in name)


def is_low(fmt: Format) -> bool:
    """Whether blocks have one row."""
    return fmt.scaling.block[0] == 1


def columns_for(problem: Problem, plain: str, aligned: str) -> str:
    """The layout of columnwise copies that are multiplied with each other: aligned where it may."""
    low = all(is_low(spec_of(spec).format) for spec in (problem.lhs, problem.rhs))
    return aligned if low and split_rule(problem.rule)[0] == "pow2" else plain


def makes_both(row: str, col: str, rule: str) -> str | None:
    """Why one read does not make both directions; None when it does."""
    if row and is_aligned(row):
        return "aligns columns only"
    if not (col and is_aligned(col)):
        return one_read(row, col)
    if split_rule(rule)[0] != "pow2":
        return f"aligns scales of the rule pow2, not {rule}"
    if row and spec_of(row).format != spec_of(col).format:
        return "makes both directions in one format"
    return one_read(row, "")


def as_factors(operand: Operand, layout: str = LAYOUT) -> Operand:
    """An aligned operand as one with a factor for every row, of the same values."""
    if not is_aligned(operand.spec):
        return operand
    spec = f"{operand.format.name}@{layout}"
    return operand._replace(scales=factors_of_tiles(operand.scales), spec=spec)


class BlockwiseQuantize(Kernel):
    """Both directions from one read."""

    op, name, planner = "quantize", NAME, Quantizer

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols", LAYOUT, ALIGNED, formats=FORMATS)
        if reason is None and not (problem.lhs or problem.rhs):
            reason = "makes codes"
        reason = reason or makes_both(problem.lhs, problem.rhs, problem.rule)
        return reason or why_not_dtype(problem)


def why_not_sides(problem: Problem) -> str | None:
    """Why the GEMMs do not take the blocks or the elements of a problem."""
    lhs = spec_of(problem.lhs).format
    if not is_low(lhs):
        return f"takes blocks of 1x128 on the left, not {lhs.name}"
    return why_not_second(problem.rhs)


class BlockwiseDequantize(HopperDequantize):
    name = NAME
    formats = FORMATS


class BlockwiseConvert(Kernel):
    """Plain and aligned operands in the layout of the GEMM: the same codes, scales in its order."""

    op, name = "convert", NAME

    def accepts(self, problem: Problem) -> str | None:
        return why_not_each(problem, ("rows", "cols", ALIGNED), (LAYOUT,), FORMATS)

    def run(self, operand: Operand, spec: str) -> Operand:
        fmt, layout = spec_of(operand.spec)
        with torch.inference_mode(False):  # what is packed may outlive the mode
            if is_aligned(operand.spec):
                return as_factors(operand)
            plain = layout.unpack(fmt, operand.codes, operand.scales, operand.k)
            made = SM90_FACTORS.pack(fmt, *plain, operand.k)
        return Operand(*made, spec, operand.rows, operand.k)


class Blockwise(Kernel):
    """FP8 tensor cores; sums of 128 products times both scales are added up in fp32. Two aligned
    operands are multiplied as those of MXFP8."""

    op, name, rank, invariant = "gemm", NAME, 2, True

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, "rows", "cols", LAYOUT, ALIGNED, formats=FORMATS)
        reason = reason or not_adaptive(problem, INVARIANT) or why_not_sides(problem)
        if reason is None and problem.precision == INVARIANT and is_aligned(problem.lhs):
            reason = "multiplies aligned tiles by scales of 128 rows, which 'invariant' forbids"
        return reason

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts(LAYOUT, columns_for(problem, LAYOUT, f"sm90:{problem.spread}"))

    def note(self, problem: Problem) -> str:
        return (
            "FP8 tensor cores keep 13 bits of the sums of 32 products; sums of 128 times their "
            "scales are added up in fp32; docs/numerics.md has the error, also of columns whose "
            "scales are powers of two, which are aligned for wgrad"
        )

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        if not operand.layout.exact:
            return operand
        return run.convert(operand, f"{operand.format.name}@{LAYOUT}")

    def make_plan(self, problem: Problem) -> Plan:
        p, sides = problem, (problem.lhs, problem.rhs)
        if all(map(is_aligned, sides)):
            parts = gemm.parts(p.place.index, p.m, p.n, p.k) if p.split_k else 1
            return Products(self.name, p, parts)
        lhs, rhs = (f"{spec_of(side).format.name}@{LAYOUT}" for side in sides)
        products = Products(self.name, p._replace(lhs=lhs, rhs=rhs), 1)
        if (lhs, rhs) == sides:
            return products
        return lambda q: products(
            q._replace(lhs=run.convert(q.lhs, lhs), rhs=run.convert(q.rhs, rhs))
        )


for _kernel in (BlockwiseQuantize, BlockwiseDequantize, BlockwiseConvert, Blockwise):
    register(_kernel())
