"""The checked-in list of Transformer Engine's arguments, how te_mx is compared with it, and the
page that is made of it.

``python tests/compat/listing.py`` writes docs/compatibility.md.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import te_mx

LIST = Path(__file__).with_name("transformer_engine.json")
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
STATUSES = ("accepted", "renamed", "refused")
METHODS = {"constructor": "__init__", "forward": "forward"}

Entry = dict[str, Any]

# What has run on a version of PyTorch, and what te_mx refuses there: the versions that README and
# pyproject.toml may name. A row is added when its tests have run.
SPLIT = "zero-bubble pipelines, which lose autograd functions there"
TORCH = (
    (
        "2.11.0", "5.23.0",
        "the CPU tests, those of several ranks included; tests/gpu on Hopper (CUDA 13.0)",
        f"{SPLIT}; layers that several ranks share, in one graph of torch.compile (they run "
        "between graphs)", "2026-11-28",
    ),
    (
        "2.12.1", "5.23.0",
        "of the CPU tests those of several ranks, compiled code, formats, fusion and experts",
        SPLIT, "2026-11-28",
    ),
    ("2.13.0", "5.23.0", "every test", "", "with every change"),
    (
        "2.14.1", "5.24.0", "the CPU tests without tests/hostile and tests/contract", "",
        "2026-11-28",
    ),
    ("2.15.0", "5.23.0", "every CPU test", "", "2026-11-28"),
)  # fmt: skip


def load() -> dict[str, Any]:
    return json.loads(LIST.read_text())


def malformed(entries: list[Entry]) -> list[str]:
    """What is wrong with entries of the list themselves."""
    found = []
    for e in entries:
        if e.get("status") not in STATUSES:
            found.append(f"{e['name']}: status must be one of {STATUSES}")
        if (e.get("status") == "renamed") != ("te_mx" in e):
            found.append(f"{e['name']}: te_mx goes with status renamed")
        if e.get("status") != "accepted" and not e.get("note"):
            found.append(f"{e['name']}: renamed and refused need a note with the reason")
        if "te_mx_default" in e and not e.get("note"):
            found.append(f"{e['name']}: another default needs a note with the reason")
        if e.get("status") == "refused" and "default" not in e:
            found.append(f"{e['name']}: what has no default cannot be refused")
        unknown = set(e) - {"name", "default", "status", "te_mx", "te_mx_default", "note"}
        if unknown:
            found.append(f"{e['name']}: unknown fields {sorted(unknown)}")
    return found


def disagreements(
    function: Any, entries: list[Entry], refused_elsewhere: frozenset[str] = frozenset()
) -> list[str]:
    """Where the signature of a function of te_mx says something else than the list.

    Refused arguments of a constructor are not in its signature but in `refused_elsewhere`; those of
    a forward are, at their default.
    """
    taken = inspect.signature(function).parameters
    found = []
    for e in entries:
        name = e.get("te_mx", e["name"])
        if "te_mx" in e and e["name"] in taken:
            found.append(f"{e['name']} is listed as renamed to {name}, and is there")
        if e["status"] == "refused" and name in refused_elsewhere:
            if name in taken:
                found.append(f"{name} is refused by the table and in the signature")
            continue
        if name not in taken:
            found.append(f"{name} is missing ({e['status']})")
            continue
        default = taken[name].default
        expected = e.get("te_mx_default", e.get("default", inspect.Parameter.empty))
        if default is not expected and default != expected:
            found.append(f"{name} has the default {default!r}, the list says {expected!r}")
    listed = {e["name"] for e in entries if e["status"] == "refused"}
    found += [
        f"{name} is in the table of refused arguments and not in the list"
        for name in sorted(refused_elsewhere - listed)
    ]
    return found


# ---------------------------------------------------------------------------------------- the page
def _argument(entry: Entry) -> str:
    default = f"={entry['default']!r}" if "default" in entry else ""
    return f"`{entry['name']}{default}`"


def _what(entry: Entry) -> str:
    if entry["status"] == "renamed":
        return f"renamed to `{entry['te_mx']}`"
    if "te_mx_default" in entry:
        return f"accepted, default `{entry['te_mx_default']!r}`"
    return entry["status"]


def _table(entries: list[Entry]) -> list[str]:
    """Arguments of which the same is said share a row, where the first of them stands."""
    rows: dict[tuple[str, str], list[str]] = {}
    for e in entries:
        rows.setdefault((_what(e), e.get("note", "")), []).append(_argument(e))
    lines = [f"| {', '.join(names)} | {' | '.join(said)} |" for said, names in rows.items()]
    return ["| argument, its default there | te_mx | |", "|---|---|---|", *lines, ""]


def page(data: dict[str, Any]) -> str:
    """docs/compatibility.md."""
    lines = [
        "# Compatibility with PyTorch and Transformers",
        "",
        "te_mx works with the versions below, and refuses by name what one of them cannot do.",
        "Older ones lack what it needs, newer ones have not been tried.",
        "",
        "| PyTorch | with Transformers | what ran | refused there | when |",
        "|---|---|---|---|---|",
        *(
            f"| {torch} | {transformers} | {ran} | {refused or 'nothing'} | {when} |"
            for torch, transformers, ran, refused, when in TORCH
        ),
        "",
        "# Compatibility with Transformer Engine",
        "",
        "Made by `python tests/compat/listing.py` of `tests/compat/transformer_engine.json`,",
        "to which tests hold the signatures of te_mx. The list is that of Transformer Engine "
        f"{data['transformer_engine']}.",
        "",
        "*accepted*: means the same. *refused*: accepted at the default that is shown; set, it",
        "raises NotImplementedError with its name and the reason. Pass arguments by keyword: te_mx",
        "has the positional order of nn.Linear. The classes of te_mx.pytorch have that of",
        "Transformer Engine, with its initialization and its default device:",
        "[transformer_engine.md](transformer_engine.md).",
        "",
    ]
    for module, parts in data["modules"].items():
        if not hasattr(te_mx, module):
            lines += [f"te_mx has no {module} yet.", ""]
        for part, entries in parts.items():
            lines += [f"## {module}: {part}", "", *_table(entries)]
    for name, entries in data["contexts"].items():
        lines += [f"## {name}", "", *_table(entries)]
    lines += [
        "## Recipes",
        "",
        "`te_mx.autocast(recipe=...)` takes recipe objects of Transformer Engine as they are,",
        "known by their class name; te_mx does not import it.",
        "",
    ]
    for name, fields in data["recipe"].items():
        lines += [f"Fields of `{name}`:", "", *_table(fields)]
    lines += [
        "Refused, because te_mx runs MXFP8, blockwise FP8 and NVFP4 only: "
        + ", ".join(f"`{name}` ({what})" for name, what in data["refused_recipes"].items())
        + ".",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(load()))
    sys.stdout.write(f"wrote {PAGE}\n")
