"""The weights of a grouped layer as one: how they stand still, for micro-batches or frozen."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.autograd import joining
from te_mx.autograd.grouped_operands import StandingWeights, standing
from te_mx.backends.grouped import StackedOperand
from te_mx.nn.frozen_weight import FMT, Freezable
from te_mx.ops import dequantize_2d
from te_mx.ops.grouped_weights import quantize_weights
from te_mx.recipe import Settings


class StackedWeight(Freezable):
    """Mixin of te_mx.GroupedLinear. Its one key stands for the weights of all groups; without
    masters their codes lie in one buffer [groups, out, in]."""

    num_gemms: int
    single_grouped_weight: bool
    _weight_names: tuple[str, ...]

    def weights(self) -> list[Tensor]:
        """The weight [out, in] of every group."""
        raise NotImplementedError

    def _shape_of(self, key: str) -> tuple[int, ...]:
        return (self.num_gemms, *self._sample(key).shape)

    def _sample(self, key: str) -> Tensor:
        return self.weights()[0]

    def _each_of(self, key: str) -> list[Tensor]:
        return self.weights()

    def _held_by(self, key: str) -> tuple[str, ...]:
        return self._weight_names

    def _standing_weight(self, key: str, settings: Settings, need_dx: bool) -> StandingWeights:
        return standing([w.detach() for w in self.weights()], settings, need_dx)

    def _plain_codes(self, key: str, settings: Settings) -> tuple[Tensor, Tensor]:
        row, _ = quantize_weights(
            [w.detach() for w in self.weights()], settings.fwd_fmt, columnwise=False,
            scale_rule=settings.scale_rule,
        )  # fmt: skip
        return row.codes, row.scales

    def _operand_of(self, codes: Tensor, scales: Tensor) -> StackedOperand:
        return StackedOperand(codes, scales, FMT, "k_last")

    def _masters(
        self, key: str, codes: Tensor, scales: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        made = [
            dequantize_2d(code, scale, FMT, "k_last", dtype)
            for code, scale in zip(codes, scales, strict=True)
        ]
        values = [joining.stack(made)] if self.single_grouped_weight else made
        return dict(zip(self._weight_names, values, strict=True))
