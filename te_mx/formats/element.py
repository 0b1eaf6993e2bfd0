"""Element: a float of 4, 6 or 8 bits, and its conversion from and to fp32.

Encoding works on the bits of fp32, so it gives the same codes on every device and in every denormal
mode."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MANTISSA_BITS, BIAS = 23, 127  # of fp32
IMPLICIT_BIT = 1 << MANTISSA_BITS
MANTISSA = IMPLICIT_BIT - 1
INF = 0x7F800000
MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class Element:
    """Sign, exponent, mantissa. Magnitudes are ordered like their codes. Above the code of `max`
    come Inf, if there is one, and NaNs; without a negative zero, its code is NaN ("fnuz").

    Codes are uint8; the sign is bit `bits - 1`, the bits above it are zero.

    Args:
        exponent_bits, mantissa_bits, bias: value = 2^(exponent - bias) * 1.mantissa.
        max: the largest finite value.
        torch_dtype: shows stored bytes as torch's dtype, if torch has one.

    Raises:
        ValueError: `max` is none of its values, or the element is too wide.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool = False
    has_negative_zero: bool = True
    torch_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not 3 <= self.bits <= 8:
            raise ValueError(f"element {self.name}: {self.bits} bits, expected 3 to 8")
        steps = math.ldexp(self.max, self.mantissa_bits - self.emax)
        if self.max_code >= self.sign or self.emax < self.emin or steps != int(steps):
            raise ValueError(f"element {self.name}: max {self.max} is none of its values")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign(self) -> int:
        """The sign bit: one more than the largest magnitude of a code."""
        return 2 ** (self.bits - 1)

    @property
    def emax(self) -> int:
        """Exponent of max: 448 = 1.75 * 2^8."""
        return math.frexp(self.max)[1] - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """Code of max."""
        fraction = self.max / 2.0**self.emax - 1.0
        return int((self.emax + self.bias + fraction) * 2**self.mantissa_bits)

    # Products in place of shifts: a format that Dynamo has seen with other numbers comes to it with
    # symbols, which that of torch 2.11 does not shift.
    @property
    def max_bits(self) -> int:
        """max as the bits of fp32."""
        mantissa = int((self.max / 2.0**self.emax - 1.0) * IMPLICIT_BIT)
        return (self.emax + BIAS) * IMPLICIT_BIT + mantissa

    @property
    def min_bits(self) -> int:
        """The smallest normal number as the bits of fp32."""
        return (self.emin + BIAS) * IMPLICIT_BIT

    @property
    def nan_code(self) -> int | None:
        """The NaN that quantizing writes, or None."""
        if self.max_code + int(self.has_inf) < self.sign - 1:
            return self.sign - 1
        return None if self.has_negative_zero else self.sign

    @property
    def nan_codes(self) -> tuple[int, ...]:
        """Every code that is NaN, in ascending order."""
        positive = range(self.max_code + int(self.has_inf) + 1, self.sign)
        zero = () if self.has_negative_zero else (self.sign,)
        return (*positive, *zero, *(self.sign | code for code in positive))

    def encode(self, bits: Tensor, power: Tensor) -> Tensor:
        """Codes (uint8) of x * 2^power, to nearest even, at most +-max; x fp32 by its bits (int32).

        `power` (int32, -128 to 127) broadcasts to `bits`; |x| * 2^power must lie below 2^128. A NaN
        is taken for a number above max."""
        drop = MANTISSA_BITS - self.mantissa_bits
        q = (normalized(bits & MAGNITUDE) + (power << MANTISSA_BITS)).clamp_(0, self.max_bits)
        # `one` times the step between codes is the binade of q times 2^drop: adding it rounds q
        # there, in the only fp32 operation, whose operands and result are normal numbers.
        binade = (q & INF).clamp_(min=self.min_bits)
        one = binade + drop * IMPLICIT_BIT
        steps = (q.view(torch.float32) + one.view(torch.float32)).view(torch.int32) - one
        code = steps.add_((binade - self.min_bits) >> drop)
        sign = (bits >> (32 - self.bits)) & self.sign
        if not self.has_negative_zero:
            sign = torch.where(code > 0, sign, 0)
        return code.bitwise_or_(sign).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """fp32 values of codes (uint8); exact."""
        magnitude = (codes & (self.sign - 1)).int()
        normal = magnitude << (MANTISSA_BITS - self.mantissa_bits)
        normal += (BIAS - self.bias) * IMPLICIT_BIT
        subnormal = magnitude.float() * 2.0 ** (self.emin - self.mantissa_bits)
        first_normal = 2**self.mantissa_bits
        value = torch.where(magnitude < first_normal, subnormal, normal.view(torch.float32))
        if self.max_code < self.sign - 1:
            if self.has_inf:
                value = torch.where(magnitude > self.max_code, torch.inf, value)
            value = torch.where(magnitude > self.max_code + int(self.has_inf), torch.nan, value)
        value = torch.where(codes >= self.sign, -value, value)
        if not self.has_negative_zero:
            value = torch.where(codes == self.sign, torch.nan, value)
        return value


def normalized(magnitude: Tensor) -> Tensor:
    """Bits of fp32 magnitudes with a wider exponent: that of a subnormal number is 0 or less, that
    of zero lies below all."""
    # An integer of up to 23 bits is exact in fp32, and its exponent says where its top bit is.
    subnormal = magnitude.to(torch.float32).view(torch.int32) - (149 << MANTISSA_BITS)
    # Zero stays high enough for int32 when a power is added.
    subnormal = subnormal.clamp_(min=-100 << MANTISSA_BITS)
    return torch.where(magnitude < IMPLICIT_BIT, subnormal, magnitude)
