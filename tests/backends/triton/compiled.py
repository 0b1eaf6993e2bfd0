"""What takes minutes, in processes of its own: every kernel compiled for every target, which does
not interpret, and products of every pair of formats, interpreted. `make test-triton`."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh import run_file


@pytest.mark.parametrize(
    "some", ["sm_80 sm_89 sm_90", "sm_100 sm_103 sm_120", "gfx942 gfx950 gfx1250"]
)
def test_targets(some):
    """They multiply by what docs/devices.md says, in the shared memory there is, and tensor cores
    read what was loaded where it lies."""
    file = Path(__file__).with_name("targets.py")
    made = run_file(file, *some.split(), seconds=900, TRITON_INTERPRET="0")
    assert made.returncode == 0, made.stderr[-3000:] + made.stdout


@pytest.mark.parametrize("case", ["products", "groups"])
def test_interpreted(case):
    made = run_file(Path(__file__).with_name("interpreted.py"), case, seconds=900)
    assert made.returncode == 0, made.stderr[-3000:]
