"""Words of the steps that end in a quantizer: normalizations, activations, what a step asks for."""

from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.layouts.operand import Quantized

NORMS = ("LayerNorm", "RMSNorm")
LANES = 256  # of the sums over a row, as kNormLanes in fused.h

# The activation that each name applies; native ids of these.
ACT_IDS = {
    "gelu": 0, "relu": 1, "srelu": 2, "silu": 3, "qgelu": 4, "sigmoid": 5, "clamped_silu": 6,
    "gelu_erf": 7,
}  # fmt: skip
_UNGATED = ("gelu", "gelu_erf", "relu", "srelu", "silu", "qgelu")
_GATED = {
    "geglu": "gelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "qgeglu": "qgelu",
    "glu": "sigmoid", "clamped_swiglu": "clamped_silu",
}  # fmt: skip
ACTIVATIONS = (*_UNGATED, *_GATED)


class Norm(NamedTuple):
    """A normalization over rows: "LayerNorm" or "RMSNorm"."""

    kind: str
    eps: float


class Activation(NamedTuple):
    """An activation by Transformer Engine's name, or gelu_erf; the rest is of clamped_swiglu."""

    name: str
    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    @property
    def gated(self) -> bool:
        """Whether it takes [rows, 2 cols]: activated columns, then gate columns."""
        return self.name in _GATED

    @property
    def gelu_form(self) -> str | None:
        """The form of GELU that GEMM epilogues apply; None for other activations."""
        return {"gelu": "tanh", "gelu_erf": "erf"}.get(self.name)

    @property
    def base(self) -> str:
        """What is applied to the activated columns, a key of ACT_IDS."""
        return _GATED.get(self.name, self.name)


class Target(NamedTuple):
    """What a step quantizes its result to: as the arguments of ops.quantize_2d."""

    row: str
    col: str
    rule: str
    col_sum: bool = False
    seed: Tensor | None = None

    @property
    def codes(self) -> bool:
        """Whether codes are asked for at all."""
        return bool(self.row or self.col)


class NormStep(NamedTuple):
    """Normalize x [rows, cols] over its columns, round to dtype (z) and quantize. weight, bias:
    fp32 [cols]. keep: return z too."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    norm: Norm
    dtype: torch.dtype
    keep: bool
    target: Target


class NormRows(NamedTuple):
    """Normalize few rows x [rows, cols] and round to dtype, nothing else. weight, bias [cols]: of
    one float dtype; zero_centered: weights stand for 1 + weight."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    norm: Norm
    zero_centered: bool
    dtype: torch.dtype


class ActStep(NamedTuple):
    """Activate h [rows, cols] ([rows, 2 cols] where gated), or, with grad [rows, cols], the
    gradient of h; round to dtype and quantize. keep: return the values too."""

    h: Tensor
    grad: Tensor | None
    act: Activation
    dtype: torch.dtype
    keep: bool
    target: Target


class NormParts(NamedTuple):
    """mean (None for RMSNorm) and rstd, fp32 [rows] (None without a normalization); z [rows, cols]
    if it was asked for; z quantized."""

    mean: Tensor | None
    rstd: Tensor | None
    z: Tensor | None
    quantized: Quantized


class ActParts(NamedTuple):
    """The result of an activation if it was asked for, and the same quantized."""

    out: Tensor | None
    quantized: Quantized
