"""A small linear layer as one native call each way, or once without gradients: what the host does
between the calls of the quantizer and of the GEMM would cost more than they do."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, format_fields
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.envelope import why_not, why_not_level
from te_mx.backends.cpu.gemm import PANELS
from te_mx.backends.linear_calls import Calls, Shape, Specs, form_of
from te_mx.backends.native import words_of
from te_mx.dispatch.linear import InferKernel, LinearKernel, LinearProblem
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.runtime import workspace

MOST_CODES = 1 << 20  # of x and w, or of the output gradient, which then stay in a cache


class Small(LinearKernel):
    """In the kernels of one level: of each product the stream kernel where that pays."""

    def __init__(self, name: str, level: str, rank: int) -> None:
        self.name, self.level, self.rank = name, level, rank

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True) or why_not_level(self.name, self.level, problem)
        if reason is None and not _alike(problem.lhs, problem.rhs):
            reason = "takes inputs and weights of one element and one kind of scale"
        if reason is None and problem.grad:
            reason = why_not(problem._replace(lhs=problem.grad), blockwise=True)
            if reason is None and not _multiplied(problem.lhs, problem.grad):
                reason = "takes gradients in blocks like those of inputs"
        if reason is None and (problem.empty or problem.dtype not in FLOAT_DTYPES):
            reason = "takes float32, bfloat16 and float16, nothing empty"
        m, n, k = problem.m, problem.n, problem.k
        if reason is None and max((m + n) * k, m * n if problem.grad else 0) > MOST_CODES:
            reason = f"is for layers of at most {MOST_CODES} codes"
        return reason

    def plan(self, problem: LinearProblem) -> CpuCalls:
        return _plan(problem, self.name)


class SmallInfer(InferKernel):
    """The forward half of it."""

    def __init__(self, small: Small) -> None:
        self.name, self.rank, self.accepts = small.name, small.rank, small.accepts  # type: ignore[method-assign]

    def infer(
        self, settings: Any, x: Tensor, w_NK: Tensor, bias_N: Tensor | None,
        out_dtype: torch.dtype, tag: int = -1,
    ) -> Tensor:  # fmt: skip
        n, k = w_NK.shape
        plan = _plan(LinearProblem(x.numel() // k, n, k, False, False, False, settings), self.name)
        return plan.forward(x, w_NK, bias_N, out_dtype, None, None, False, tag)[0]


class CpuCalls(Calls):
    any_strides = True
    names = binding.KERNELS

    def acquire(self, nbytes: int, device: torch.device) -> Tensor:
        return workspace.acquire(device, nbytes)  # type: ignore[return-value]

    def run(self, call: Callable[[Any], Any], args: Any, temp: Tensor, nbytes: int) -> int:
        args.threads = torch.get_num_threads()
        status, ran = call(args)
        workspace.release(temp, nbytes)
        return -1 if status and not binding.supported(status) else ran


@lru_cache(maxsize=4096)
def _plan(p: LinearProblem, kernel: str) -> CpuCalls:
    s = p.settings
    specs = Specs(f"{s.x}@rows", f"{s.x}@cols", f"{s.w}@rows", f"{s.w}@cols")
    form = form_of(p, binding.KERNEL_IDS[kernel])
    return CpuCalls(binding.native(), Shape(*p[:6]), form, specs)


def _alike(x: str, w: str) -> bool:
    """Whether two formats differ in the rows of a block alone."""
    one, other = (format_fields(words_of(spec)[0]) | {"block_rows": 1} for spec in (x, w))
    return one == other


def _multiplied(x: str, g: str) -> bool:
    """Whether two formats differ in the element alone."""
    return spec_of(x).format.scaling.block == spec_of(g).format.scaling.block


for _rank, (_level, _name) in enumerate(PANELS.items()):
    _small = Small(_name, _level, _rank)
    register(_small)
    register(SmallInfer(_small))
