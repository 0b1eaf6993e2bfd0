"""Which tables there are, and what they say of a problem.

The table of a device comes with te_mx, if one was measured: <device>.csv beside this file. Those of
users come first, the last one before all: `te_mx.use_tuned_table`, then TE_MX_TUNED, paths of
files with the separator of PATH between them, or "off" for no tables at all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from te_mx import formats
from te_mx.dispatch.kernels import ops
from te_mx.dispatch.problem import Place, Problem
from te_mx.dispatch.tuned.table import MOST_ROWS, Key, Row, bucket, read

FOLDER = Path(__file__).parent
VARIABLE, OFF = "TE_MX_TUNED", "off"

# The rows of one operation on operands of two formats: by n, k, m, experts, top_k.
_Rows = dict[tuple[int, int, int, int, int], "Found"]


class Table(NamedTuple):
    """A file, and its rows."""

    path: Path
    rows: list[Row]


class Found(NamedTuple):
    """A row, and the name of the file that it is in."""

    row: Row
    table: str


_names: dict[str, Callable[[Place], str]] = {}
_files: dict[Path, list[Row]] = {}  # what was read
_added: list[Table] = []
_known: dict[tuple[Place, str, str, str], _Rows] = {}
_only: list[Row] | None = None  # of a trial, in place of all tables
_asked: list[Problem] | None = None  # what was looked up, where somebody watches


def register_device_names(device: str, name: Callable[[Place], str]) -> None:
    """Let a backend say what the tables call a device of its kind."""
    _names[device] = name


def device_name(place: Place) -> str:
    """What tables call the device of a place; "" where no backend names it."""
    name = _names.get(place.device)
    return "" if name is None else name(place)


def add(path: Path) -> Table:
    """Let a file of the user win over all tables so far. Raises ValueError if it is no table."""
    table = Table(path, _read(path))
    _added.append(table)
    _known.clear()
    return table


def _read(path: Path) -> list[Row]:
    """The rows of a file; a warning names operations and formats that nothing here has."""
    rows = read(path)
    asked = {"operation": {row.key.operation for row in rows} - set(ops())}
    asked["format"] = {name for row in rows for name in (row.key.x, row.key.w)}
    asked["format"] = {name for name in asked["format"] if not _is_format(name)}
    unknown = [f"{kind} {name!r}" for kind, found in asked.items() for name in sorted(found)]
    if unknown:
        warnings.warn(
            f"te_mx: the tuned table {path} has rows that never apply: te_mx has no "
            f"{', '.join(unknown)}. A format of your own is to be registered before the table is "
            "read; `python -m te_mx tune` writes names that exist",
            stacklevel=4,
        )
    return rows


def _is_format(name: str) -> bool:
    """Whether problems may name this format: no short name."""
    try:
        return formats.get(name).name == name
    except ValueError:
        return False


def remove() -> int:
    """Forget the files that were added, and whatever was read; how many were added."""
    count = len(_added)
    _added.clear()
    _files.clear()
    _known.clear()
    return count


def try_only(rows: list[Row] | None) -> None:
    """Follow these rows alone, for a trial; None: the tables again."""
    global _only
    _only = rows
    _known.clear()


@contextmanager
def watched() -> Iterator[list[Problem]]:
    """The problems that are looked up meanwhile."""
    global _asked
    asked: list[Problem] = []
    _asked = asked
    try:
        yield asked
    finally:
        _asked = None


def loaded(place: Place) -> list[Table]:
    """The tables that a place is looked up in, the first that knows a problem decides."""
    if _only is not None:
        return [Table(Path("a trial"), _only)]
    asked = os.environ.get(VARIABLE, "")
    if asked.strip().lower() == OFF:
        return []
    paths = [Path(path) for path in asked.split(os.pathsep) if path.strip()]
    device = device_name(place)
    shipped = FOLDER / f"{device}.csv"
    if device and shipped.is_file():
        paths.append(shipped)
    for path in paths:
        if path not in _files:
            _files[path] = _read(path)
    return [*reversed(_added), *(Table(path, _files[path]) for path in paths)]


def _rows(problem: Problem) -> _Rows:
    """What tables say of an operation on two formats, wherever their codes lie."""
    x, w = (spec.partition("@")[0] for spec in (problem.lhs, problem.rhs))
    asked = problem.place, problem.op, x, w
    found = _known.get(asked)
    if found is None:
        found = {}
        same = device_name(problem.place), problem.op, x, w
        for path, rows in reversed(loaded(problem.place)):
            for row in rows:
                if row.key[:4] == same:
                    found[row.key[4:]] = Found(row, path.name)
        _known[asked] = found
    return found


def has_rows(problem: Problem) -> bool:
    """Whether any table knows the operation, so that its choices depend on sizes."""
    return bool(_rows(problem))


def lookup(problem: Problem) -> Found | None:
    """The row of a problem: of its very m, or of the next power of two."""
    if _asked is not None:
        _asked.append(problem)
    rows = _rows(problem)
    if not rows or not 0 < problem.m <= MOST_ROWS:
        return None
    n, k, rest = problem.n, problem.k, (problem.groups, problem.top_k)
    return rows.get((n, k, problem.m, *rest)) or rows.get((n, k, bucket(problem.m), *rest))


def key_of(problem: Problem) -> Key:
    """The key of the row of a problem."""
    x, w = (spec.partition("@")[0] for spec in (problem.lhs, problem.rhs))
    sizes = problem.n, problem.k, problem.m, problem.groups, problem.top_k
    return Key(device_name(problem.place), problem.op, x, w, *sizes)
