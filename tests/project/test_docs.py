"""The Python examples of the pages run as they stand, one after the other."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from beside_te import import_or_skip

import te_mx

# A block that imports one of these is left out where it is not installed.
OPTIONAL = ("accelerate", "lightning", "peft", "torchtitan", "trl")
ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md", "docs/grouped.md", "docs/inference.md", "docs/integrations.md", "docs/inspect.md",
    "docs/transformer_engine.md", "docs/tuning.md",
]  # fmt: skip
NEEDS = {"docs/integrations.md": "transformers"}


def can_run(block: str) -> bool:
    wanted = [n for n in OPTIONAL if re.search(rf"^(import|from) {n}\b", block, re.MULTILINE)]
    try:
        return all(import_or_skip(name) for name in wanted)
    except pytest.skip.Exception:
        return False


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    if not (ROOT / page).is_file():
        pytest.skip(f"{page} is not here: the tests run on an installed wheel")
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert blocks, f"{page} has no example any more: take it from the list"
    if page == "docs/integrations.md":
        pytest.importorskip("transformers", minversion="5.0")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with warnings.catch_warnings():
        if "mxfp4" in "".join(blocks):  # which may run in plain torch
            warnings.simplefilter("ignore", te_mx.FallbackWarning)
        for block in filter(can_run, blocks):
            exec(compile(block, page, "exec"), names)
    if page == "README.md":
        assert "te_mx.Linear" in capsys.readouterr().out and Path("model.pt").is_file()


def test_pages_name_what_there_is():
    """Every te_mx.name in the pages is a name of the package, and every linked file exists."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text() if page.is_file() else ""
        for name in set(re.findall(r"\bte_mx\.([A-Za-z_]\w*)(?!/)", text)):
            assert hasattr(te_mx, name), f"{page.name}: te_mx.{name}"
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
