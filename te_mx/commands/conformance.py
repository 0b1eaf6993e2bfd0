"""Check the bytes of every format, and products, on a device against the set in
docs/conformance.md; and what other libraries write."""

import argparse
import importlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from te_mx.api.explain import FallbackWarning
from te_mx.conformance import cases, peers
from te_mx.conformance.cases import INPUTS, Difference
from te_mx.runtime.report import table

_T = TypeVar("_T")


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, .. (default: cpu)")
    p.add_argument(
        "--peers", action="store_true",
        help=f"also run what is installed of {', '.join(peers.LIBRARIES)}: where they differ",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    warnings.simplefilter("ignore", FallbackWarning)  # the table names the kernels of products
    asked = cases.cases()
    made = [cases.check(one, device) for one in _shown(asked, "bytes")]
    wrong = [one for one in made if one.wrong]
    right, every = Counter[str](), Counter(one.fmt for one in asked)
    for case, result in zip(asked, made, strict=True):
        right[case.fmt] += not result.wrong
    print(f"bytes on {device}: rules, directions and dtypes of each format")
    agree = [(fmt, f"{right[fmt]} of {count}") for fmt, count in every.items()]
    print(table(("format", "agree"), agree))
    for one in wrong:
        for name, why in one.wrong.items():
            told = f"{why} % of scales / codes; {why.first}" if why else "the set differs"
            print(f"WRONG: {one.case}, {name}: {told}")

    known = cases.expected()["layouts"]
    others = [name for name, digest in cases.of_layouts() if known[name] != digest]
    print(f"\nlayouts of others, and values: {len(known) - len(others)} of {len(known)} agree")
    for name in others:
        print(f"WRONG: {name}")

    products = list(_shown(cases.products(device), "products"))
    print(f"\nproducts on {device}: the largest error, of what it may be")
    rows = [(one.name, one.kernel, f"{one.error:.2g}") for one in products]
    print(table(("product", "kernel", "error"), rows))
    outside = [one for one in products if not one.right]
    for off in outside:
        print(f"WRONG: {off.name} on {off.kernel}")

    if args.peers:
        _print_peers(device)
    failures = len(wrong) + len(others) + len(outside)
    print(f"\n{failures} cases are WRONG" if failures else "\nall agree")
    return 1 if failures else 0


def _print_peers(device: torch.device) -> None:
    versions = {name: peers.version(name) for name in peers.LIBRARIES}
    print("\nothers: " + ", ".join(f"{k} {v or 'not installed'}" for k, v in versions.items()))
    rows: dict[tuple[str, ...], dict[str, Difference | str | None]] = {}
    for one in _shown(peers.compare(device), "others"):
        key = one.library, one.fmt, one.rule, one.dtype
        rows.setdefault(key, {})[one.given] = one.why
    cells = []
    for row, found in rows.items():
        first = next((why for why in found.values() if why is not None), "")
        said = first if isinstance(first, str) else first.first
        each = (found.get(given, "-") for given in INPUTS)
        words = ("=" if why is None else "-" if isinstance(why, str) else str(why) for why in each)
        cells.append((*row, *words, said))
    print(
        "percent of block scales / of codes that differ from the bytes of a rule, t: the scale of "
        "the tensor does;\n= the same, - no answer"
    )
    print(table(("library", "format", "rule", "dtype", *INPUTS, "first difference"), cells))


def _shown(things: Iterable[_T], what: str) -> Iterator[_T]:
    """With a progress bar on a terminal, where tqdm is installed."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError:
        return iter(things)
    shown: Iterator[_T] = iter(tqdm(things, desc=what, unit="", disable=None, leave=False))
    return shown
