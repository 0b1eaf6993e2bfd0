"""The linear layer of Hopper as one native call each way."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES
from te_mx.backends.base import FORMATS as FORMAT_IDS
from te_mx.backends.native import words_of
from te_mx.backends.sm90 import binding_linear
from te_mx.backends.sm90.envelope import MX, why_not
from te_mx.backends.sm90.gemm import ADAPTIVE
from te_mx.dispatch.linear import Held, LinearKernel, LinearPlan, LinearProblem, Part
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized


def known(spec: str) -> bool:
    """Whether native code knows the format of a spec."""
    return spec_of(spec).format.name in MX


class OneCall(LinearKernel):
    """In the kernels of precision "adaptive", with K in one piece."""

    name = ADAPTIVE

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem)
        if reason is None and problem.precision != "adaptive":
            reason = f"is for precision 'adaptive', this asks for {problem.precision!r}"
        if reason is None and not (problem.lhs == problem.rhs and known(problem.grad)):
            reason = f"takes {', '.join(MX)}, one of them for both inputs and weights"
        return reason or ("keeps K in one piece" if problem.split_k else None)

    def plan(self, problem: LinearProblem) -> LinearPlan:
        return _plan(problem)


@lru_cache(maxsize=4096)
def _plan(p: LinearProblem) -> LinearPlan:
    s = p.settings
    forward, backward = (words_of(f"{fmt}@rows")[0] for fmt in (s.x, s.g))
    words = SCALE_RULES[s.scale_rule], s.spread, FORMAT_IDS[forward], FORMAT_IDS[backward]
    return Plan(binding_linear.Shape(*p[:6]), words, f"{s.x}@sm90:{s.spread}")


class Plan(LinearPlan):
    kernel = ADAPTIVE

    def __init__(
        self, shape: binding_linear.Shape, words: tuple[int, int, int, int], spec: str
    ) -> None:
        self.spec = spec
        self.calls = binding_linear.Calls(shape, words)
        self.forward = self.calls.forward  # type: ignore[method-assign]

    def backward(
        self, grad: Tensor, x_col: Part | None, w: Tensor | None, x_shape: torch.Size,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None], add_to: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
        if grad.dtype not in FLOAT_DTYPES:
            return None
        return self.calls.backward(grad, x_col, w, x_shape, dtypes, add_to)

    def quantized(self, held: Held) -> Quantized:
        (m, _, k, *_), room = self.calls.shape, self.calls.room
        col = held.x_col
        return Quantized(
            self._operand(held.x_row, room.x_row, m, k),
            None if col is None else self._operand(col, room.x_col, k, m),
        )

    def w_columns(self, w_col: Tensor) -> Operand:
        _, n, k, *_ = self.calls.shape
        return self._operand((w_col, None), self.calls.room.w_col, k, n)

    def _operand(self, part: Part, room: binding_linear.Place, rows: int, k: int) -> Operand:
        codes, scales = binding_linear.operand_of(part, room, rows, k)
        return Operand(codes, scales, self.spec, rows, k)

    def as_saved(
        self, x_col: Part | None, w_col: Tensor | None
    ) -> tuple[Part | None, Tensor | None]:
        if x_col is not None:
            first, scales = x_col
            if scales is None:
                x_col = _aligned(first), None
            else:
                m, _, k, *_ = self.calls.shape
                x = Operand(first, scales, self.spec, k, m).checked("the input")
                x_col = x.codes, x.scales
        return x_col, w_col if w_col is None else _aligned(w_col)


def _aligned(buffer: Tensor) -> Tensor:
    if buffer.is_contiguous() and buffer.data_ptr() % binding_linear.ALIGNMENT == 0:
        return buffer
    return buffer.clone(memory_format=torch.contiguous_format)


def forget_plans() -> None:
    """For tests, which put another native module in place."""
    _plan.cache_clear()
    binding_linear.rooms.cache_clear()


register(OneCall())
