"""Tables of the user: add one, or forget those that were added."""

import os
from pathlib import Path

from te_mx.dispatch import registry
from te_mx.dispatch.problem import Place
from te_mx.dispatch.tuned import tables


def use_tuned_table(path: str | os.PathLike[str] | None) -> int:
    """Let the choices of a file that `python -m te_mx tune` wrote win over the tables that te_mx
    comes with and over those added before. What kernels take stays the truth: a row that names one
    which does not take its problem is ignored, and `te_mx.explain` says so.

    The environment variable TE_MX_TUNED does the same for a whole process: paths with the separator
    of PATH between them, or "off" for no tables at all. Captured CUDA graphs and compiled code keep
    the kernels that they were made with.

    Args:
        path: a csv file; None forgets all files that were added, and reads the others anew.

    Returns:
        The number of rows in the file, for any device; of None, how many files were forgotten.

    Raises:
        TypeError: path is no path.
        ValueError: the file is no table; nothing changes then.

    Rows of operations and formats that te_mx does not have never apply: a warning names them.
    """
    if path is None:
        count = tables.remove()
    elif isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str):
        count = len(tables.add(Path(path)).rows)
    else:
        raise TypeError(f"path must be a path or None, got {type(path).__name__}")
    registry.forget()
    return count


def tables_of(place: Place) -> list[tuple[Path, int, int]]:
    """(file, rows, how many are of this device) of the tables that a place is looked up in."""
    name = tables.device_name(place)
    return [
        (path, len(rows), sum(row.key.device == name for row in rows))
        for path, rows in tables.loaded(place)
    ]
