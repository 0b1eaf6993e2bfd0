"""te_mx.moe.pack_experts: weights of experts in the one form that every product with them reads."""

from typing import Any

import torch
from torch import Tensor

from te_mx._ops import Stack, settled
from te_mx._ops.moe import prepared_experts
from te_mx.api.grouped import stack_of
from te_mx.api.groups import settings_of
from te_mx.api.tensor import MXTensor
from te_mx.autograd.linear_recipe import mode_of
from te_mx.runtime.arguments import check_one_of
from te_mx.weights.formats import WEIGHT_ONLY

OWNER = "pack_experts"


class PackedExperts:
    """What `pack_experts` makes: weights [E, N, K] as `fused_experts` and `grouped_gemm` of their
    device read them. Its fields are those of an MXTensor; it holds no plain codes. weight_only:
    whether tokens are multiplied as they are, not quantized."""

    __slots__ = ("_stack", "weight_only")

    def __init__(self, stack: Stack, weight_only: bool = False) -> None:
        self._stack, self.weight_only = stack, weight_only

    @property
    def stack(self) -> Stack:
        """The weights as ops take them."""
        return self._stack

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._stack[3:6])

    @property
    def fmt(self) -> str:
        return self._stack.format.name

    @property
    def device(self) -> torch.device:
        return self._stack.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all codes and scales."""
        return self._stack.codes.nbytes + self._stack.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [E, N, K], with what packing rounded."""
        return torch.stack([self._stack.group(i).values(dtype) for i in range(self._stack.groups)])

    def __repr__(self) -> str:
        more = ", weight_only=True" if self.weight_only else ""
        shape = tuple(self.shape)
        return f"PackedExperts(shape={shape}, fmt={self.fmt!r}, device={self.device}{more})"


def pack_experts(
    w: MXTensor, recipe: Any = None, *, activations: str | None = None
) -> MXTensor | PackedExperts:
    """Weights of experts in the form that products with any number of tokens read without work.

    Keep what this returns in place of w: one copy then serves the kernel for few rows of an expert
    and the one for many, which packs an MXTensor anew in every call. It takes 1.03 bytes a
    parameter in MXFP8, 0.53 in MXFP4. Where kernels read w as it is (on CPUs) it is w itself.

    Codes of MXFP8 are aligned on the way, as products of precision "adaptive" do it
    (docs/numerics.md): blocks of 32 that lie up to the recipe's alignment spread below the largest
    of their tile take its scale, which rounds about one code in 100,000 of normal numbers.

    Args:
        w: [E, N, K] with a rowwise copy.
        recipe: its alignment spread counts; None means the active recipe, or the default one
            outside of te_mx.autocast.
        activations: "bf16": `fused_experts` multiplies tokens as they are with the very values of
            these codes, as te_mx.freeze_weights(activations="bf16") has it. None: it quantizes.

    Raises:
        TypeError, ValueError: w is no such MXTensor, or packed for others; activations.
    """
    if activations is not None:
        check_one_of(f"{OWNER}: activations", activations, (WEIGHT_ONLY,))
    if isinstance(w, PackedExperts):
        if w.weight_only is not (activations is not None):
            raise ValueError(f"{OWNER}: w is packed already, with other activations: {w}")
        return w
    given, mode = stack_of(w, OWNER, "w"), mode_of(settings_of(recipe, forward=False))
    if activations is not None:
        return PackedExperts(settled(given), True)
    made = prepared_experts(given, mode)
    return w if made is given else PackedExperts(made)


def experts_of(w: Any, owner: str, name: str, weight_only: bool = False) -> Stack:
    """Weights of experts as one operand: packed ones, an MXTensor [E, N, K] or a sequence.

    Raises TypeError or ValueError for what is none of these, or not for such tokens."""
    if is_weight_only(w) is not weight_only:
        raise ValueError(
            f"{owner}: {name} {'quantizes' if weight_only else 'does not quantize'} tokens "
            f"(activations of pack_experts), which does not go here; got {w}"
        )
    return w.stack if isinstance(w, PackedExperts) else stack_of(w, owner, name)


def is_weight_only(w: Any) -> bool:
    return isinstance(w, PackedExperts) and w.weight_only
