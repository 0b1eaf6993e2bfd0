"""Normalizations of few rows on Hopper: a kernel that starts while the one before ends, and lets a
decode kernel behind it ask for its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, pointer
from te_mx.backends.reference.fused_math import inverse
from te_mx.backends.sm90 import binding, binding_fused
from te_mx.backends.sm90.envelope import why_not
from te_mx.dispatch.fused import NormRows
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import FROZEN_ROWS, Problem
from te_mx.dispatch.registry import register


class HopperNormRows(Kernel):
    """Any float dtypes."""

    op, name = "norm_rows", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem)
        if reason is None and problem.m > FROZEN_ROWS:
            reason = f"takes at most {FROZEN_ROWS} rows"
        if reason is None and problem.dtype not in FLOAT_DTYPES:
            reason = f"takes float32, bfloat16 and float16, not {problem.dtype}"
        return reason

    def run(self, step: NormRows) -> Tensor | None:
        x, weight, bias, norm, zero_centered, dtype = step
        x, weight = binding.rows_of(x), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        z = torch.empty(x.shape, dtype=dtype, device=x.device)
        native = binding.native()
        args = native.NormRowsArgs(  # type: ignore[union-attr]
            x=binding_fused.matrix(x), rms=norm.kind == "RMSNorm", zero_centered=zero_centered,
            eps=norm.eps, inverse=inverse(x.shape[1]), weight=weight.data_ptr(),
            bias=pointer(bias), weight_dtype=FLOAT_DTYPES[weight.dtype], z=z.data_ptr(),
            z_dtype=FLOAT_DTYPES[dtype],
        )  # fmt: skip
        binding.set_execution(args, x.device.index)
        return z if binding.supported(native.normalize_rows(args)) else None  # type: ignore[union-attr]


register(HopperNormRows())
