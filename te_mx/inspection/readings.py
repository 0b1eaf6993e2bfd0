"""What te_mx.inspect found: readings, and which of them are worst or lowest."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from te_mx import formats
from te_mx.autograd.linear_recipe import GEMMS
from te_mx.conversion.report import Matrix
from te_mx.formats import Format
from te_mx.inspection.collect import Layer
from te_mx.inspection.metrics import Sums
from te_mx.runtime.arguments import check_one_of, check_size, shown

ROLES = ("x", "w", "g")
EXACT, ZERO, BAD = "exact", "all zero", "not finite"  # notes of readings


class Reading(NamedTuple):
    """One operand of one GEMM of a layer in one format. x and w meet in fprop, g and w in dgrad, g
    and x in wgrad; blocks run along the dimension that the GEMM sums over.

    ============================  ==================================================================
    sqnr                          10 log10(sum x^2 / sum (x - q)^2) in dB; inf where nothing was
                                  rounded, None where there is nothing but zeros
    note                          "", or "exact", "all zero", or "not finite" where x holds a NaN
                                  or an Inf: sqnr is then of the elements that can be compared
    saturated, subnormal, zeroed  shares of all elements: beyond the largest value at the scale of
                                  their block and clamped; rounded to a subnormal code; not zero,
                                  and rounded to zero
    nonfinite, lost               shares: NaN or Inf; finite, in a block that became NaN
    scale_min .. scale_max        exponents of the scales of blocks that are not all zero: the
                                  smallest, the 5th, 50th and 95th percentile, the largest; None
                                  without such a block
    tiles                         shares of Hopper's tiles in class 0 (tile-shared), 1 (row-shared),
                                  2 (spread) and 3 (far), see docs/numerics.md; None for formats
                                  that are not packed so
    elements                      how many were read, of all calls
    ============================  ==================================================================
    """

    layer: str
    kind: str
    role: str
    gemm: str
    format: str
    sqnr: float | None
    note: str
    saturated: float
    subnormal: float
    zeroed: float
    nonfinite: float
    lost: float
    scale_min: int | None
    scale_p5: int | None
    scale_median: int | None
    scale_p95: int | None
    scale_max: int | None
    tiles: tuple[float, ...] | None
    elements: int


class About(NamedTuple):
    """What was run: formats with their scale rules, the loss and what it is, layers that never ran,
    that no gradient reached, or that could not be read, all matrices of the model."""

    model: str
    rules: dict[str, str]
    loss: float | None
    loss_is: str
    alignment_spread: int
    max_elements: int | None
    never_ran: tuple[str, ...]
    no_gradient: tuple[str, ...]
    skipped: dict[str, str]
    matrices: list[Matrix]


def readings_of(
    sums: dict[tuple[str, str, str], list[Sums]], layers: list[Layer], fmts: Sequence[Format]
) -> list[Reading]:
    """The sums of every (step, role, gemm) as readings, in the order of the model."""
    found = []
    for layer in layers:
        for step in layer.steps:
            for role in ROLES:
                for gemm in GEMMS:
                    each = zip(fmts, sums.get((step, role, gemm), ()), strict=False)
                    head = step, layer.kind, role, gemm
                    found += [_reading(*head, str(fmt), one) for fmt, one in each if one.elements]
    return found


def _reading(layer: str, kind: str, role: str, gemm: str, fmt: str, s: Sums) -> Reading:
    note = BAD if s.nonfinite or s.lost else ""
    if not note and s.noise == 0:
        note = EXACT if s.signal else ZERO
    tiles = None
    if s.tiles is not None:
        total = sum(s.tiles)
        tiles = tuple(count / total for count in s.tiles)
    return Reading(
        layer, kind, role, gemm, fmt, s.sqnr, note,
        s.share(s.saturated), s.share(s.subnormal), s.share(s.zeroed), s.share(s.nonfinite),
        s.share(s.lost), s.exponent(0), s.exponent(0.05), s.exponent(0.5), s.exponent(0.95),
        s.exponent(1), tiles, s.elements,
    )  # fmt: skip


class Readings:
    """All readings of a model, and what was run: what tables and pictures are made of."""

    def __init__(self, readings: list[Reading], about: About) -> None:
        self.readings = readings
        self.about = about

    def __len__(self) -> int:
        return len(self.readings)

    def __iter__(self) -> Iterator[Reading]:
        return iter(self.readings)

    def __getitem__(self, layer: str) -> list[Reading]:
        found = [r for r in self.readings if r.layer == layer]
        if not found:
            names = ", ".join(self.layers[:3]) + (", ..." if len(self.layers) > 3 else "")
            raise KeyError(f"no layer that was read is named {shown(layer)}; there are {names}")
        return found

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in the order of the model."""
        return list(dict.fromkeys(r.layer for r in self.readings))

    @property
    def formats(self) -> list[str]:
        """Names of the formats."""
        return list(self.about.rules)

    @property
    def roles(self) -> list[str]:
        """The roles that were read: x, w and, with gradients, g."""
        return [role for role in ROLES if any(r.role == role for r in self.readings)]

    def worst(self, n: int = 5, fmt: str | None = None, role: str | None = None) -> list[Reading]:
        """The n readings with the lowest SQNR: those that hold NaN or Inf first, without those that
        are all zero or exact. Of all formats and roles, or of one.

        Raises TypeError or ValueError for arguments that are none."""
        n = check_size("n", n)
        if fmt is not None:
            fmt = formats.get(fmt).name
            check_one_of("fmt", fmt, self.formats)
        check_one_of("role", role, (*ROLES, None))
        asked = [
            r
            for r in self.readings
            if fmt in (None, r.format) and role in (None, r.role) and r.note not in (ZERO, EXACT)
        ]
        return sorted(asked, key=lambda r: (r.note != BAD, sqnr_of(r)))[:n]

    def lower(self, layer: str, role: str, fmt: str) -> Reading | None:
        """Of the two directions of an operand, the reading with the lower SQNR."""
        found = self._index.get((layer, role, fmt), ())
        return min(found, key=sqnr_of, default=None)

    @cached_property
    def _index(self) -> dict[tuple[str, str, str], list[Reading]]:
        made: dict[tuple[str, str, str], list[Reading]] = {}
        for r in self.readings:
            made.setdefault((r.layer, r.role, r.format), []).append(r)
        return made


def sqnr_of(r: Reading) -> float:
    """The SQNR of a reading, to compare; that of no signal lies above all."""
    return math.inf if r.sqnr is None else r.sqnr
