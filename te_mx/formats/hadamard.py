"""The random Hadamard transform: blocks of k, rotated before they are quantized.

A product does not change when both sides are rotated alike along k, and outliers are spread."""

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

SIZES = (16, 32)
SIGNS = 32  # one bit for every position of k modulo 32
_SUFFIX = re.compile(r"(.+)\+rht(16|32):0x([0-9a-fA-F]{1,8})")


@dataclass(frozen=True)
class Hadamard:
    """x' = H diag(s) x / sqrt(size) on every `size` consecutive elements of k.

    H is the Hadamard matrix in natural order, H[i, j] = (-1)^popcount(i & j). s is -1 where bit
    (k modulo 32) of `signs` is set. A last chunk of k that is shorter than `size` stays as it is.

    The arithmetic is fp32, each operation rounded to nearest, with these operations and no other:
    the sign bit of an element is flipped where s is -1; for h = 1, 2, 4, 8 (and 16) all pairs
    (a, b) of elements i and i + h, with bit h of i clear, become (a + b, a - b); each element is
    multiplied by 1 / sqrt(size), 0.25 or fl32(2^-2.5) = 0x3E3504F3."""

    size: int
    signs: int

    def __post_init__(self) -> None:
        if self.size not in SIZES or not 0 <= self.signs < 1 << SIGNS:
            raise ValueError(
                f"a Hadamard transform has size 16 or 32 and signs 0 to 2^32 - 1, got {self}"
            )

    def __str__(self) -> str:
        return f"rht{self.size}:0x{self.signs:08x}"

    def apply(self, x: Tensor, whole: Tensor | None = None) -> Tensor:
        """x' of x [.., k], in fp32. whole [.., k // size]: the chunks to transform; None: all."""
        chunks, rest = self._chunks(x.to(torch.float32))
        flipped = torch.where(self._negative(x.device, chunks.shape[-2]), -chunks, chunks)
        made = self._butterflies(flipped) * self._factor
        if whole is not None:
            made = torch.where(whole.unsqueeze(-1), made, chunks)
        return torch.cat((made.flatten(-2), rest), -1)

    def invert(self, x: Tensor) -> Tensor:
        """x of x' [.., k], in the dtype of x', fp32 or fp64: diag(s) H x' / sqrt(size)."""
        chunks, rest = self._chunks(x)
        factor = self._factor if x.dtype == torch.float32 else 1.0 / math.sqrt(self.size)
        made = self._butterflies(chunks) * factor
        made = torch.where(self._negative(x.device, chunks.shape[-2]), -made, made)
        return torch.cat((made.flatten(-2), rest), -1)

    @property
    def _factor(self) -> float:
        return 0.25 if self.size == 16 else 0.1767766922712326  # the fp32 number

    def _chunks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[.., k // size, size] and what is left."""
        whole = x.shape[-1] // self.size * self.size
        return x[..., :whole].unflatten(-1, (-1, self.size)), x[..., whole:]

    def _negative(self, device: torch.device, chunks: int) -> Tensor:
        """bool [chunks, size]: where s is -1."""
        position = torch.arange(chunks * self.size, device=device) % SIGNS
        return ((self.signs >> position) & 1).bool().view(chunks, self.size)

    def _butterflies(self, x: Tensor) -> Tensor:
        h = 1
        while h < self.size:
            a, b = x.unflatten(-1, (-1, 2, h)).unbind(-2)
            x = torch.stack((a + b, a - b), -2).flatten(-3)
            h *= 2
        return x


def split_name(name: str) -> tuple[str, Hadamard] | None:
    """The name of a format and the transform behind it: "mxfp4+rht32:0x1234abcd"; else None."""
    found = _SUFFIX.fullmatch(name)
    if found is None:
        return None
    return found[1], Hadamard(int(found[2]), int(found[3], 16))
