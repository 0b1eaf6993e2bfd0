"""A linear layer of another library whose weight is [in, out]: what it needs to run in MXFP8."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Proxy

from te_mx.autograd import node
from te_mx.autograd.linear import (
    Call,
    linear,
    linear_on_codes,
)
from te_mx.context.region import output_dtype
from te_mx.fusion.class_swap import LayerInPlace
from te_mx.weights import weight_only


class TransposedLinear(LayerInPlace):
    """Mixin before the class of a layer ``y = x @ weight + bias``. The products read a view of the
    weight, so no second copy is kept."""

    def _sizes(self) -> tuple[int, int]:
        """(in, out)."""
        raise NotImplementedError

    def _te_mx_forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], as te_mx.Linear on the transposed weight
        inside `te_mx.autocast`; outside of it what the class does."""
        if isinstance(x, Proxy):
            return self._as_leaf(x)
        settings = self._settings()
        if settings is None:
            return super().forward(x)  # type: ignore[misc]
        if node.active():
            self._refuse_transforms(x)
        in_features, out_features = self._sizes()
        self._check_shape(x, "in_features", in_features)
        self._check_kind(x)
        (bias,) = self._held("bias")
        if bias is not None:
            self._check_parameter("bias", bias, (out_features,), x.device)
        if self._is_dropped():
            self._refuse_given()
            self._check_codes(self._weight_keys, x.device)
            row = self._dropped_operand("weight")
            if self._is_weight_only():
                return weight_only.linear(x, row, bias, output_dtype(x), self._tag_now())
            call = Call(settings, output_dtype(x), self._tag_now())
            return linear_on_codes(x, row, bias, call)
        (weight,) = self._held("weight")
        self._check_parameter("weight", weight, (in_features, out_features), x.device)
        kept = None
        if self._frozen is not None:
            need_dx = torch.is_grad_enabled() and x.requires_grad
            kept = self._kept_weight("weight", None, settings, x.device, need_dx)
        call = Call(settings, output_dtype(x), self._tag_now(), kept)
        return linear(x, weight.t(), bias, call)

    # --------------------------------------------------------------------- weights that stand still
    def _whole(self, key: str) -> Tensor:
        return getattr(self, key).t()

    def _masters(self, key: str, dtype: torch.dtype) -> dict[str, Tensor]:
        made = super()._masters(key, dtype)
        return {name: value.t().contiguous() for name, value in made.items()}
