"""The linear layer of Hopper as one native call each way."""

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.linear_calls import ALIGNMENT, Calls, Shape, Specs, linear_formats
from te_mx.backends.native import MX
from te_mx.backends.sm90 import binding as sm90
from te_mx.backends.sm90 import blockwise
from te_mx.backends.sm90.envelope import not_adaptive, why_not, why_not_second
from te_mx.backends.sm90.gemm import ADAPTIVE
from te_mx.backends.sm90.layouts.factors import SM90_FACTORS
from te_mx.dispatch.linear import LinearKernel, LinearPlan, LinearProblem
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of


def _format(spec: str) -> Any:
    return spec_of(spec).format


class OneCall(LinearKernel):
    """In the kernels of precision "adaptive", with K in one piece."""

    name = ADAPTIVE
    formats = MX

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, formats=self.formats)
        reason = reason or not_adaptive(problem) or self.why_not_formats(problem)
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


def _plan(p: LinearProblem, kernel: str) -> LinearPlan:
    s = p.settings
    tiles = f"sm90:{s.spread}"
    rows = SM90_FACTORS.name if kernel == blockwise.NAME else tiles
    columns = tiles if split_rule(s.scale_rule)[0] != "fp32" else SM90_FACTORS.name
    w = f"{s.w}@{rows}"
    specs = Specs(f"{s.x}@{rows}", f"{s.x}@{columns}", w, w)
    form = linear_formats((s.x, s.w, s.g), s.scale_rule, s.spread)
    return Sm90Calls(kernel, Shape(*p[:6]), form, specs, *p[7:])


class Sm90Calls(Calls):
    pitch, start = ALIGNMENT, "workspace, stream, device"
    supported = staticmethod(sm90.supported)

    def __init__(self, kernel: str, *how: Any) -> None:
        super().__init__(sm90.native(), *how)
        self.names = (kernel,)

    def started(self, nbytes: int, beside: Tensor) -> tuple[Any, ...]:
        temp = beside.new_empty(nbytes, dtype=torch.uint8) if nbytes else None
        index = beside.device.index
        return temp, sm90.stream(index), index


register(OneCall())
register(OneCallBlockwise())
