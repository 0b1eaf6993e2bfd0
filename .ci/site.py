"""A hook of mkdocs: links that leave docs/ go to the repository, which the site does not hold, and
a table that is shown as text fails. An extension of griffe: tables of docstrings, drawn with lines
of =, become those of Markdown."""

from __future__ import annotations

import re
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(\.\./[^)#\s]+)([^)]*\))")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Raises ValueError where a file that is linked is not there: mkdocs does not look outside."""
    source = Path(page.file.abs_src_path)

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise ValueError(f"{page.file.src_path}: {match[2]} is not there")
        return f"{match[1]}{config.repo_url}/blob/main/{target.relative_to(ROOT)}{match[3]}"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page, config, files) -> None:
    """Raises ValueError for a table that Markdown did not recognize."""
    if found := re.search(r"<p>\|.*|^=====.*", html, re.MULTILINE):
        raise ValueError(f"{page.file.src_path}: a table is shown as text: {found[0][:80]}")


class Tables(griffe.Extension):
    """Simple tables of reStructuredText, which read well in a terminal, as Markdown has them."""

    TABLE = re.compile(r"^=+(?: +=+)+\n(?:.+\n)*?=+(?: +=+)+\n(?:.+\n)*?=+(?: +=+)+$", re.MULTILINE)

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = self.TABLE.sub(lambda m: _pipes(m[0]), obj.docstring.value)


def _pipes(table: str) -> str:
    """A line goes on with the cells of the one before it where its first cell is empty; a first
    cell ".." is that of the row before."""
    lines = table.splitlines()
    starts = [run.start() for run in re.finditer("=+", lines[0])]
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith("=="):
            continue
        ends = [*starts[1:], None]
        cells = [line[a:b].strip().replace("|", "\\|") for a, b in zip(starts, ends, strict=True)]
        if cells[0] or not rows:
            rows.append(["" if cell == ".." else cell for cell in cells])
        else:
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)]
    rows.insert(1, ["---"] * len(starts))
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
