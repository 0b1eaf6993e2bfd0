"""What backward keeps of an input or a weight: a quantized operand or the tensor itself.

Leading dimensions: steps know matrices only.

What is known of sizes in code that is traced for more than one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Operand, dequantize_2d, plain
from te_mx.layouts.registry import tensor_scaled


def flatten(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]; sizes of 0 included."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def shaped(t_MN: Tensor, shape: Sequence[int]) -> Tensor:
    """[M, N] -> [..., N], no view: autograd lets nobody change the view that a Function returns in
    place. It shares its version with t_MN, so that a change after t_MN was saved is noticed."""
    return t_MN if len(shape) == 2 else t_MN.view(shape).detach()


def unflatten(y_MN: Tensor, x: Tensor) -> Tensor:
    """[M, N] -> [..., N] with the leading dimensions of x [..., K]."""
    return y_MN if x.dim() == 2 else shaped(y_MN, (*x.shape[:-1], y_MN.shape[1]))


def surely(condition: Any) -> bool:
    """A condition on sizes; in code that is traced or exported, whether it holds for every size
    that the trace is for. Asking does not narrow these down, as `if` does."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    # Sympy comes with it: not before somebody compiles.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


Tensors = tuple[Tensor | None, Tensor | None, Tensor | None]


class SavedOperand(NamedTuple):
    """What autograd saves for one input or weight: three tensors (codes, scales and packed form, or
    tensor scale, of an operand; or the tensor itself, None, None), and beside them the operand's
    spec and sizes; spec "" where they are no operand."""

    tensors: Tensors = (None, None, None)
    spec: str = ""
    rows: int = 0
    k: int = 0

    @classmethod
    def operand(cls, operand: Operand) -> "SavedOperand":
        """An operand."""
        if operand.packed is not None and operand.tensor_scale is not None:
            operand = plain(operand)
        codes, scales, spec, rows, k, packed, whole = operand
        return cls((codes, scales, packed if whole is None else whole), spec, rows, k)

    @classmethod
    def itself(cls, tensor: Tensor | None) -> "SavedOperand":
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
    def beside(self) -> "SavedOperand":
        """This without tensors, which autograd keeps; `with_tensors` gives it back."""
        return SavedOperand(NOTHING.tensors, self.spec, self.rows, self.k)

    def with_tensors(self, tensors: Tensors) -> "SavedOperand":
        """This with the tensors that autograd gave back."""
        return SavedOperand(tuple(tensors), self.spec, self.rows, self.k)  # type: ignore[arg-type]

    def as_operand(self) -> Operand:
        """The operand that was kept."""
        codes, scales, last = self.tensors
        assert codes is not None and scales is not None
        if last is not None and tensor_scaled(self.spec):
            return Operand(codes, scales, self.spec, self.rows, self.k, None, last)
        return Operand(codes, scales, self.spec, self.rows, self.k, last)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The tensor that was kept, or what the codes decode to."""
        if self.spec:
            return dequantize_2d(self.as_operand(), dtype)
        return self.tensor


NOTHING = SavedOperand()
