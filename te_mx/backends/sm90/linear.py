"""The linear layer of Hopper as one native call each way."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES
from te_mx.backends.base import FORMATS as FORMAT_IDS
from te_mx.backends.native import FORMATS, words_of
from te_mx.backends.sm90 import binding_linear
from te_mx.backends.sm90.envelope import why_not
from te_mx.backends.sm90.gemm import ADAPTIVE
from te_mx.dispatch.linear import LinearKernel, LinearPlan, LinearProblem
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand


def known(spec: str) -> bool:
    """Whether native code knows the format of a spec."""
    return spec_of(spec).format.name in FORMATS


class OneCall(LinearKernel):
    """In the kernels of precision "adaptive", with K in one piece."""

    name = ADAPTIVE

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem)
        if reason is None and problem.precision != "adaptive":
            reason = f"is for precision 'adaptive', this asks for {problem.precision!r}"
        if reason is None and not (problem.lhs == problem.rhs and known(problem.grad)):
            reason = f"takes {', '.join(FORMATS)}, one of them for both inputs and weights"
        return reason or ("keeps K in one piece" if problem.split_k else None)

    def plan(self, problem: LinearProblem) -> LinearPlan:
        return _plan(problem)


@lru_cache(maxsize=4096)
def _plan(p: LinearProblem) -> LinearPlan:
    s = p.settings
    forward, backward = (words_of(f"{fmt}@rows")[0] for fmt in (s.x, s.g))
    words = SCALE_RULES[s.scale_rule], s.spread, FORMAT_IDS[forward], FORMAT_IDS[backward]
    return Plan(binding_linear.Shape(*p[:5]), words, f"{s.x}@sm90:{s.spread}")


class Plan(LinearPlan):
    kernel = ADAPTIVE

    def __init__(
        self, shape: binding_linear.Shape, words: tuple[int, int, int, int], spec: str
    ) -> None:
        self.spec = spec
        self.calls = binding_linear.Calls(shape, words)
        self.forward = self.calls.forward  # type: ignore[method-assign]

    def backward(
        self, grad: Tensor, saved: Tensor, x_shape: torch.Size,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
        if grad.dtype not in FLOAT_DTYPES:
            return None
        return self.calls.backward(grad, saved, x_shape, dtypes)

    def operands(self, saved: Tensor) -> tuple[Operand | None, Operand | None]:
        shape = self.calls.shape
        x, w = binding_linear.saved_operands(saved, shape)
        return (
            None if x is None else Operand(x[0], x[1], self.spec, shape.k, shape.m),
            None if w is None else Operand(w[0], w[1], self.spec, shape.k, shape.n),
        )

    def aligned(self, saved: Tensor) -> Tensor:
        if saved.is_contiguous() and saved.data_ptr() % binding_linear.ALIGNMENT == 0:
            return saved
        return saved.clone(memory_format=torch.contiguous_format)


def forget_plans() -> None:
    """For tests, which put another native module in place."""
    _plan.cache_clear()
    binding_linear.rooms.cache_clear()


register(OneCall())
