"""The fused steps of the CPU: tiles of values go from the first-level cache to the quantizer."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.cpu import binding_fused
from te_mx.backends.cpu.envelope import MX, MX_RULES, why_not
from te_mx.backends.native import BLOCKWISE, is_native, native_target, with_operands
from te_mx.dispatch import run
from te_mx.dispatch.calls import FLOAT_DTYPES
from te_mx.dispatch.fused import ActParts, ActStep, NormParts, NormStep, Target
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register

NOTHING = native_target(Target("", "", "rceil"))


def fused_why_not(problem: Problem) -> str | None:
    """What the fused steps of a backend ask beside what its other kernels ask."""
    if problem.empty:
        return "takes matrices that are not empty"
    if problem.dtype not in FLOAT_DTYPES:
        return f"takes float32, bfloat16 and float16, not {problem.dtype}"
    return None


class _Fused(Kernel):
    name = "cpu"

    def accepts(self, problem: Problem) -> str | None:
        return why_not(problem._replace(lhs="", rhs="", rule="rceil")) or fused_why_not(problem)


class CpuNorm(_Fused):
    op = "norm_quantize"

    def run(self, s: NormStep) -> NormParts:
        step = s.x, s.weight, s.bias, s.norm, s.dtype
        if _in_one_step(s.target) and not s.target.col_sum:
            made = binding_fused.normalize(*step, s.keep, native_target(s.target))
            shape = s.x.shape
            return NormParts(
                made.mean, made.rstd, made.z, with_operands(made.quantized, s.target, *shape)
            )
        made = binding_fused.normalize(*step, True, NOTHING)
        z = made.z
        assert z is not None
        return NormParts(made.mean, made.rstd, z if s.keep else None, run.quantized(z, s.target))


def _in_one_step(target: Target) -> bool:
    """Whether native code makes what is asked: columns as they lie, of formats that it knows."""
    if not target.codes:
        return True
    known = is_native(target, MX + BLOCKWISE, MX_RULES)
    return known and binding_fused.takes(native_target(target))


class CpuNormBackward(_Fused):
    op = "norm_backward"

    def run(
        self, dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return binding_fused.normalize_backward(dz, x, weight, mean, rstd, dtype)


class CpuAct(_Fused):
    op = "act_quantize"

    def run(self, s: ActStep) -> ActParts:
        step = s.h, s.grad, s.act, s.dtype
        if _in_one_step(s.target):
            made = binding_fused.activate(*step, s.keep, native_target(s.target))
            if made is not None:
                rows, width = s.h.shape
                cols = width // 2 if s.act.gated and s.grad is None else width
                return ActParts(made.out, with_operands(made.quantized, s.target, rows, cols))
        # Blocks that straddle the halves of a gated gradient, or another layout.
        made = binding_fused.activate(*step, True, NOTHING)
        assert made is not None and made.out is not None
        return ActParts(made.out if s.keep else None, run.quantized(made.out, s.target))


for _kernel in (CpuNorm, CpuNormBackward, CpuAct):
    register(_kernel())
