"""docs/modes.md is what the code does, and has no hole."""

from __future__ import annotations

import pytest
from native_modes import MODES, PAGE, row

ROWS = {line.split(" | ")[0]: line for line in PAGE.read_text().splitlines() if line[:2] == "| "}


@pytest.mark.parametrize("mode", list(MODES))
def test_a_row_is_what_the_code_does(mode, threads):
    if mode.startswith("experts"):
        pytest.importorskip("transformers", minversion="5.0")
    threads(1)
    assert ROWS[f"| {mode}"] == row(mode), "run tests/emulated/native_modes.py"


def test_nothing_runs_on_the_reference():
    assert len(ROWS) == len(MODES) + 1
    assert not [line for line in ROWS.values() if "reference" in line]
