"""The decode kernel of Hopper: a few rows, quantized on the way in, times a weight that stands
still, exactly (c = 1). A row has the same bits whatever rows are beside it, and however many."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES, pointer
from te_mx.backends.base import FORMATS as FORMAT_IDS
from te_mx.backends.native import FORMATS, FP4, words_of
from te_mx.backends.sm90 import binding, trial
from te_mx.backends.sm90.envelope import why_not
from te_mx.dispatch.linear import FrozenKernel
from te_mx.dispatch.problem import STREAM_ROWS, Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import SM90_DECODE, spec_of
from te_mx.layouts.operand import Operand
from te_mx.runtime import workspace

DECODE = "sm90_decode"


class Decode(FrozenKernel):
    """Weights of 8 or 4 bits; inputs quantized to MXFP8, or of 16 bits as they are."""

    name = DECODE

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem) or trial.why_not()
        if reason is None and problem.lhs and spec_of(problem.lhs).format.name in FP4:
            reason = f"takes inputs in {' and '.join(FORMATS)}"
        if reason is None and not problem.lhs and problem.dtype == torch.float32:
            reason = "takes inputs as they are in bfloat16 and float16"
        if reason is None and problem.m > STREAM_ROWS:
            reason = f"takes at most {STREAM_ROWS} rows"
        if reason is None and problem.dtype not in FLOAT_DTYPES:
            reason = "takes inputs in float32, bfloat16 and float16"
        return reason

    def form(self, row: Operand) -> Operand | None:
        fmt = row.format
        codes, fits = SM90_DECODE.pack(fmt, row.codes, row.scales, row.k)
        if not bool(fits.all()):
            return None
        return Operand(codes, fits, f"{fmt.name}@{SM90_DECODE.name}", row.rows, row.k)

    def multiply(
        self, p: Problem, x: Tensor, weight: Operand, bias_N: Tensor | None, out_dtype: torch.dtype
    ) -> tuple[Tensor, str] | None:
        m, n, k = p.m, weight.rows, weight.k
        plan, nbytes = _plan((m, n, k), (p.lhs, weight.spec), p.rule, p.place.index)
        x_MK = binding.rows_of(x if x.dim() == 2 else x.reshape(m, k))
        y = torch.empty((*x.shape[:-1], n), dtype=out_dtype, device=x.device)
        args = plan.copy(
            w=weight.codes.data_ptr(), x=x_MK.data_ptr(), ldx=x_MK.stride(0),
            x_dtype=FLOAT_DTYPES[x.dtype], out=y.data_ptr(), out_dtype=FLOAT_DTYPES[out_dtype],
        )  # fmt: skip
        binding.set_execution(args, p.place.index)
        if bias_N is not None:
            bias_N = bias_N.contiguous()
            args.bias, args.bias_dtype = bias_N.data_ptr(), FLOAT_DTYPES[bias_N.dtype]
        scratch = workspace.acquire(x.device, nbytes)
        args.workspace, args.workspace_bytes = pointer(scratch), nbytes
        done = binding.supported(binding.native().decode(args))  # type: ignore[union-attr]
        workspace.release(scratch, nbytes)
        return (y, self.name) if done else None


@lru_cache(maxsize=4096)
def _plan(
    sizes: tuple[int, int, int], specs: tuple[str, str], rule: str, index: int
) -> tuple[Any, int]:
    """The native record of calls of one size with what does not change between them, and its
    workspace."""
    m, n, k = sizes
    native = binding.native()
    assert native is not None
    x, w = (FORMAT_IDS[words_of(spec)[0]] for spec in specs)
    record = native.DecodeArgs(
        m=m, n=n, k=k, w_element=w, x_element=x, x_as_is=not specs[0], rule=SCALE_RULES[rule],
        ldo=n, device=index,
    )  # fmt: skip
    return record, native.decode_workspace(m, k)


def forget_plans() -> None:
    """For tests, which put another native module in place."""
    _plan.cache_clear()


register(Decode())
