"""Modules of ``transformer_engine.pytorch.module``, and its padding, which te_mx has no need of."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from te_mx.pytorch.absent import reader
from te_mx.runtime.arguments import check_size, shown
from te_mx.te.modules import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from te_mx.te.norms import LayerNorm, RMSNorm

__all__ = [
    "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP",
    "Linear", "RMSNorm",
]  # fmt: skip

__getattr__ = reader(__name__)


class Fp8Padding(nn.Module):
    """Transformer Engine pads the tokens of each expert to a multiple of 16 or 32. te_mx takes any
    number of them, so this returns what it is given.

    Args:
        num_gemms: how many experts.
        align_size: of no effect.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        owner = type(self).__name__
        self.num_gemms = check_size(f"{owner}: num_gemms", num_gemms, 1)
        if align_size is not None:
            check_size(f"{owner}: align_size", align_size, 1)
        self.align_size = align_size

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """inp and m_splits as they are.

        Raises:
            TypeError, ValueError: inp is no tensor, or m_splits are not num_gemms sizes.
        """
        self._check(inp, m_splits)
        return inp, m_splits

    def _check(self, inp: Any, m_splits: Any) -> None:
        owner = type(self).__name__
        if not isinstance(inp, Tensor):
            raise TypeError(f"{owner}: inp must be a tensor, got {shown(inp)}")
        sized = isinstance(m_splits, tuple | list) or (
            isinstance(m_splits, Tensor) and m_splits.dim() == 1
        )
        if not sized:
            raise TypeError(f"{owner}: m_splits must be a list of ints, got {shown(m_splits)}")
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"{owner}: m_splits must be num_gemms={self.num_gemms} sizes, got {len(m_splits)}"
            )


class Fp8Unpadding(Fp8Padding):
    """What takes padding away, where there is none: returns its input.

    Args:
        num_gemms: how many experts.
        align_size: of no effect.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value, by name.
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:  # type: ignore[override]
        """inp as it is.

        Raises:
            TypeError, ValueError: inp is no tensor, or m_splits are not num_gemms sizes.
        """
        self._check(inp, m_splits)
        return inp
