"""Every kernel may be met for the first time while a CUDA graph is captured.

One process a case, because a kernel is loaded once in a process; several at a time, because most of
the time of one is spent on starting.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import first_use
import pytest

SCRIPT = Path(first_use.__file__)
AT_ONCE = 8


def run(case: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), case], capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def outcome() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """How the process of a case ended. All are run at the first question, but where pytest itself
    runs tests side by side: there each of its processes would run them all."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return run
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(first_use.CASES, pool.map(run, first_use.CASES), strict=True)).__getitem__


@pytest.mark.parametrize("case", first_use.CASES)
def test_a_first_use_inside_a_capture(outcome, case):
    made = outcome(case)
    assert made.stdout.endswith(f"{case}: ok\n"), made.stdout + made.stderr
