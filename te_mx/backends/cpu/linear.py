"""A small linear layer without gradients as one native call: what the host does between the calls
of the quantizer and of the GEMM would cost more than they do."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES, format_fields
from te_mx.backends.cpu import binding
from te_mx.backends.cpu.envelope import why_not, why_not_level
from te_mx.backends.cpu.gemm import PANELS, why_not_stream
from te_mx.backends.native import words_of
from te_mx.dispatch.linear import InferKernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats.scaling import split_rule
from te_mx.runtime import workspace
from te_mx.runtime.cpu_memory import CPU

MOST_BYTES = 1 << 20  # of codes, which then stay in a cache between the calls


class SmallLinear(InferKernel):
    def __init__(self, level: str, kernel: str, stream: bool, rank: int) -> None:
        self.level, self.name, self.stream, self.rank = level, kernel, stream, rank
        self.number = binding.KERNEL_IDS[kernel]

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem, blockwise=True) or why_not_level(self.name, self.level, problem)
        if reason is None and self.stream:
            reason = why_not_stream(self.name, problem)
        if reason is None and not _alike(problem.lhs, problem.rhs):
            reason = "takes inputs and weights of one element and one kind of scale"
        if reason is None and (problem.empty or problem.dtype not in FLOAT_DTYPES):
            reason = "takes float32, bfloat16 and float16, nothing empty"
        if reason is None and (problem.m + problem.n) * problem.k > MOST_BYTES:
            reason = f"is for layers whose codes take at most {MOST_BYTES} bytes"
        return reason

    def make_plan(self, problem: Problem) -> Any:
        return partial(self.infer, problem)

    def infer(
        self, p: Problem, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
    ) -> tuple[Tensor, str] | None:
        plan, nbytes = _plan(p.m, p.n, p.k, (p.lhs, p.rhs), p.rule, self.number)
        x_MK = x if x.dim() == 2 else x.reshape(p.m, p.k)
        y = torch.empty((*x.shape[:-1], p.n), dtype=out_dtype, device=CPU)
        (x_row, x_col), (w_row, w_col) = x_MK.stride(), w_NK.stride()
        args = plan.copy(
            x_data=x_MK.data_ptr(), x_row_stride=x_row, x_col_stride=x_col,
            x_dtype=FLOAT_DTYPES[x.dtype], w_data=w_NK.data_ptr(), w_row_stride=w_row,
            w_col_stride=w_col, w_dtype=FLOAT_DTYPES[w_NK.dtype], y=y.data_ptr(),
            y_dtype=FLOAT_DTYPES[out_dtype], threads=torch.get_num_threads(),
        )  # fmt: skip
        if bias_N is not None:
            if bias_N.stride(0) != 1:
                bias_N = bias_N.contiguous()
            args.bias, args.bias_dtype = bias_N.data_ptr(), FLOAT_DTYPES[bias_N.dtype]
        scratch = workspace.acquire(CPU, nbytes)
        args.workspace = scratch.data_ptr()  # type: ignore[union-attr]
        status, ran = binding.native().linear_forward(args)  # type: ignore[union-attr]
        workspace.release(scratch, nbytes)
        if status and not binding.supported(status):
            return None
        return y, binding.KERNELS[ran]


def _alike(x: str, w: str) -> bool:
    """Whether two formats differ in the rows of a block alone."""
    one, other = (format_fields(words_of(spec)[0]) | {"block_rows": 1} for spec in (x, w))
    return one == other


@lru_cache(maxsize=256)
def _plan(
    m: int, n: int, k: int, specs: tuple[str, str], rule: str, kernel: int
) -> tuple[Any, int]:
    """The native record of a layer with what does not change between calls, and its workspace."""
    native = binding.native()
    x, w = (format_fields(words_of(spec)[0]) for spec in specs)
    name, epsilon = split_rule(rule)
    element, w_scaling = x.pop("element"), {f"w_{f}": v for f, v in w.items() if f != "element"}
    plan = native.LinearArgs(  # type: ignore[union-attr]
        m=m, n=n, k=k, forward=element, rule=SCALE_RULES[name], amax_epsilon=epsilon,
        x_rows=m, x_cols=k, w_rows=n, w_cols=k, kernel=kernel, **x, **w_scaling,
    )  # fmt: skip
    plan.workspace_bytes = native.linear_workspace_bytes(plan)  # type: ignore[union-attr]
    return plan, plan.workspace_bytes


for _rank, (_level, _name) in enumerate(PANELS.items()):
    register(SmallLinear(_level, f"{_level}_stream", True, 2 * _rank))
    register(SmallLinear(_level, _name, False, 2 * _rank + 1))
