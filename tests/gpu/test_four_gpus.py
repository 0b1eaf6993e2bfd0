"""The cases of tests/ranks for four processes on four GPUs over NCCL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
import processes

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
CASES = (
    processes.cases("meshes_cases", "resharding_cases", "refused_cases")
    if torch.cuda.device_count() >= 4 else []
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run(CASES, tmp_path_factory.mktemp("gpus"), device="cuda", ranks=4)


@pytest.mark.parametrize("case", CASES)
def test_on_four_gpus(case, found):
    if found[case]:
        pytest.fail(found[case], pytrace=False)
