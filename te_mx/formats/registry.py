"""The formats by name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from te_mx.formats.hadamard import split_name
from te_mx.runtime.arguments import shown

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

    "+rht16:0x1234abcd" or "+rht32:.." behind the name of an MX format is that format with a
    `Hadamard` transform of 16 or 32 along k, and these signs.

    Raises:
        ValueError: no such format.
    """
    found = _by_any_name.get(name) if isinstance(name, str) else None
    if found is None and isinstance(name, str):
        found = _transformed(name)
    if found is None:
        known = ", ".join(map(repr, _by_any_name))
        more = ""
        if isinstance(name, str) and "+" in name:
            more = (
                '; a Hadamard transform is "+rht16:0x" or "+rht32:0x" and one to eight hex digits '
                "of signs behind the name of an MX format"
            )
        raise ValueError(f"fmt must be one of {known}, got {shown(name)}{more}")
    return found


def _transformed(name: str) -> Format | None:
    """A format with a transform, made when its name is first heard."""
    parts = split_name(name)
    if parts is None:
        return None
    base, transform = get(parts[0]), parts[1]
    if base.scaling.scale != "e8m0" or base.transform is not None:
        raise ValueError(f"fmt {name!r}: only MX formats take a Hadamard transform, and one only")
    proper = f"{base.name}+{transform}"
    made = _by_any_name.get(proper)
    if made is None:
        made = dataclasses.replace(base, name=proper, short_names=(), transform=transform)
    _by_any_name[proper] = _by_any_name[name] = made
    return made


def names() -> tuple[str, ...]:
    """Names of all registered formats, without the short ones."""
    return tuple(_formats)
