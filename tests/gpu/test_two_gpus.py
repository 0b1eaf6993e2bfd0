"""The cases of tests/ranks on two GPUs over NCCL: each rank's bits are those of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
import processes

MODULES = (
    "tensor_parallel_cases",
    "node_cases",
    "data_parallel_cases",
    "gathered_codes_cases",
    "group_cases",
    "checkpoint_cases",
    "combinations",
)
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CASES = processes.cases(*MODULES) if torch.cuda.device_count() > 1 else []


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run(CASES, tmp_path_factory.mktemp("gpus"), device="cuda")


@pytest.mark.parametrize("case", CASES)
def test_on_two_gpus(case, found):
    if found[case]:
        pytest.fail(found[case], pytrace=False)
