"""Triton's quantizers, fused steps and layers on this GPU: the tests of the interpreter, in
processes of their own because TE_MX_BACKEND counts where te_mx is imported, in parts because most
of the time is compiling. What is above them: CONTRIBUTING.md has the command."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "backends" / "triton" / "interpreted_quantize.py"
PARTS = {"bytes": 8, "nvfp4": 8, "random": 4, "norms": 3, "activations": 5, "layers": 5}
CASES = [f"{case}/{part}/{parts}" for case, parts in PARTS.items() for part in range(parts)]
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def outcomes():
    def run(case: str) -> subprocess.CompletedProcess[str]:
        asked = {**os.environ, "TRITON_INTERPRET": "0", "TE_MX_BACKEND": "triton"}
        return subprocess.run(
            [sys.executable, FILE, case], capture_output=True, text=True, timeout=600, env=asked
        )

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_as_in_the_interpreter(outcomes, case):
    assert outcomes[case].returncode == 0, outcomes[case].stderr[-3000:]
