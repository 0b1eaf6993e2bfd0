"""The layouts by name, and specs."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from te_mx import formats
from te_mx.formats import Format
from te_mx.layouts.base import AnyLayout, Layout
from te_mx.layouts.plain import COLS, GROUPED_COLS, ROWS
from te_mx.runtime import compiled

# Layouts by name; those with a number behind a colon by what makes them of it.
_layouts: dict[str, Layout] = {one.name: one for one in (AnyLayout(), ROWS, COLS, GROUPED_COLS)}
_families: dict[str, Callable[[int], Layout]] = {}


def register(layout: Layout) -> None:
    """Make a layout known by its name. Raises ValueError for a name that is taken."""
    _check_free(layout.name)
    _layouts[layout.name] = layout


def register_family(name: str, make: Callable[[int], Layout]) -> None:
    """Make layouts "<name>:<number>" known, by what makes one of its number. Raises ValueError for
    a name that is taken."""
    _check_free(name)
    _families[name] = make


def _check_free(name: str) -> None:
    if name in _layouts or name in _families:
        raise ValueError(f"te_mx: the name {name!r} is taken by a layout; choose another one")


class Spec(NamedTuple):
    """A format and a layout."""

    format: Format
    layout: Layout


_specs: dict[str, Spec] = {}


def get(name: str) -> Layout:
    """The layout of a name, such as "rows", or "<family>:<number>".

    Raises ValueError for a name that no layout has."""
    found = _layouts.get(name)
    if found is None:
        family, _, number = name.partition(":")
        if family not in _families or not number.isdecimal():
            raise ValueError(f"layout must be one of {', '.join(names())}, got {name!r}")
        found = _layouts[name] = _families[family](int(number))
    return found


def aligning(spread: int) -> Layout:
    """The layout of matrices whose tiles are in classes, by how far scales that are up to
    2^spread apart are aligned; its `class_names` and `classes` say the rest."""
    made = (get(f"{family}:{spread}") for family in _families)
    return next(one for one in made if one.class_names)


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


@compiled.constant
def has_tensor_scale(spec: str) -> bool:
    return spec_of(spec).format.tensor_scaled


def tensor_scaled(spec: str) -> bool:
    """Whether operands of a spec have a tensor scale; in code that is traced too, where a look-up
    would be something that the graph depends on."""
    ask = compiled.has_tensor_scale if torch.compiler.is_compiling() else has_tensor_scale
    found: bool = ask(spec)
    return found
