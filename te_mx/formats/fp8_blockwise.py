"""Blockwise FP8: 8-bit elements, one fp32 scale for a block of 1 x 128, 128 x 1 or 128 x 128.

DeepSeek-V3's recipe, Transformer Engine's Float8BlockScaling and torchao's blockwise FP8 training
use them: 1 x 128 for inputs and output gradients, along the reduction dimension, and 128 x 128 for
weights. 128 x 1 is the columnwise form of data that stays as it lies: its bytes are those of
1 x 128 in layout "cols"."""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from te_mx.formats.element import BIAS, INF, MAGNITUDE, MANTISSA, MANTISSA_BITS, Element, normalized
from te_mx.formats.format import READ, Format, check_matrix, check_random, in_blocks, register
from te_mx.formats.mxfp8 import E4M3, E5M2
from te_mx.formats.scaling import Scaling, split_rule

# "fnuz": no Inf and no negative zero, whose code is the only NaN.
E4M3FNUZ = Element("e4m3fnuz", 4, 3, 8, 240.0, False, False, torch.float8_e4m3fnuz)
E5M2FNUZ = Element("e5m2fnuz", 5, 2, 16, 57344.0, False, False, torch.float8_e5m2fnuz)
BLOCKS = ((1, 128), (128, 1), (128, 128))
RULES = ("pow2", "fp32")
LARGEST_FACTOR = 2.0**126  # its inverse, the stored scale, is the smallest normal number


@dataclass(frozen=True, eq=False)
class BlockwiseFormat(Format):
    """Codes with fp32 scales, for a matrix [rows, k]: value = code * scale.

    ======  ============  ==================================================
    part    dtype         shape
    ======  ============  ==================================================
    codes   uint8         [rows, k]
    scales  float32       [ceil(rows / block[0]), ceil(k / block[1])]
    ======  ============  ==================================================

    With amax of a block and max of the element, in fp32, rounded to nearest at every step:

        amax   = the larger of amax and the rule's epsilon
        factor = max / amax, at most 2^126; with the rule "pow2" its mantissa is cut off
        scale  = 1 / factor
        code   = round(x * factor) to nearest even, at most +-max

    A block of zeros has scale 1 (unless the rule has an epsilon). A NaN or an Inf makes the scale
    of its block and all its codes NaN. Every other scale is a normal number. Transformer Engine has
    the same numbers for amax >= max * 2^-126; below, its scales become subnormal. It saturates Inf
    to max, which nobody sees.
    """

    def quantize(self, x: Tensor, rule: str, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Format.quantize`, with the rule "pow2" (scales are powers of two) or "fp32", with an
        epsilon as in "fp32:1e-12"; random must be None: codes are rounded to nearest even."""
        check_matrix("x", x, *READ)
        self.check_rule(rule)
        check_random(random, rule, x)
        rows, k = x.shape
        bits = in_blocks(x.detach().resolve_neg().float().view(torch.int32), self.scaling.block)
        amax = (bits & MAGNITUDE).amax((1, 3))  # NaN and Inf come out on top
        finite = amax < INF
        factors = scale_factors(torch.where(finite, amax, 0), self.element, rule)
        codes = _encode_scaled(self.element, bits, factors[:, None, :, None])
        codes.masked_fill_(~finite[:, None, :, None], self.element.nan_code or 0)
        codes = codes.flatten(2, 3).flatten(0, 1)[:rows, :k].contiguous()
        scales = torch.where(finite, torch.ones_like(factors) / factors, torch.nan)
        return codes, scales

    def dequantize(self, codes: Tensor, scales: Tensor, k: int, dtype: torch.dtype) -> Tensor:
        """As `Format.dequantize`: code * scale, exact in fp64, else by fp32 to dtype."""
        k = self.check_parts(codes, scales, k, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        of_rows = scales.to(wide).repeat_interleave(self.scaling.block[0], 0)[: len(codes)]
        return self.decode(codes, k, of_rows).to(dtype)


def scale_factors(amax: Tensor, element: Element, rule: str) -> Tensor:
    """fp32 factors that blocks are multiplied by, from the bits (int32) of their largest
    magnitudes, which are finite."""
    name, epsilon = split_rule(rule)
    amax = amax.clamp(min=bits_of(epsilon))
    tiny = amax < bits_of(element.max / LARGEST_FACTOR)
    divisor = torch.where(tiny, bits_of(1.0), amax).view(torch.float32)
    # A number divided by a tensor would be a product with its rounded reciprocal.
    factors = torch.full_like(divisor, element.max) / divisor
    if name == "pow2":
        factors = (factors.view(torch.int32) & INF).view(torch.float32)
    factors = torch.where(tiny, LARGEST_FACTOR, factors)
    return torch.where(amax == 0, 1.0, factors)


def bits_of(value: float) -> int:
    """The bits of a number, rounded to fp32, whether or not the thread flushes denormals."""
    if 0.0 <= value < 2.0**-126:
        return round(value * 2.0**149)
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _encode_scaled(element: Element, bits: Tensor, factors: Tensor) -> Tensor:
    """Codes of fp32(x * factor), x by its bits (int32), factors fp32 and normal.

    Mantissas are multiplied apart from exponents, so that the only operation rounds as that product
    does and no mode of the device flushes its operands. A product below 2^-126 has code 0 anyway.
    """
    one = BIAS << MANTISSA_BITS
    x, f = normalized(bits & MAGNITUDE), factors.view(torch.int32)
    product = ((x & MANTISSA) + one).view(torch.float32) * ((f & MANTISSA) + one).view(
        torch.float32
    )
    power = (x >> MANTISSA_BITS) + (f >> MANTISSA_BITS) - 2 * BIAS
    sign = bits & ~MAGNITUDE
    return element.encode(product.view(torch.int32) | sign, power.clamp_(-128, 127))


for _element in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ):
    for _block in BLOCKS:
        _scaling = Scaling(_block, "fp32", RULES, epsilon=True)
        register(
            BlockwiseFormat(f"fp8_{_element.name}_{_block[0]}x{_block[1]}", _element, _scaling)
        )
