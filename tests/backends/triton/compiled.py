"""Every kernel compiled for every target, in processes of their own, which do not interpret:
`make test-triton`."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh import run_file


@pytest.mark.parametrize("some", ["sm_80 sm_89 sm_90", "sm_100 sm_103 sm_120", "gfx942 gfx950"])
def test_targets(some):
    """They multiply by what docs/devices.md says, in the shared memory there is, and tensor cores
    read what was loaded where it lies."""
    file = Path(__file__).with_name("targets.py")
    made = run_file(file, *some.split(), TRITON_INTERPRET="0")
    assert made.returncode == 0, made.stderr[-3000:] + made.stdout
