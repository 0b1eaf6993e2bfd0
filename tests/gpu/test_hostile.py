"""The malformed calls of tests/hostile on CUDA tensors: refused as on the CPU, and nothing that ran
on the GPU failed. Every call is followed by a wait for the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "hostile"))

import run_calls
from public_calls import CALLS


@pytest.fixture(scope="module")
def complaints() -> dict[str, list[str]]:
    return run_calls.run_all("cuda")


@pytest.mark.parametrize("name", [call.name for call in CALLS])
def test_malformed_calls(name, complaints):
    assert complaints[name] == []
