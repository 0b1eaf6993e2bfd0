"""What quantizing a matrix to a format costs: sums over its elements and blocks, and what they say.

Everything is asked of the Format object, so a format that is registered tomorrow is measured too.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from te_mx.formats import Format
from te_mx.formats.format import in_blocks
from te_mx.formats.mxfp8 import E4M3
from te_mx.formats.nvfp4 import TensorScaledFormat
from te_mx.layouts import aligning

STRIPE = 128  # rows that are quantized together at least: those of a tile of every packed layout
CHUNK = 1 << 20  # elements that are quantized together at most, unless a stripe has more
# |x| above the largest value of its block by less than this is no saturation: a scale in fp32 is
# rounded, and so is what the codes stand for.
SLACK = 2.0**-20
_LOWEST, _EXPONENTS = -300, 600  # exponents of scales that the histogram has room for


@dataclass
class Sums:
    """Sums over everything that was quantized to one format; they add up.

    signal, noise: of x^2 and of (x - q)^2, over the elements that can be compared. Counts of
    elements: `nonfinite` are NaN or Inf in x; `lost` are finite in x and not in q, because their
    block holds such a one (or they are rounded to what fp32 does not hold). exponents: how many
    blocks that are not all zero have a scale in [2^e, 2^(e+1)). tiles: how many have each class of
    the layout `aligning` (its `class_names`); None for formats that it has no classes of."""

    elements: int = 0
    signal: float = 0.0
    noise: float = 0.0
    saturated: int = 0
    subnormal: int = 0
    zeroed: int = 0
    nonfinite: int = 0
    lost: int = 0
    exponents: Counter[int] = field(default_factory=Counter)
    tiles: list[int] | None = None

    def add(self, other: "Sums") -> None:
        """Add what was measured of more elements."""
        for name in ("elements", "signal", "noise", *_COUNTED, "nonfinite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.exponents += other.exponents
        if other.tiles is not None:
            self.tiles = [a + b for a, b in zip(self.tiles or [0] * 4, other.tiles, strict=True)]

    @property
    def sqnr(self) -> float | None:
        """10 log10(signal / noise) in dB; inf where nothing was rounded, None without a signal."""
        if self.signal == 0:
            return None
        return math.inf if self.noise == 0 else 10 * math.log10(self.signal / self.noise)

    def share(self, count: int) -> float:
        """A count of elements as a share of all."""
        return count / self.elements if self.elements else 0.0

    def exponent(self, quantile: float) -> int | None:
        """The exponent that this share of the blocks does not exceed; None without blocks."""
        wanted, seen = quantile * self.exponents.total(), 0
        for exponent in sorted(self.exponents):
            seen += self.exponents[exponent]
            if seen >= wanted:
                return exponent
        return None


_COUNTED = ("saturated", "subnormal", "zeroed", "lost")


def stripes(rows: int, k: int, most: int | None) -> Iterator[tuple[int, int]]:
    """(start, end) of the rows that are read: all of them, or, where `most` elements are to be read
    and the matrix has more, whole stripes that lie evenly over it, one at least."""
    per_chunk = max(1, CHUNK // (STRIPE * max(k, 1)))
    count = -(-rows // STRIPE)
    wanted = count
    if most is not None and rows * k > most:
        wanted = min(count, max(1, most // (STRIPE * k)))
    if wanted == count:
        step = STRIPE * per_chunk
        yield from ((start, min(start + step, rows)) for start in range(0, rows, step))
        return
    for i in range(wanted):
        start = (2 * i + 1) * count // (2 * wanted) * STRIPE  # the middle of each part
        yield start, min(start + STRIPE, rows)


def measure(x: Tensor, formats: dict[Format, str], spread: int, most: int | None) -> list[Sums]:
    """The sums of x [rows, k], blocks along k, under each format with its scale rule; `spread` is
    that of Hopper's tiles. Memory: some 40 bytes for each of CHUNK elements.

    Formats scale blocks, and rows or the tensor by their largest magnitude, so whole stripes of
    rows are quantized by themselves."""
    totals = [Sums() for _ in formats]
    if not x.numel():
        return totals
    whole = None
    if any(fmt.tensor_scaled for fmt in formats):
        whole = torch.stack(
            [_largest(x[start:end]) for start, end in stripes(len(x), x.shape[1], None)]
        )
    for start, end in stripes(x.shape[0], x.shape[1], most):
        part = x[start:end].to(torch.float32).contiguous()
        finite = part.isfinite()
        largest = float(_largest(part))
        for total, (fmt, rule) in zip(totals, formats.items(), strict=True):
            made = _quantized(part, fmt, rule, whole)
            total.add(_measure(part, finite, largest, fmt, made, spread))
    return totals


def _largest(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x.abs(), 0).amax().to(torch.float32)


def _quantized(
    x: Tensor, fmt: Format, rule: str, whole: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales as they are stored (fp32 where a tensor scale multiplies them) and values; of
    part of a tensor with these largest magnitudes."""
    k = x.shape[1]
    if not isinstance(fmt, TensorScaledFormat) or whole is None:
        codes, scales = fmt.quantize(x, rule)
        return codes, scales, fmt.dequantize(codes, scales, k, torch.float32)
    shared = None if fmt.by_rows else lambda _: whole.amax().view(1, 1)
    codes, scales, tensor_scale = fmt.quantize_parts(x, rule, None, shared)
    values = fmt.dequantize(codes, scales, k, torch.float32) * tensor_scale
    return codes, E4M3.decode(scales) * tensor_scale, values


def _measure(
    x: Tensor, finite: Tensor, largest: float, fmt: Format, made: tuple[Tensor, Tensor, Tensor],
    spread: int,
) -> Sums:  # fmt: skip
    element, (packed, scales, q) = fmt.element, made
    codes = fmt.unpack(packed, x.shape[1])
    magnitude = codes & (element.sign - 1)
    known = finite & q.isfinite()

    # Squares of gradients leave the range of fp32, and not every device has fp64: x and q are
    # brought near 1 first, which is exact.
    power = min(max(-math.frexp(largest)[1], -126), 126)
    scaled = torch.where(known, x, 0) * 2.0**power
    error = scaled - torch.where(known, q, 0) * 2.0**power
    signal, noise = (float(v.square_().sum()) for v in (scaled, error))

    used = known & (magnitude > 0)
    normal = magnitude >= 1 << element.mantissa_bits
    clamped = (magnitude == element.max_code) & (x.abs() > q.abs() * (1 + SLACK))
    counts = (
        known & clamped, used & ~normal, known & (magnitude == 0) & (x != 0), finite & ~known,
        ~finite,
    )  # fmt: skip
    saturated, subnormal, zeroed, lost, nonfinite = torch.stack(
        [c.count_nonzero() for c in counts]
    ).tolist()
    tiles = None
    layout = aligning(spread)
    if layout.has_classes(fmt):
        classes = layout.classes(fmt, codes, scales).flatten().int()
        tiles = torch.bincount(classes, minlength=len(layout.class_names)).tolist()
    return Sums(
        x.numel(), math.ldexp(signal, -2 * power), math.ldexp(noise, -2 * power), saturated,
        subnormal, zeroed, nonfinite, lost, _exponents(scales, used, fmt), tiles,
    )  # fmt: skip


def _exponents(scales: Tensor, used: Tensor, fmt: Format) -> Counter[int]:
    """Exponents of the scales of blocks with a code that is not zero."""
    inside = in_blocks(used, fmt.scaling.block).any(3).any(1)
    if fmt.scaling.scale == "e8m0":
        exponents = scales.int() - 127
    else:
        exponents = torch.frexp(scales.float())[1] - 1
    found = torch.bincount(exponents[inside].long() - _LOWEST, minlength=_EXPONENTS).tolist()
    return Counter({i + _LOWEST: count for i, count in enumerate(found) if count})
