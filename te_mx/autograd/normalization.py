"""The normalization in front of a linear step, shared by the functions of LayerNormLinear and
LayerNormMLP.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.backends.fused import Norm, NormParts, Wanted
from te_mx.ops.fused import norm_backward_2d, norm_quantize_2d
from te_mx.ops.fused_run import quantized

_F32 = torch.float32


class NormStep(NamedTuple):
    """A normalization and the dtype that its result z is rounded to. Zero-centered weights stand
    for 1 + weight. Without a normalization z is x."""

    norm: Norm | None
    zero_centered: bool
    dtype: torch.dtype

    def forward(
        self,
        x_MK: Tensor,
        weight_K: Tensor | None,
        bias_K: Tensor | None,
        want_z: bool,
        wanted: Wanted,
    ) -> NormParts:
        if self.norm is None or weight_K is None:
            z = x_MK.to(self.dtype) if want_z else None
            return NormParts(None, None, z, quantized(x_MK, wanted))
        bias = None if bias_K is None else bias_K.detach().to(_F32)
        return norm_quantize_2d(
            x_MK, self._weight(weight_K), bias, self.norm, self.dtype, want_z=want_z, wanted=wanted
        )

    def backward(
        self, dz_MK: Tensor, x_MK: Tensor, weight_K: Tensor, mean_M: Tensor | None, rstd_M: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dx in the dtype of x, dweight in that of the weight, dbias in fp32."""
        weight = self._weight(weight_K)
        dx, dweight, dbias = norm_backward_2d(dz_MK, x_MK, weight, mean_M, rstd_M, x_MK.dtype)
        return dx, dweight.to(weight_K.dtype), dbias

    def _weight(self, weight_K: Tensor) -> Tensor:
        weight = weight_K.detach().to(_F32)
        return weight + 1 if self.zero_centered else weight
