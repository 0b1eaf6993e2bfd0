"""A hook of mkdocs: links that leave docs/ go to the repository, which the site does not hold."""

from __future__ import annotations

import re
from pathlib import Path

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
