"""Triton on this GPU, in processes of its own because TE_MX_BACKEND counts where te_mx is imported:
bytes, steps, modules, recipes, groups, and the contract tests. `make test-triton-gpu` shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAMILY = (
    "tests/backends/triton/on_gpu.py", "tests/backends/triton/above.py",
    "tests/contract/test_contract_kernels.py",
)  # fmt: skip
pytest.importorskip("triton")


def test_the_family():
    workers = max(1, min((os.cpu_count() or 1) - 1, 13))
    asked = "-q", "-n", str(workers), "--durations=10", "-k", "not cpu and not avx and not amx"
    made = subprocess.run(
        [sys.executable, "-m", "pytest", *asked, *FAMILY], cwd=ROOT, timeout=1500,
        env={**os.environ, "TE_MX_BACKEND": "triton"},
    )  # fmt: skip
    assert made.returncode == 0
