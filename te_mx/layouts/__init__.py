"""Layouts: how the bytes of quantized matrices lie in memory. One file a layout (or two that belong
together), found by itself.

A *spec* is what travels through ops beside codes and scales: "<format>@<layout>", such as
"mxfp8_e4m3@rows". `spec_of` turns one into the objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from te_mx import formats
from te_mx.formats import Format
from te_mx.layouts.base import AnyLayout, Layout
from te_mx.layouts.plain import COLS, GROUPED_COLS, ROWS
from te_mx.layouts.sm90_decode import SM90_DECODE
from te_mx.layouts.sm90_factors import SM90_FACTOR_K, SM90_FACTOR_ROWS, SM90_FACTORS
from te_mx.layouts.sm90_groups import SM90Columns, SM90Rows
from te_mx.layouts.sm90_tiles import SM90Tiles

# Layouts by name; those with a number behind a colon by what makes them of it.
_layouts: dict[str, Layout] = {
    one.name: one
    for one in (
        AnyLayout(), ROWS, COLS, GROUPED_COLS, SM90_FACTORS, SM90_FACTOR_ROWS, SM90_FACTOR_K,
        SM90_DECODE,
    )
}  # fmt: skip
_families: dict[str, Callable[[int], Layout]] = {
    "sm90": SM90Tiles,
    "sm90_rows": SM90Rows,
    "sm90_k": SM90Columns,
}


class Spec(NamedTuple):
    """A format and a layout."""

    format: Format
    layout: Layout


_specs: dict[str, Spec] = {}


def get(name: str) -> Layout:
    """The layout of a name, such as "rows" or "sm90:8".

    Raises ValueError for a name that no layout has.
    """
    found = _layouts.get(name)
    if found is None:
        family, _, number = name.partition(":")
        if family not in _families or not number.isdecimal():
            raise ValueError(f"layout must be one of {', '.join(names())}, got {name!r}")
        found = _layouts[name] = _families[family](int(number))
    return found


def names(tokens: str = "") -> tuple[str, ...]:
    """Names of all layouts, or of those of tokens whose rows or k ("rows", "k") belong to groups;
    ":N" stands for a number."""
    plain = [one for name, one in _layouts.items() if ":" not in name and name != "any"]
    found = {one.name: one for one in plain} | {
        f"{name}:N": _families[name](0) for name in _families
    }
    return tuple(name for name, one in found.items() if not tokens or one.tokens == tokens)


def spec_of(spec: str) -> Spec:
    """Format and layout of "<format>@<layout>"."""
    found = _specs.get(spec)
    if found is None:
        name, _, layout = spec.partition("@")
        made = Spec(formats.get(name), get(layout))
        if not made.layout.takes(made.format):
            raise ValueError(
                f"layout {layout!r} does not take {made.layout.refused}, got {made.format}"
            )
        found = _specs[spec] = made
    return found


__all__ = [
    "COLS",
    "GROUPED_COLS",
    "ROWS",
    "SM90_DECODE",
    "SM90_FACTORS",
    "SM90_FACTOR_K",
    "SM90_FACTOR_ROWS",
    "Layout",
    "Spec",
    "get",
    "names",
    "spec_of",
]
