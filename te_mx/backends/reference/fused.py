"""The fused steps as one step after the other, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.reference import Reference, fused_math
from te_mx.dispatch import run
from te_mx.dispatch.fused import ActParts, ActStep, NormParts, NormStep
from te_mx.dispatch.registry import register


class NormComposed(Reference):
    op = "norm_quantize"

    def run(self, s: NormStep) -> NormParts:
        mean, rstd, z = fused_math.normalize(s.x, s.weight, s.bias, s.norm, s.dtype)
        return NormParts(mean, rstd, z if s.keep else None, run.quantized(z, s.target))


class NormBackwardComposed(Reference):
    op = "norm_backward"

    def run(
        self, dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return fused_math.normalize_backward(dz, x, weight, mean, rstd, dtype)


class ActComposed(Reference):
    op = "act_quantize"

    def run(self, s: ActStep) -> ActParts:
        if s.grad is None:
            out = fused_math.activate(s.h, s.act, s.dtype)
        else:
            out = fused_math.activate_backward(s.grad, s.h, s.act, s.dtype)
        return ActParts(out if s.keep else None, run.quantized(out, s.target))


for _kernel in (NormComposed, NormBackwardComposed, ActComposed):
    register(_kernel())
