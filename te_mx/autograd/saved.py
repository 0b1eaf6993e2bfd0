"""What backward keeps of an input or a weight: a quantized operand or the tensor itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Operand, dequantize_2d

Tensors = tuple[Tensor | None, Tensor | None, Tensor | None]


class Kept(NamedTuple):
    """What autograd saves for one input or weight: three tensors (codes, scales and packed form of
    an operand; or the tensor itself, None, None), and beside them the operand's spec and sizes;
    spec "" where they are no operand."""

    tensors: Tensors = (None, None, None)
    spec: str = ""
    rows: int = 0
    k: int = 0

    @classmethod
    def operand(cls, operand: Operand) -> Kept:
        """An operand."""
        codes, scales, spec, rows, k, packed = operand
        return cls((codes, scales, packed), spec, rows, k)

    @classmethod
    def itself(cls, tensor: Tensor | None) -> Kept:
        """The tensor itself."""
        return cls((tensor, None, None))

    @property
    def own(self) -> tuple[Tensor, ...]:
        """The tensors that are not te_mx's alone: none beside those of an operand."""
        return () if self.spec else tuple(t for t in self.tensors if t is not None)

    @property
    def tensor(self) -> Tensor:
        """The tensor that was kept itself."""
        kept = self.tensors[0]
        assert kept is not None and not self.spec
        return kept

    @property
    def beside(self) -> Kept:
        """This without tensors, which autograd keeps; `with_tensors` gives it back."""
        return Kept(NOTHING.tensors, self.spec, self.rows, self.k)

    def with_tensors(self, tensors: Tensors) -> Kept:
        """This with the tensors that autograd gave back."""
        return Kept(tuple(tensors), self.spec, self.rows, self.k)  # type: ignore[arg-type]

    def as_operand(self) -> Operand:
        """The operand that was kept."""
        codes, scales, packed = self.tensors
        assert codes is not None and scales is not None
        return Operand(codes, scales, self.spec, self.rows, self.k, packed)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The tensor that was kept, or what the codes decode to."""
        if self.spec:
            return dequantize_2d(self.as_operand(), dtype)
        return self.tensor


NOTHING = Kept()
