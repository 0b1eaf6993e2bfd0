"""Every kernel may be met for the first time while a CUDA graph is captured.

One process a case, because a kernel is loaded once in a process; several at a time, because most of
the time of one is spent on starting.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import first_use
import pytest

SCRIPT = Path(first_use.__file__)
AT_ONCE = 8


@pytest.fixture(scope="module")
def outcomes():
    def run(case: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(SCRIPT), case], capture_output=True, text=True, timeout=300
        )

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(first_use.CASES, pool.map(run, first_use.CASES), strict=True))


@pytest.mark.parametrize("case", first_use.CASES)
def test_a_first_use_inside_a_capture(outcomes, case):
    made = outcomes[case]
    assert made.stdout.endswith(f"{case}: ok\n"), made.stdout + made.stderr
