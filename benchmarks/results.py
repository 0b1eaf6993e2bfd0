"""Results as data: what a run measured lies in benchmarks/results/<machine>-<date>.json.

A file has the machine and its rows; a row has the date and the command that made it, so that a page
can say both. Runs of one machine and day go into one file, where a row takes the place of the one
that measured the same before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.row import Row

FOLDER = Path(__file__).parent / "results"
KEY = "benchmark", "shape", "kernel", "peer"  # the words of a row
CANDIDATE = "fuse="  # begins a kernel that says which candidate a row is of, not what ran
KEPT = (*KEY, "us", "rate", "of_peak", "value", "target", "verdict", "date", "command")
Record = dict[str, Any]


def slug(name: str) -> str:
    """The name of a machine as a file has it: "nvidia-h200"."""
    name = re.sub(r"\((R|TM)\)|\(.*?\)|\bCPU\b|@.*|\d+-Core|Processor", "", name)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def key(row: Record) -> tuple:
    """What a row measures: the same again takes its place, whichever kernel ran it then."""
    kernel = row["kernel"] if row["kernel"].startswith(CANDIDATE) else ""
    return row["benchmark"], row["shape"], kernel, row["peer"]


def save(machine: Record, rows: Iterable[Row], command: str, folder: Path = FOLDER) -> Path:
    """Write the rows of a machine, beside those of other commands of the same day. The path."""
    name = machine["cpu"] if "cpu" in machine else machine["name"]
    path = folder / f"{slug(name)}-{machine['date']}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = {key(row): row for row in before}
    for row in rows:
        record = {**row.to_dict(), "date": machine["date"], "command": command}
        kept[key(record)] = {field: record[field] for field in KEPT}
    folder.mkdir(parents=True, exist_ok=True)
    # The name of a host says nothing to others.
    described = {k: v for k, v in machine.items() if not ("cpu" in machine and k == "name")}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in kept.values())
    path.write_text(f'{{"machine": {json.dumps(described)},\n "rows": [\n{lines}\n ]}}\n')
    return path


def machines(folder: Path = FOLDER) -> dict[str, list[Record]]:
    """The files of every machine, the newest first."""
    found: dict[str, list[Record]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem[-10:], reverse=True):
        found.setdefault(path.stem[:-11], []).append(json.loads(path.read_text()))
    return found


def rows_of(files: list[Record]) -> list[Record]:
    """The newest row of everything that was measured on a machine, in the order of the files."""
    newest: dict[tuple, Record] = {}
    for file in files:
        for row in file["rows"]:
            newest.setdefault(key(row), row)
    return list(newest.values())
