"""Triton's quantizers, fused steps and layers on this GPU: the tests of the interpreter, in parts
that processes share because most of the time is compiling. `make test-triton-gpu`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import interpreted_quantize

PARTS = {"bytes": 24, "nvfp4": 12, "random": 8, "norms": 6, "activations": 12, "layers": 5,
         "units": 9, "many": 24}  # fmt: skip
CASES = [f"{case}/{part}/{parts}" for case, parts in PARTS.items() for part in range(parts)]


@pytest.mark.parametrize("case", CASES)
def test_as_in_the_interpreter(case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interpreted_quantize.run_case(case)
