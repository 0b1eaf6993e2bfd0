"""A small linear layer as one native call each way, or once without gradients: what the host does
between the calls of the quantizer and of the GEMM would cost more than they do."""

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, format_fields
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.binding import why_not, why_not_level
from te_mx.backends.cpu.gemm import PANELS
from te_mx.backends.linear_calls import Calls, Formats, Shape, Specs, linear_formats
from te_mx.backends.native import words_of
from te_mx.dispatch.linear import Dtypes, InferKernel, LinearKernel, LinearProblem
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
        if reason is None:
            x, w = (format_fields(words_of(one)[0]) for one in (problem.lhs, problem.rhs))
            if x | {"block_rows": 1} != w | {"block_rows": 1}:
                reason = "takes inputs and weights of one element and one kind of scale"
        if reason is None and problem.grad:
            reason = why_not(problem._replace(lhs=problem.grad), blockwise=True)
            blocks = {spec_of(s).format.scaling.block for s in (problem.lhs, problem.grad)}
            if reason is None and len(blocks) > 1:
                reason = "takes gradients in blocks like those of inputs"
        if reason is None and (problem.empty or problem.dtype not in FLOAT_DTYPES):
            reason = "takes float32, bfloat16 and float16, nothing empty"
        m, n, k = problem.m, problem.n, problem.k
        if reason is None and max((m + n) * k, m * n if problem.grad else 0) > MOST_CODES:
            reason = f"is for layers of at most {MOST_CODES} codes"
        return reason

    def make_plan(self, problem: LinearProblem) -> Any:
        s = problem.settings
        return self.calls(
            Shape(*problem[:6]), (s.x, s.w, s.g), s.scale_rule, s.spread, *problem[7:]
        )

    def calls(
        self, shape: Shape, formats: Formats, rule: str, spread: int, *how: Any
    ) -> "CpuCalls":
        x, w, _ = formats
        specs = Specs(f"{x}@rows", f"{x}@cols", f"{w}@rows", f"{w}@cols")
        form = linear_formats(formats, rule, spread, binding.KERNEL_IDS[self.name])
        return CpuCalls(binding.native(), shape, form, specs, *how)


class SmallInfer(InferKernel, Small):
    """The forward half of it."""

    def make_plan(self, problem: Any) -> Any:
        p, (x, w) = problem, (spec.partition("@")[0] for spec in (problem.lhs, problem.rhs))
        shape = Shape(p.m, p.n, p.k, False, False, False)
        known: dict[Any, CpuCalls] = {}

        def infer(
            x_MK: Tensor, w_NK: Tensor, bias_N: "Tensor | None", out_dtype: torch.dtype,
            tag: int = -1,
        ) -> Tensor:  # fmt: skip
            key = x_MK.shape, Dtypes(x_MK.dtype, w_NK.dtype, None, out_dtype)
            calls = known.get(key)
            if calls is None:
                calls = known[key] = self.calls(shape, (x, w, x), p.rule, p.spread, key[1], key[0])
            return calls.forward(x_MK, w_NK, bias_N, None, None, False, tag)[0]

        return infer


class CpuCalls(Calls):
    any_strides, pooled, start = True, True, "workspace, threads"
    names = binding.KERNELS
    supported = staticmethod(binding.supported)

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self.wgrad_temp = self.room.backward_temp

    def started(self, nbytes: int, beside: Tensor) -> tuple[Any, ...]:
        return workspace.acquire(beside.device, nbytes), torch.get_num_threads()


for _rank, (_level, _name) in enumerate(PANELS.items()):
    register(Small(_name, _level, _rank))
    register(SmallInfer(_name, _level, _rank))
