"""The formats by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_mx.arguments import shown

if TYPE_CHECKING:
    from te_mx.formats.format import Format

_formats: dict[str, Format] = {}  # in the order of registration
_by_any_name: dict[str, Format] = {}  # names and short names


def register(fmt: Format) -> Format:
    """Make `fmt` known by its name and its short names; returns it.

    Raises:
        ValueError: a name that is taken.
    """
    for name in (fmt.name, *fmt.short_names):
        if name in _by_any_name:
            raise ValueError(
                f"format {fmt.name!r}: the name {name!r} is taken by {_by_any_name[name]}; "
                "choose another one"
            )
    _formats[fmt.name] = fmt
    _by_any_name.update(dict.fromkeys((fmt.name, *fmt.short_names), fmt))
    return fmt


def get(name: str) -> Format:
    """The format called `name`; short names too ("e4m3" is "mxfp8_e4m3").

    Raises:
        ValueError: no such format.
    """
    found = _by_any_name.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(map(repr, _by_any_name))
        raise ValueError(f"fmt must be one of {known}, got {shown(name)}")
    return found


def names() -> tuple[str, ...]:
    """Names of all registered formats, without the short ones."""
    return tuple(_formats)
