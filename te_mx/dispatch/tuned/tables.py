"""Which tables there are, and what they say of a problem.

The table of a device comes with te_mx, if one was measured: <device>.csv beside this file. Those of
users come first, the last one before all: `te_mx.use_tuned_table`, then TE_MX_TUNED, paths of
files with the separator of PATH between them, or "off" for no tables at all."""

import csv
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from te_mx import formats
from te_mx.dispatch.kernels import Kernel, ops
from te_mx.dispatch.problem import INVARIANT, Place, Problem

# ------------------------------------------------------------------------------------------- table
# A table of measured choices, and the csv file that it lies in.
# One row says what runs one operation of one size on one device. A file may hold rows of several
# devices; each machine reads its own.
# In column `use`: what runs without a table, which nothing beat; and, of an op that does in one
# call what others do in several, these others.
DEFAULT, STEPS = "default", "steps"
MOST_ROWS = 512  # of M: above it choices are those of large problems
_SIZES = ("n", "k", "m", "experts", "top_k")


class Key(NamedTuple):
    """What a row is about.

    device: the name of a device (tables.device_name). operation: an op of the registry. x, w:
    formats of lhs and rhs, the input and the weight. n, k, m: D[m, n] = lhs[m, k] @ rhs[n, k]^T.
    experts, top_k: of a mixture of experts, else 0."""

    device: str
    operation: str
    x: str
    w: str
    n: int
    k: int
    m: int
    experts: int = 0
    top_k: int = 0


class Row(NamedTuple):
    """One measured choice.

    use: the kernel to run, "default" or "steps". configuration: of this kernel, "" for its own
    choice. us: microseconds of what is used. default, default_us: what ran without a table when
    this was measured, and its time."""

    key: Key
    use: str
    configuration: str
    us: float
    default: str
    default_us: float

    @property
    def gain(self) -> float:
        """How many times faster than the default."""
        return self.default_us / self.us

    def choice(self) -> str:
        """What runs, in words."""
        how = f", {self.configuration}" if self.configuration else ""
        return f"{self.use}{how}"


COLUMNS = (*Key._fields, *Row._fields[1:])


def bucket(m: int) -> int:
    """The least power of two that is not below m: whose row serves where m has none."""
    return 1 << (m - 1).bit_length()


def served(m: int) -> range:
    """The numbers of rows that a row of m may be asked for."""
    return range(m // 2 + 1, m + 1) if bucket(m) == m else range(m, m + 1)


def read(path: Path) -> list[Row]:
    """The rows of a csv file; lines that start with # are for people.

    Raises ValueError for a file that is no table, with the line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"te_mx: the tuned table {path} cannot be read: {error}") from error
    numbered = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]
    records = list(csv.reader(line for _, line in numbered))
    if not records or tuple(records[0]) != COLUMNS:
        raise ValueError(
            f"te_mx: {path} is no tuned table: its first line must be {','.join(COLUMNS)}; "
            "python -m te_mx tune writes one"
        )
    rows: dict[Key, Row] = {}
    for (number, _), record in zip(numbered[1:], records[1:], strict=True):
        row = _parsed(record, f"{path}, line {number}")
        if row.key in rows:
            raise ValueError(f"te_mx: {path}, line {number}: {_words(row.key)} is there twice")
        rows[row.key] = row
    return list(rows.values())


def _parsed(record: list[str], where: str) -> Row:
    if len(record) != len(COLUMNS):
        raise ValueError(f"te_mx: {where}: expected {len(COLUMNS)} columns, got {len(record)}")
    given: dict[str, Any] = dict(zip(COLUMNS, record, strict=True))
    for name in _SIZES:
        least = 0 if name in ("experts", "top_k") else 1
        if not (given[name].isdecimal() and int(given[name]) >= least):
            raise ValueError(
                f"te_mx: {where}: {name} must be a whole number from {least} on, "
                f"got {given[name]!r}"
            )
        given[name] = int(given[name])
    if given["m"] > MOST_ROWS:
        raise ValueError(f"te_mx: {where}: m must be at most {MOST_ROWS}, got {given['m']}")
    for name in ("us", "default_us"):
        try:
            given[name] = float(given[name])
        except ValueError:
            given[name] = 0.0
        if not 0 < given[name] < 1e12:
            raise ValueError(f"te_mx: {where}: {name} must be microseconds, above 0")
    for name in ("device", "operation", "x", "w", "use", "default"):
        if not given[name]:
            raise ValueError(f"te_mx: {where}: {name} is empty")
    return Row(Key(*(given[name] for name in Key._fields)), *(given[n] for n in Row._fields[1:]))


def _words(key: Key) -> str:
    return ",".join(map(str, key))


def text_of(rows: Iterable[Row], remarks: Iterable[str] = ()) -> str:
    """The csv file of rows, in the order of their keys, under lines for people."""
    out = io.StringIO()
    for remark in remarks:
        out.write(f"# {remark}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in sorted(rows):
        times = f"{row.us:.4g}", row.default, f"{row.default_us:.4g}"
        writer.writerow((*row.key, row.use, row.configuration, *times))
    return out.getvalue()


def write(path: Path, rows: Iterable[Row], remarks: Iterable[str] = ()) -> None:
    """Write a csv file at once: whoever reads it meanwhile finds the old one or the new one."""
    text = text_of(rows, remarks)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remarks_of(path: Path) -> list[str]:
    """The lines for people of a csv file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#").strip() for line in lines if line.startswith("#")]


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


# ------------------------------------------------------------------------------------------ follow
# What a table makes of a choice: the envelope of each kernel is the truth, so a row counts only
# where the kernel that it names takes the problem and knows the configuration.
class Tuning(NamedTuple):
    """The kernel that a table chooses, configured; None: the default runs. said: why, in words.
    steps: the op is left to the steps of other ops, where it need not have a kernel."""

    kernel: Kernel | None
    said: str
    steps: bool = False


def follow(problem: Problem, kernels: Sequence[Kernel]) -> Tuning:
    """What the tables say of a problem that these kernels are asked for."""
    found = lookup(problem) if problem.precision != INVARIANT else None
    if found is None:
        return Tuning(None, "not tuned: default")
    row, name = found
    table = f"tuned table {name}"
    if row.use == DEFAULT:
        return Tuning(None, f"{table}: the default, which nothing beat")
    if row.use == STEPS:
        return Tuning(None, f"{table}: the steps, one after the other", steps=True)
    kernel = next((one for one in kernels if one.name == row.use), None)
    if kernel is None:
        return Tuning(None, f"{table} names {row.use}, which this te_mx has not: default")
    reason = kernel.accepts(problem)
    if reason is not None:
        return Tuning(None, f"{table} names {row.use}, which {reason}: default")
    how = row.configuration
    if how and how not in kernel.configurations(problem._replace(split_k=True)):
        return Tuning(None, f"{table} names {row.use}, which has no configuration {how!r}: default")
    words = f"{table}: kernel {row.use}"
    if how:
        words += f", configuration {how}"
    if row.key.m != problem.m:
        words += f" (measured at {row.key.m} rows)"
    chosen = kernel.configured(how) if how else kernel
    usual = next(one for one in kernels if one.accepts(problem) is None)
    if chosen.sums(problem) != usual.sums(problem):
        words += "; its bits are not the default's"
    return Tuning(chosen, words)
