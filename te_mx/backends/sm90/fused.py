"""The fused steps of Hopper: tiles of 128 x 128 go to the quantizer without being written."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from te_mx.backends.native import FP4, is_native
from te_mx.backends.sm90 import binding_fused
from te_mx.backends.sm90.blockwise import makes_both
from te_mx.backends.sm90.envelope import MX, MX_RULES, why_not
from te_mx.dispatch import run
from te_mx.dispatch.calls import FLOAT_DTYPES
from te_mx.dispatch.fused import ActParts, ActStep, NormParts, NormStep, Target
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of

_F32 = torch.float32
NOTHING = Target("", "", "rceil")
BLOCKWISE = "fp8_e4m3_1x128"  # what fused kernels make with fp32 scales


@lru_cache(maxsize=256)
def makes(row: str, col: str, rule: str, dtype: torch.dtype) -> bool:
    """Whether the fused kernels end in a target, for results of a dtype: MXFP4 and blockwise FP8 of
    bf16 alone."""
    formats = {spec_of(spec).format.name for spec in (row, col) if spec}
    if formats == {BLOCKWISE}:
        return dtype == torch.bfloat16 and makes_both(row, col, rule) is None
    known = is_native(Target(row, col, rule), MX, MX_RULES)
    return known and (dtype == torch.bfloat16 or not formats & set(FP4))


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
        if not s.target.col_sum and makes(*s.target[:3], s.dtype):
            return binding_fused.normalize(*step, s.keep, s.target)
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
        if makes(*s.target[:3], dtype):
            return binding_fused.activate(h, grad, act, dtype, s.keep, s.target)
        made = binding_fused.activate(h, grad, act, dtype, True, NOTHING)
        return None if made is None or made.out is None else _quantized(s, made.out)


def _quantized(s: ActStep, out: Tensor) -> ActParts:
    """What a step makes of its values, by the quantizer alone."""
    return ActParts(out if s.keep else None, run.quantized(out, s.target))


for _kernel in (HopperNorm, HopperNormBackward, HopperAct):
    register(_kernel())
