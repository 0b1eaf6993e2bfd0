"""Scaling: which elements share a scale, what the scale is stored as, and how it is chosen."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_mx.formats.element import BIAS, IMPLICIT_BIT, INF, MANTISSA, MANTISSA_BITS, Element

NAN_SCALE = 255  # the E8M0 byte of a block with a NaN or an Inf
MX_RULES = ("rceil", "floor", "even")
_SHOWN = {
    "e8m0": torch.float8_e8m0fnu,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
}  # scales, and how users see them
STOCHASTIC = "+sr"  # behind a rule: codes are rounded stochastically


@dataclass(frozen=True)
class Scaling:
    """One scale for every block of `block` elements.

    Args:
        block: (rows, cols) of a block; MX formats have (1, 32), with the columns along the
            reduction dimension.
        scale: "e8m0", a byte that stands for 2^(byte - 127), "fp32", or "e4m3", which a scale of
            the whole tensor multiplies.
        rules: the ways to choose a scale that `Format.quantize` knows. Where `epsilon` is set, a
            rule may carry the smallest amax behind a colon: "pow2:1e-12".
        epsilon: whether rules take one.

    Behind a rule of E8M0 or E4M3 scales, "+sr": codes are rounded stochastically.

    Raises:
        ValueError: another scale dtype.
    """

    block: tuple[int, int] = (1, 32)
    scale: str = "e8m0"
    rules: tuple[str, ...] = MX_RULES
    epsilon: bool = False

    def __post_init__(self) -> None:
        if self.scale not in _SHOWN:
            raise ValueError(f'scale must be "e8m0", "fp32" or "e4m3", got {self.scale!r}')

    @property
    def storage(self) -> torch.dtype:
        """dtype of stored scales: uint8 or float32."""
        return torch.float32 if self.scale == "fp32" else torch.uint8

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype that shows stored scales to users."""
        return _SHOWN[self.scale]

    def knows(self, rule: Any) -> bool:
        """Whether a word is one of the rules, with or without an epsilon."""
        if not isinstance(rule, str):
            return False
        name, colon, epsilon = rule.partition(":")
        if name not in self.rules:
            return False
        return not colon or (self.epsilon and epsilon_of(epsilon) is not None)

    def takes(self, rule: Any) -> bool:
        """Whether codes are made by a rule: one that it knows, perhaps with "+sr" behind it."""
        if isinstance(rule, str) and self.scale != "fp32":
            rule = rule.removesuffix(STOCHASTIC)
        return self.knows(rule)

    @property
    def shown_rules(self) -> str:
        """The rules for error messages."""
        rules = ", ".join(map(repr, self.rules))
        return (
            f"{rules}, or {self.rules[0] + ':1e-12'!r} with an epsilon" if self.epsilon else rules
        )


def split_rule(rule: str) -> tuple[str, float]:
    """A rule that a scaling knows, and its epsilon: "pow2:1e-12" -> ("pow2", 1e-12)."""
    name, _, epsilon = rule.removesuffix(STOCHASTIC).partition(":")
    return name, epsilon_of(epsilon) or 0.0


def is_stochastic(rule: str) -> bool:
    """Whether a rule that a scaling knows rounds codes stochastically."""
    return rule.endswith(STOCHASTIC)


def epsilon_of(text: str) -> float | None:
    """The number behind the colon of a rule; None where it is none that amax can be compared with:
    finite in fp32 and not negative."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= torch.finfo(torch.float32).max else None


def scale_bytes(amax: Tensor, element: Element, rule: str) -> Tensor:
    """E8M0 bytes (int32) of blocks whose largest magnitude has the fp32 bits `amax` (int32).

    ======  ========================================================================================
    floor   biased exponent of amax, minus emax; 0 at least
    even    the same of amax rounded to one bit of mantissa
    rceil   biased exponent of q = fp32(amax / max) rounded up to a power of two; for a subnormal q
            1 above 2^-127, else 0
    ======  ========================================================================================

    All are the exponent of amax minus emax, plus one from some mantissa on.
    """
    max_bits = element.max_bits
    up_from = {"floor": IMPLICIT_BIT, "even": 0x600000, "rceil": (max_bits & MANTISSA) + 1}[rule]
    byte = (amax >> MANTISSA_BITS) - element.emax + ((amax & MANTISSA) >= up_from)
    byte = byte.clamp_(min=0)
    if rule == "rceil":
        # One fp32 number above max * 2^-127 the subnormal q still rounds to 2^-127, for every max.
        byte = torch.where(amax <= max_bits - BIAS * IMPLICIT_BIT + 1, 0, byte)
    return torch.where(amax >= INF, NAN_SCALE, byte)


def power_of_two(exponent: Tensor) -> Tensor:
    """fp32 2^exponent for int32 exponents in [-126, 127]."""
    return ((exponent + BIAS) << MANTISSA_BITS).view(torch.float32)
