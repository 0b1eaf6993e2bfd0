"""The fused steps of Hopper: tiles of 128 x 128 go to the quantizer without being written."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from te_mx.backends.native import FP4, NativeTarget, is_native, native_target, with_operands
from te_mx.backends.sm90 import binding_fused
from te_mx.backends.sm90.envelope import MX, MX_RULES, why_not
from te_mx.dispatch import run
from te_mx.dispatch.calls import FLOAT_DTYPES
from te_mx.dispatch.fused import ActParts, ActStep, NormParts, NormStep, Target
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of

_F32 = torch.float32
NOTHING = native_target(Target("", "", "rceil"))


@lru_cache(maxsize=256)
def _made_native(
    row: str, col: str, rule: str, col_sum: bool, dtype: torch.dtype
) -> NativeTarget | None:
    """What native code is told of a target in which the fused kernels end; None of others."""
    target = Target(row, col, rule, col_sum)
    return native_target(target) if _makes(target, dtype) else None


def _makes(target: Target, dtype: torch.dtype) -> bool:
    """Whether the fused kernels end in a target, for results of a dtype: MXFP4 of bf16 alone."""
    fp4 = any(spec_of(spec).format.name in FP4 for spec in target[:2] if spec)
    return is_native(target, MX, MX_RULES) and (not fp4 or dtype == torch.bfloat16)


class _Fused(Kernel):
    name = "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(lhs="", rhs="", rule="rceil"))
        if reason is None and problem.dtype not in FLOAT_DTYPES:
            reason = f"takes float32, bfloat16 and float16, not {problem.dtype}"
        return reason


class HopperNorm(_Fused):
    op = "norm_quantize"

    def run(self, s: NormStep) -> NormParts | None:
        step = s.x, s.weight, s.bias, s.norm, s.dtype
        wanted = _made_native(*s.target[:4], s.dtype)
        if wanted is not None and not s.target.col_sum:
            made = binding_fused.normalize(*step, s.keep, wanted)
            if made is None:
                return None
            return NormParts(
                made.mean, made.rstd, made.z, with_operands(made.quantized, s.target, *s.x.shape)
            )
        made = binding_fused.normalize(*step, True, NOTHING)
        if made is None or made.z is None:
            return None
        z = made.z
        return NormParts(made.mean, made.rstd, z if s.keep else None, run.quantized(z, s.target))


class HopperNormBackward(_Fused):
    op = "norm_backward"

    def run(
        self, dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
        return binding_fused.normalize_backward(dz, x, weight, mean, rstd, dtype)


class HopperAct(_Fused):
    op = "act_quantize"

    def run(self, s: ActStep) -> ActParts | None:
        h, grad, act, dtype = s.h, s.grad, s.act, s.dtype
        if not binding_fused.takes(h, grad, dtype):
            # The value in fp32, rounded, quantized.
            whole = None if grad is None else grad.to(_F32)
            made = binding_fused.activate(h.to(_F32), whole, act, _F32, True, NOTHING)
            return None if made is None or made.out is None else _quantized(s, made.out.to(dtype))
        wanted = _made_native(*s.target[:4], dtype)
        if wanted is None:
            made = binding_fused.activate(h, grad, act, dtype, True, NOTHING)
            return None if made is None or made.out is None else _quantized(s, made.out)
        made = binding_fused.activate(h, grad, act, dtype, s.keep, wanted)
        if made is None:
            return None
        rows, width = h.shape
        cols = width // 2 if act.gated and grad is None else width
        return ActParts(made.out, with_operands(made.quantized, s.target, rows, cols))


def _quantized(s: ActStep, out: Tensor) -> ActParts:
    """What a step makes of its values, by the quantizer alone."""
    return ActParts(out if s.keep else None, run.quantized(out, s.target))


for _kernel in (HopperNorm, HopperNormBackward, HopperAct):
    register(_kernel())
