"""The linear layer of Hopper as one native call each way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_mx.backends.base import SCALE_RULES, format_fields
from te_mx.backends.native import words_of
from te_mx.backends.sm90 import binding_linear, blockwise
from te_mx.backends.sm90.envelope import MX, why_not, why_not_second
from te_mx.backends.sm90.gemm import ADAPTIVE
from te_mx.backends.sm90.layouts.factors import SM90_FACTORS
from te_mx.dispatch.linear import Held, LinearKernel, LinearPlan, LinearProblem, Part
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized


def _format(spec: str) -> Any:
    return spec_of(spec).format


class OneCall(LinearKernel):
    """In the kernels of precision "adaptive", with K in one piece."""

    name = ADAPTIVE
    formats = MX

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, formats=self.formats)
        if reason is None and problem.precision != "adaptive":
            reason = f"is for precision 'adaptive', this asks for {problem.precision!r}"
        if reason is None:
            reason = self.why_not_formats(problem)
        return reason or ("keeps K in one piece" if problem.split_k else None)

    def why_not_formats(self, problem: Problem) -> str | None:
        """Why not the formats of a problem, of which the native code knows those of x and w."""
        if problem.lhs == problem.rhs and _format(problem.grad).name in MX:
            return why_not_second(problem.rhs)
        return f"takes {', '.join(MX)}, one of them for both inputs and weights"

    def make_plan(self, problem: LinearProblem) -> LinearPlan:
        return _plan(problem, self.name)


class OneCallBlockwise(OneCall):
    """The same of blockwise FP8."""

    name, rank = blockwise.NAME, 1
    formats = blockwise.FORMATS

    def why_not_formats(self, problem: Problem) -> str | None:
        x, w, g = map(_format, (problem.lhs, problem.rhs, problem.grad))
        if g.name not in self.formats or not (blockwise.is_low(x) and blockwise.is_low(g)):
            return "takes inputs and gradients in blocks of 1x128"
        if x.element.name != w.element.name:
            return "takes inputs and weights of one element"
        if blockwise.is_low(w) and split_rule(problem.rule)[0] == "pow2":
            return "takes weights in blocks of 128x128 where scales are powers of two"
        return why_not_second(problem.rhs)


class Specs(NamedTuple):
    """Of the operands of x, and of both of w."""

    row: str
    col: str
    w_row: str


def _plan(p: LinearProblem, kernel: str) -> LinearPlan:
    s = p.settings
    x, w, g = (format_fields(words_of(f"{fmt}@rows")[0]) for fmt in (s.x, s.w, s.g))
    rule, epsilon = split_rule(s.scale_rule)
    scaling = {name: value for name, value in x.items() if name != "element"}
    scaling |= {f"w_{name}": value for name, value in w.items() if name != "element"}
    form = binding_linear.Form(
        x["element"], g["element"], SCALE_RULES[rule], s.spread, epsilon, **scaling
    )
    tiles = f"sm90:{s.spread}"
    rows = SM90_FACTORS.name if kernel == blockwise.NAME else tiles
    columns = tiles if rule != "fp32" else SM90_FACTORS.name
    specs = Specs(f"{s.x}@{rows}", f"{s.x}@{columns}", f"{s.w}@{rows}")
    return Plan(kernel, binding_linear.Calls(binding_linear.Shape(*p[:6]), form), specs)


class Plan(LinearPlan):
    def __init__(self, kernel: str, calls: binding_linear.Calls, specs: Specs) -> None:
        self.kernel, self.calls = kernel, calls
        self.row, self.col, self.w_row = specs
        self.forward = calls.forward  # type: ignore[method-assign]
        self.backward = calls.backward  # type: ignore[method-assign]
        self.wgrad = calls.wgrad  # type: ignore[method-assign]

    def quantized(self, held: Held) -> Quantized:
        (m, _, k, *_), room = self.calls.shape, self.calls.room
        col, of = held.x_col, binding_linear.operand_of
        assert held.x_row is not None
        return Quantized(
            of(held.x_row, room.x_row, self.row, m, k),
            None if col is None else of(col, room.x_col, self.col, k, m),
        )

    def w_columns(self, w_col: Part) -> Operand:
        _, n, k, *_ = self.calls.shape
        return binding_linear.operand_of(w_col, self.calls.room.w_col, self.w_row, k, n)

    def as_saved(self, x_col: Part | None, w_col: Part | None) -> tuple[Part | None, Part | None]:
        m, n, k, *_ = self.calls.shape
        if x_col is not None:
            x_col = _saved(x_col, self.col, k, m, "the input")
        if w_col is not None:
            w_col = _saved(w_col, self.w_row, k, n, "the weight")
        return x_col, w_col


def _saved(part: Part, spec: str, rows: int, k: int, what: str) -> Part:
    """A part as kernels read it, whatever hooks on saved tensors made of it."""
    first, scales = part
    if scales is None:
        if first.is_contiguous() and first.data_ptr() % binding_linear.ALIGNMENT == 0:
            return part
        return first.clone(memory_format=torch.contiguous_format), None
    operand = Operand(first, scales, spec, rows, k).checked(what)
    return operand.codes, operand.scales


register(OneCall())
register(OneCallBlockwise())
