"""The normalization in front of a linear step, shared by the functions of LayerNormLinear and
LayerNormMLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Target, quantized
from te_mx._ops.fused import norm_backward_2d, norm_quantize_2d
from te_mx.autograd.shapes import flatten, shaped
from te_mx.dispatch import fused
from te_mx.dispatch.fused import Norm, NormParts

_F32 = torch.float32
Saved = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NOTHING: Saved = (None, None, None, None)


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
        target: Target,
    ) -> NormParts:
        if self.norm is None or weight_K is None:
            z = x_MK.to(self.dtype) if want_z else None
            return NormParts(None, None, z, quantized(x_MK, target))
        bias = None if bias_K is None else bias_K.detach().to(_F32)
        return norm_quantize_2d(
            fused.NormStep(
                x_MK, self._weight(weight_K), bias, self.norm, self.dtype, want_z, target
            )
        )

    def saved(self, x: Tensor, weight_K: Tensor | None, made: NormParts) -> Saved:
        """What `backward` needs."""
        return (x, weight_K, made.mean, made.rstd) if made.rstd is not None else NOTHING

    def backward(
        self, dz_MK: Tensor, g_z: Tensor | None, saved: Saved, like: tuple[torch.Size, torch.dtype],
        need: Sequence[bool], bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """The gradients of x, weight and bias as far as they are needed, in their dtypes.

        dz is that of z as the linear step sees it, g_z that of z as it was returned; x has the
        shape and dtype `like`.
        """
        dz_MK = dz_MK if g_z is None else dz_MK + flatten(g_z)
        x, weight_K, mean_M, rstd_M = saved
        if x is None or weight_K is None or rstd_M is None:
            return shaped(dz_MK.to(like[1]), like[0]) if need[0] else None, None, None
        dx, dweight, dbias = norm_backward_2d(
            dz_MK, flatten(x), self._weight(weight_K), mean_M, rstd_M, x.dtype
        )
        return (
            shaped(dx, like[0]) if need[0] else None,
            dweight.to(weight_K.dtype) if need[1] else None,
            dbias.to(bias_dtype) if need[2] else None,
        )

    def _weight(self, weight_K: Tensor) -> Tensor:
        weight = weight_K.detach().to(_F32)
        return weight + 1 if self.zero_centered else weight
