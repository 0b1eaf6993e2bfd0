"""Normalizations of few rows as one native call: for plain tensors, below autograd; no torch op."""

from __future__ import annotations

from torch import Tensor

from te_mx._ops.library import is_direct
from te_mx.dispatch.fused import NormRows
from te_mx.dispatch.kernels import derived
from te_mx.dispatch.problem import FROZEN_ROWS, Problem, place_of
from te_mx.dispatch.registry import find


def norm_rows(step: NormRows) -> Tensor | None:
    """z [rows, cols], the bits of norm_quantize_2d; None where no kernel does it alone, or where
    its arguments do not belong together, which the usual way says."""
    x, weight, bias, _, _, dtype = step
    if not is_direct(x, weight, bias) or not 0 < x.shape[0] <= FROZEN_ROWS:
        return None
    for vector in (weight, bias):
        if vector is not None and (
            vector.shape != x.shape[1:] or vector.device != x.device or vector.dtype != weight.dtype
        ):
            return None
    known, key = derived(), ("norm_rows", x.device, x.shape, x.dtype, weight.dtype, dtype)
    if key not in known:
        rows, cols = x.shape
        known[key] = [
            find(Problem("norm_rows", place_of(x.device), "", "", rows, cols, dtype=one))
            for one in (x.dtype, weight.dtype, dtype)
        ]
    kernels = known[key]
    return None if any(one is None for one in kernels) else kernels[0].run(step)
