"""The report of te_mx.inspect: readings as tables, JSON and a picture."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from te_mx import formats
from te_mx.autograd.linear_recipe import GEMMS
from te_mx.conversion.report import Matrix, left_of
from te_mx.formats import Format
from te_mx.inspection.collect import Layer, Sums
from te_mx.layouts import aligning
from te_mx.runtime.arguments import check_one_of, check_size, shown
from te_mx.runtime.report import table

# ---------------------------------------------------------------------------------------- readings
# What te_mx.inspect found: readings, and which of them are worst or lowest.
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


class InspectionReport:
    """What `te_mx.inspect` found: iterable over `Reading`, printable as a summary; ``report[name]``
    has the readings of one layer. `about` says what was run."""

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

    # -------------------------------------------------------------------------------------- tables
    def table(self) -> str:
        """SQNR in dB of every layer, role and format, of its two directions the lower one. A "!"
        stands behind that of a tensor which holds NaN or Inf."""
        rows = []
        for layer in self.layers:
            for role in self.roles:
                cells = [self.lower(layer, role, fmt) for fmt in self.formats]
                if any(cells):
                    rows.append([short(layer), role, *("" if c is None else db(c) for c in cells)])
        return table(["layer", "role", *self.formats], rows)

    def __str__(self) -> str:
        return _summary(self)

    __repr__ = __str__

    # --------------------------------------------------------------------------------------- files
    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Everything as JSON, also written to `path`. Numbers that are none are null; an SQNR of
        null has its reason in `note`, or is minus infinity. "te_mx" is the number of this form, 1.
        """
        about = self.about._replace(matrices=[])._asdict()
        del about["matrices"]
        about["loss"] = _number(about["loss"])
        rows = [{k: _number(v) for k, v in r._asdict().items()} for r in self.readings]
        content: dict[str, Any] = {"te_mx": 1, **about}
        content["tile_classes"] = aligning(self.about.alignment_spread).class_names
        content["left"] = [{"name": m.name, "kind": m.kind, "elements": m.elements}
                           for m in left_of(self.about.matrices)]  # fmt: skip
        text = json.dumps({**content, "readings": rows}, indent=1, allow_nan=False)
        if path is not None:
            _as_path(path).write_text(text + "\n")
        return text

    def to_png(self, path: str | PathLike[str]) -> None:
        """A picture: for each role a map of SQNR over layers and formats with the lowest of each
        format framed, shares of elements below, and Hopper's tile classes.

        Raises ImportError without matplotlib."""
        draw(self, _as_path(path))


def sqnr_of(r: Reading) -> float:
    """The SQNR of a reading, to compare; that of no signal lies above all."""
    return math.inf if r.sqnr is None else r.sqnr


def _as_path(path: Any) -> Path:
    if not isinstance(path, str | PathLike):
        raise TypeError(f"path must be a str or a path, got {shown(path)}")
    return Path(path)


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------------- summary
# The text of an InspectionReport: a summary over all layers, and a table of them.
_NAME = 40  # characters of a layer's name
_HEADER = ("role", "gemm", "format", "SQNR dB", "lowest", "in", "saturated %", "subnormal %",
           "zeroed %", "scales 2^", "tiles 0/1/2/3 %")  # fmt: skip


def _summary(report: InspectionReport) -> str:
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


def _best(report: InspectionReport) -> Iterator[str]:
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


def _warnings(report: InspectionReport) -> Iterator[str]:
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


# ------------------------------------------------------------------------------------------ figure
# The picture of an InspectionReport: maps of SQNR, shares of elements, classes of tiles.
# matplotlib is imported here only, and without pyplot: no window, no state of the process.
ROLE_NAMES = {"x": "x: inputs", "w": "w: weights", "g": "g: output gradients"}
SHARES = {"zeroed": "#b2182b", "subnormal": "#f4a582", "saturated": "#542788"}
TILES = ("#2166ac", "#92c5de", "#fddbc7", "#b2182b")
LOW, HIGH = 10.0, 45.0  # dB: the ends of the colours, the same in every picture
INK, FAINT, FRAME, MISSING = "#222222", "#8a8a8a", "#d6006c", "#e6e6e6"
OUTLIER = 1.0  # dB below the median of a format, from which on its lowest layer is framed
MOST_NUMBERS = 64  # layers; of more only some are named, and cells hold no numbers
MOST_NAMES = 40


def draw(report: InspectionReport, path: Path) -> None:
    """Write the picture as a PNG.

    Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "InspectionReport.to_png needs matplotlib: pip install matplotlib"
        ) from error

    layers, roles = report.layers, report.roles
    named = len(layers) <= MOST_NUMBERS
    tall = 0.25 * len(layers) if named else min(0.09 * len(layers), 60.0)
    heights = [max(tall, 1.4), 0.3 * len(report.formats)]
    tiled = [fmt for fmt in report.formats if any(r.tiles and r.format == fmt for r in report)]
    if tiled:
        heights.append(0.3 * len(tiled))
    margins = 1.35 + 0.75 * len(heights)  # inches above, between and below
    width = 2.6 + max(3.4, 0.75 * len(report.formats)) * len(roles)
    figure = Figure(figsize=(width, sum(heights) + margins), dpi=130, facecolor="white")
    grid = figure.add_gridspec(
        len(heights), len(roles), height_ratios=heights, left=2.35 / width, right=1 - 0.2 / width,
        top=1 - 1.0 / (sum(heights) + margins), bottom=0.75 / (sum(heights) + margins),
        hspace=0.75 / (sum(heights) / len(heights)), wspace=0.08,
    )  # fmt: skip
    maps = []
    for column, role in enumerate(roles):
        first = column == 0
        axes = [figure.add_subplot(grid[row, column]) for row in range(len(heights))]
        maps.append(_map(axes[0], report, role, first, named))
        _shares(axes[1], report, role, first)
        if tiled:
            _tiles(axes[2], report, role, tiled, first)
    _titles(figure, report, sum(heights) + margins)
    _colour_bar(figure, maps[0], width, sum(heights) + margins)
    figure.savefig(path, format="png")


def _titles(figure: Any, report: InspectionReport, height: float) -> None:
    about = report.about
    loss = about.loss_is if about.loss is None else f"loss {about.loss:.4g}, {about.loss_is}"
    figure.text(
        0.01, 1 - 0.12 / height, f"{about.model}: what formats would do", fontsize=13, va="top",
        weight="bold", color=INK,
    )  # fmt: skip
    lines = (
        "SQNR in dB, the lower one of both directions; framed: the lowest of its format, if "
        f"{OUTLIER:g} dB or more below the median",
        loss,
    )
    for i, line in enumerate(lines):
        at = 1 - (0.38 + 0.16 * i) / height
        figure.text(0.01, at, line, fontsize=7.5, va="top", color=FAINT)


def _colour_bar(figure: Any, image: Any, width: float, height: float) -> None:
    place = figure.add_axes((1 - 1.7 / width, 1 - 0.22 / height, 1.5 / width, 0.09 / height))
    bar = figure.colorbar(image, cax=place, orientation="horizontal", extend="both")
    bar.set_ticks([10, 20, 30, 40], labels=["10 dB", "20", "30", "40"])
    bar.ax.tick_params(labelsize=6.5, length=2, colors=FAINT)
    bar.outline.set_visible(False)


# --------------------------------------------------------------------------------------------- maps
def _map(axes: Any, report: InspectionReport, role: str, first: bool, named: bool) -> Any:
    """Layers down, formats across."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    layers, fmts = report.layers, report.formats
    cells = [[report.lower(layer, role, fmt) for fmt in fmts] for layer in layers]
    values = [[_value(cell) for cell in row] for row in cells]
    colours = colormaps["viridis"].with_extremes(bad=MISSING)
    image = axes.imshow(
        values, aspect="auto", interpolation="nearest", vmin=LOW, vmax=HIGH, cmap=colours
    )
    for j in range(len(fmts)):
        column = [(v, i) for i, row in enumerate(values) if not math.isnan(v := row[j])]
        if column and min(column)[0] <= median(v for v, _ in column) - OUTLIER:
            i = min(column)[1]
            axes.add_patch(
                Rectangle((j - 0.48, i - 0.46), 0.96, 0.92, fill=False, ec=FRAME, lw=1.4)
            )
    if named:
        for i, row in enumerate(cells):
            for j, cell in enumerate(row):
                if cell is not None:
                    dark = values[i][j] < LOW + 0.55 * (HIGH - LOW)
                    axes.text(
                        j, i, db(cell), ha="center", va="center", fontsize=6,
                        color="white" if dark else INK,
                    )  # fmt: skip
    axes.set_title(ROLE_NAMES[role], fontsize=9, color=INK, pad=4)
    axes.set_xticks(range(len(fmts)), [in_lines(fmt) for fmt in fmts], fontsize=6.5)
    shown = range(len(layers)) if named else _worth_a_name(values)
    labels = [short(layers[i]) for i in shown] if first else []
    axes.set_yticks(list(shown) if first else [], labels, fontsize=6)
    _plain(axes)
    return image


def _value(cell: Any) -> float:
    """What a cell is coloured by: the lowest for NaN and Inf, NaN (no colour) without a signal."""
    if cell is None or (cell.sqnr is None and cell.note != BAD):
        return math.nan
    return LOW if cell.sqnr is None else max(min(cell.sqnr, 1e3), -1e3)


def _worth_a_name(values: list[list[float]]) -> list[int]:
    """The layers to name where not all have room: the lowest of each format, and of the others
    every so manyth that does not lie beside one of them."""
    count = len(values)
    lowest = {
        min(column)[1]
        for j in range(len(values[0]))
        if (column := [(row[j], i) for i, row in enumerate(values) if not math.isnan(row[j])])
    }
    every = -(-count // MOST_NAMES)
    regular = {i for i in range(0, count, every) if all(abs(i - low) >= every for low in lowest)}
    return sorted(lowest | regular)


# --------------------------------------------------------------------------------------------- bars
def _shares(axes: Any, report: InspectionReport, role: str, first: bool) -> None:
    """What becomes of elements, one bar a format, over all layers."""

    def shares(fmt: str) -> "list[float]":
        own = [r for r in report if r.role == role and r.format == fmt]
        return [mean_share(own, name) for name in SHARES]

    fmts = report.formats
    totals = _bars(axes, fmts, first, "% of elements", tuple(SHARES.items()), shares)
    for y, total in enumerate(totals):
        axes.text(total + 0.8, y, percent(total / 100), va="center", fontsize=6, color=FAINT)


def _tiles(axes: Any, report: InspectionReport, role: str, fmts: list[str], first: bool) -> None:
    """The classes of Hopper's tiles, one bar a format."""

    def shares(fmt: str) -> "list[float]":
        return mean_tiles([r for r in report if r.role == role and r.format == fmt]) or [0.0] * 4

    names = aligning(report.about.alignment_spread).class_names
    _bars(axes, fmts, first, "% of Hopper's tiles", tuple(zip(names, TILES, strict=True)), shares)


def _bars(
    axes: Any, fmts: list[str], first: bool, title: str, parts: tuple[tuple[str, str], ...],
    shares: Callable[[str], list[float]],
) -> list[float]:  # fmt: skip
    """A bar for each format, of parts (name, colour) that have its shares; where each bar ends."""
    ends = []
    for y, fmt in enumerate(fmts):
        left = 0.0
        for (name, colour), share in zip(parts, shares(fmt), strict=True):
            label = None if y else name
            axes.barh(y, 100 * share, left=left, color=colour, height=0.7, label=label)
            left += 100 * share
        ends.append(left)
    axes.set_yticks(range(len(fmts)), fmts if first else [""] * len(fmts), fontsize=6.5)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=7, color=FAINT, loc="left", pad=3)
    axes.tick_params(axis="x", labelsize=6)
    axes.set_xlim(0, 100)
    _plain(axes)
    if first:  # below the numbers of the axis, whatever the height of the bars
        axes.legend(
            fontsize=6, frameon=False, ncols=4, handlelength=1, loc="upper left",
            bbox_to_anchor=(0, -0.75 / (len(fmts) + 0.5)), borderaxespad=0,
        )  # fmt: skip
    return ends


def _plain(axes: Any) -> None:
    axes.tick_params(length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def in_lines(fmt: str) -> str:
    """The name of a format as narrow as a column of a map."""
    return fmt.replace("_", "\n")
