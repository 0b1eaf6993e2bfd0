"""A small linear layer without gradients as one native call: what the host does between the calls
of the quantizer and of the GEMM would cost more than they do."""

from __future__ import annotations

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


class Small:
    """Layers of one size, by a record that is made once."""

    __slots__ = ("native", "nbytes", "record", "sizes")

    def __init__(self, p: Problem, kernel: int) -> None:
        native: Any = binding.native()
        self.native, self.sizes = native, (p.m, p.n, p.k)
        x, w = (format_fields(words_of(spec)[0]) for spec in (p.lhs, p.rhs))
        name, epsilon = split_rule(p.rule)
        element, w_scaling = x.pop("element"), {f"w_{f}": v for f, v in w.items() if f != "element"}
        self.record = native.LinearArgs(
            m=p.m, n=p.n, k=p.k, forward=element, rule=SCALE_RULES[name], amax_epsilon=epsilon,
            x_rows=p.m, x_cols=p.k, w_rows=p.n, w_cols=p.k, kernel=kernel, **x, **w_scaling,
        )  # fmt: skip
        self.nbytes = self.record.workspace_bytes = native.linear_workspace_bytes(self.record)

    def __call__(
        self, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
    ) -> tuple[Tensor, str] | None:
        m, n, k = self.sizes
        x_MK = x if x.dim() == 2 else x.reshape(m, k)
        y = torch.empty((*x.shape[:-1], n), dtype=out_dtype, device=CPU)
        (x_row, x_col), (w_row, w_col) = x_MK.stride(), w_NK.stride()
        args = self.record.copy(
            x_data=x_MK.data_ptr(), x_row_stride=x_row, x_col_stride=x_col,
            x_dtype=FLOAT_DTYPES[x.dtype], w_data=w_NK.data_ptr(), w_row_stride=w_row,
            w_col_stride=w_col, w_dtype=FLOAT_DTYPES[w_NK.dtype], y=y.data_ptr(),
            y_dtype=FLOAT_DTYPES[out_dtype], threads=torch.get_num_threads(),
        )  # fmt: skip
        if bias_N is not None:
            if bias_N.stride(0) != 1:
                bias_N = bias_N.contiguous()
            args.bias, args.bias_dtype = bias_N.data_ptr(), FLOAT_DTYPES[bias_N.dtype]
        scratch = workspace.acquire(CPU, self.nbytes)
        args.workspace = scratch.data_ptr()  # type: ignore[union-attr]
        status, ran = self.native.linear_forward(args)
        workspace.release(scratch, self.nbytes)
        if status and not binding.supported(status):
            return None
        return y, binding.KERNELS[ran]


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

    def make_plan(self, problem: Problem) -> Small:
        return Small(problem, self.number)


def _alike(x: str, w: str) -> bool:
    """Whether two formats differ in the rows of a block alone."""
    one, other = (format_fields(words_of(spec)[0]) | {"block_rows": 1} for spec in (x, w))
    return one == other


for _rank, (_level, _name) in enumerate(PANELS.items()):
    register(SmallLinear(_level, f"{_level}_stream", True, 2 * _rank))
    register(SmallLinear(_level, _name, False, 2 * _rank + 1))
