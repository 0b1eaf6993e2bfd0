"""Two processes against one, bit for bit: the cases of the modules beside this one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import two_ranks

CASES = two_ranks.cases(
    "tensor_parallel_cases",
    "data_parallel_cases",
    "group_cases",
    "checkpoint_cases",
    "combinations",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return two_ranks.run(CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case, found):
    if found[case]:
        pytest.fail(found[case], pytrace=False)


DIES = """
import datetime, os, sys, torch, torch.distributed as dist, te_mx
from torch.distributed.fsdp import fully_shard
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=20),
)
layer = fully_shard(te_mx.Linear(64, 64))
te_mx.distributed.quantized_all_gather(layer)
with te_mx.autocast():
    layer(torch.randn(8, 64)).sum().backward()
    if rank == 1:
        os._exit(9)
    layer(torch.randn(8, 64))
"""


def test_a_rank_that_dies(tmp_path):
    """The other one ends with an error that says so, not in silence or forever."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DIES, str(rank), str(tmp_path / "store")], env=env,
            stderr=subprocess.PIPE, text=True,
        ) for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[1] for process in started]
    assert started[1].returncode == 9
    assert started[0].returncode == 1
    last = said[0].strip().splitlines()[-1]
    assert "RuntimeError" in last or "DistBackendError" in last, last
    assert "Connection" in last or "closed by peer" in last, last
