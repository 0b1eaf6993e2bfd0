"""The text of an InspectionReport: a summary over all layers, and a table of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from te_mx import formats
from te_mx.autograd.linear_recipe import GEMMS
from te_mx.conversion.matrices import left_of
from te_mx.inspection.readings import BAD, ZERO, Reading, Readings, sqnr_of
from te_mx.runtime.report import table

_NAME = 40  # characters of a layer's name
_HEADER = ("role", "gemm", "format", "SQNR dB", "lowest", "in", "saturated %", "subnormal %",
           "zeroed %", "scales 2^", "tiles 0/1/2/3 %")  # fmt: skip


def summary(report: Readings) -> str:
    """What was run, one row for each operand of each GEMM and format over all layers, what
    represents each role best, and what was not read."""
    about = report.about
    rules = ", ".join(dict.fromkeys(about.rules.values()))
    loss = about.loss_is if about.loss is None else f"loss {about.loss:.4g}, {about.loss_is}"
    count = len(report.layers)
    layers = f"{count} linear layer{'s' if count > 1 else ''}"
    lines = [f"{about.model}: {layers}; {loss}; scales {rules}"]
    if about.max_elements is not None:
        lines.append(f"read at most about {about.max_elements:,} elements of a tensor")
    rows = []
    for role in report.roles:
        for gemm in GEMMS:
            for fmt in report.formats:
                key = role, gemm, fmt
                own = [r for r in report if (r.role, r.gemm, r.format) == key]
                if own:
                    rows.append([*key, *_over_layers(own)])
    return "\n".join([*lines, table(_HEADER, rows), *_best(report), *_warnings(report)])


def full_table(report: Readings) -> str:
    """A row for each layer and role, a column for each format."""
    rows = []
    for layer in report.layers:
        for role in report.roles:
            cells = [report.lower(layer, role, fmt) for fmt in report.formats]
            if any(cells):
                rows.append([short(layer), role, *("" if c is None else db(c) for c in cells)])
    return table(["layer", "role", *report.formats], rows)


def _over_layers(readings: list[Reading]) -> list[str]:
    known = [r.sqnr for r in readings if r.sqnr is not None]
    lowest = min(readings, key=sqnr_of)
    exponents = [e for r in readings for e in (r.scale_min, r.scale_max) if e is not None]
    tiles = mean_tiles(readings)
    return [
        f"{median(known):.1f}" if known else _unknown(readings),
        db(lowest),
        short(lowest.layer),
        *(percent(mean_share(readings, name)) for name in ("saturated", "subnormal", "zeroed")),
        f"{min(exponents)} .. {max(exponents)}" if exponents else "",
        "" if tiles is None else " ".join(percent(t) for t in tiles),
    ]


def _best(report: Readings) -> Iterator[str]:
    """For each role, the format of each width with the highest median SQNR of all layers."""
    for role in report.roles:
        best: dict[int, tuple[float, str]] = {}
        for fmt in report.formats:
            cells = [report.lower(layer, role, fmt) for layer in report.layers]
            known = [c.sqnr for c in cells if c is not None and c.sqnr is not None]
            if known:
                bits = formats.get(fmt).element.bits
                best[bits] = max(best.get(bits, (-math.inf, "")), (median(known), fmt))
        parts = [f"{bits} bits {best[bits][1]} {best[bits][0]:.1f} dB" for bits in sorted(best)]
        readings = [r for r in report if r.role == role]
        yield f"closest to {role}: {', '.join(parts)}" if parts else f"{role}: {_unknown(readings)}"


def _unknown(readings: Sequence[Reading]) -> str:
    """What stands for the SQNR of readings of which none has one."""
    return "NaN/Inf" if any(r.note == BAD for r in readings) else ZERO


def _warnings(report: Readings) -> Iterator[str]:
    about = report.about
    bad = dict.fromkeys(f"{r.role} of {r.layer}" for r in report if r.note == BAD)
    if bad:
        yield f"NaN or Inf in {_some(list(bad))}"
    if about.never_ran:
        yield f"never ran: {_some(about.never_ran)}"
    if about.no_gradient:
        yield f"no gradient reached (torch.no_grad, a checkpoint): {_some(about.no_gradient)}"
    for name, reason in list(about.skipped.items())[:3]:
        yield f"not read: {name}: {reason}"
    left = left_of(about.matrices)
    if left:
        part = sum(m.elements for m in left) / sum(m.elements for m in about.matrices)
        names = _some([f"{m.name} ({m.kind})" for m in left])
        yield f"{percent(part)} % of the matrix parameters are in no layer that was read: {names}"


# ------------------------------------------------------------------------------------------- words
def db(r: Reading) -> str:
    """An SQNR as tables and pictures show it."""
    if r.note == BAD:
        return "NaN/Inf" if r.sqnr is None else f"{r.sqnr:.1f}!"
    return r.note if r.note or r.sqnr is None else f"{r.sqnr:.1f}"


def short(name: str) -> str:
    """The end of a long name."""
    return name if len(name) <= _NAME else f"..{name[2 - _NAME :]}"


def percent(share: float) -> str:
    """A share in percent, to two digits, or one behind the point."""
    value = 100 * share
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def mean_share(readings: Sequence[Reading], name: str) -> float:
    """A share over several readings, each with the weight of its elements."""
    total = sum(r.elements for r in readings)
    return sum(getattr(r, name) * r.elements for r in readings) / total if total else 0.0


def mean_tiles(readings: Sequence[Reading]) -> list[float] | None:
    """The shares of tile classes over several readings, by elements; None without any."""
    known = [(r.tiles, r.elements) for r in readings if r.tiles is not None]
    total = sum(elements for _, elements in known)
    if not total:
        return None
    return [sum(tiles[i] * elements for tiles, elements in known) / total for i in range(4)]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
