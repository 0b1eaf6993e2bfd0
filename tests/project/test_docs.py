"""The pages: their examples run, their links hold, and the reference has every public name."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import warnings
from pathlib import Path

import pytest
from beside_te import import_or_skip

import te_mx

# A block that imports one of these is left out where it is not installed.
OPTIONAL = ("accelerate", "lightning", "peft", "torchtitan", "trl")
ROOT = Path(__file__).parents[2]
# Pages whose blocks are parts of programs: a file of te_mx, a rank of several.
FRAGMENTS = ("adding.md", "distributed.md")
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULES = ("te_mx", "te_mx.recipe", "te_mx.moe", "te_mx.distributed")
INTERNAL = {"te_mx.recipe": {"MAX_SPREAD", "NAMED", "FormatRange", "Settings", "check_precision",
    "is_mxfp8_available", "resolve_recipe"}, "te_mx.moe": {"ACTIVATIONS"},
    "te_mx": {"__version__", "distributed", "formats", "moe", "recipe", "get_default_recipe"},
}  # fmt: skip


def blocks() -> list[tuple[str, int, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        (page.name, number, block)
        for page in pages
        if page.is_file() and page.name not in FRAGMENTS
        for number, block in enumerate(EXAMPLE.findall(page.read_text()))
    ]


def can_run(block: str) -> bool:
    wanted = [n for n in OPTIONAL if re.search(rf"^(import|from) {n}\b", block, re.MULTILINE)]
    if re.search(r"^(import|from) transformers\b", block, re.MULTILINE):
        pytest.importorskip("transformers", minversion="5.0")
    return all(import_or_skip(name) for name in wanted)


@pytest.mark.parametrize(
    ("page", "block"), [pytest.param(p, b, id=f"{p}-{i}") for p, i, b in blocks()]
)
def test_an_example_runs_when_it_is_copied_alone(page, block, tmp_path, monkeypatch):
    assert can_run(block)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        if "fp4" in block:  # which may run in plain torch
            warnings.simplefilter("ignore", te_mx.FallbackWarning)
        exec(compile(block, page, "exec"), {})


def test_the_notebook_runs_and_holds_no_outputs(tmp_path, monkeypatch):
    """From converting to loading, cell by cell in one namespace."""
    path = ROOT / "examples" / "quickstart.ipynb"
    if not path.is_file():
        pytest.skip("examples are not here: the tests run on an installed wheel")
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        assert not cell["outputs"] and cell["execution_count"] is None
        exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    losses = names["losses"]
    assert isinstance(losses, list) and losses[-1] < losses[0]


def test_readme_has_examples():
    if (ROOT / "README.md").is_file():
        assert len([page for page, _, _ in blocks() if page == "README.md"]) == 2


def test_pages_name_what_there_is():
    """Every te_mx.name in the pages is a name of the package, and every linked file exists."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text() if page.is_file() else ""
        for name in set(re.findall(r"\bte_mx\.([A-Za-z_]\w*)(?!/)", text)):
            assert hasattr(te_mx, name), f"{page.name}: te_mx.{name}"
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_reference_has_every_public_name():
    """Each with a docstring, of its own."""
    folder = ROOT / "docs" / "api"
    if not folder.is_dir():
        pytest.skip("docs are not here: the tests run on an installed wheel")
    text = "".join(page.read_text() for page in folder.glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
    last = {name.rsplit(".", 1)[-1] for name in shown}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in set(module.__all__) - INTERNAL.get(module_name, set()):
            assert name in last, f"docs/api has no {module_name}.{name}"
            assert inspect.getdoc(getattr(module, name)), f"{module_name}.{name} has no docstring"


def test_the_pages_are_short_enough_to_be_read():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    words = {page: len(page.read_text().split()) for page in pages if page.is_file()}
    if words:
        assert len((ROOT / "README.md").read_text().splitlines()) <= 130
        assert words[ROOT / "benchmarks" / "README.md"] <= 1500
        assert sum(words.values()) <= 35_000
