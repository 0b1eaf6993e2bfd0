"""Runs cases on several processes at once, and says what each rank found.

A case is a function ``case_<name>()`` of a module beside this one, which raises where something is
wrong. All of them run in the same processes, because starting these takes seconds.

    python processes.py RANK RANKS FOLDER MODULE.NAME ..     what each process runs
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
DIES = "dying_rank.outlive"  # always the last one: only rank 0 comes back


def run(
    cases: Sequence[str], folder: Path, device: str = "cpu", limit: int = 280, ranks: int = 2
) -> dict[str, str]:
    """What came of each case, MODULE.NAME: "", or what the ranks said. limit: seconds for all."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
        "TE_MX_RANKS_DEVICE": device,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path]),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(ranks), str(folder), *cases],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) for rank in range(ranks)
    ]  # fmt: skip
    said = []
    for process in started:
        try:
            said.append(process.communicate(timeout=limit)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            said.append(process.communicate()[0] + f"\nkilled after {limit} s")
    found = dict.fromkeys(cases, "")
    for rank in range(ranks):
        expected = [name for name in cases if not (rank and name == DIES)]
        path = folder / f"rank{rank}.json"
        told = json.loads(path.read_text()) if path.exists() else {}
        for name in expected:
            wrong = told.get(name, f"never ran:\n{said[rank][-3000:]}")
            found[name] += f"rank {rank}: {wrong}\n" if wrong else ""
    return found


def cases(*modules: str) -> list[str]:
    """All cases of modules."""
    return [
        f"{module}.{name[5:]}"
        for module in modules for name in vars(importlib.import_module(module))
        if name.startswith("case_")
    ]  # fmt: skip


def work(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    """Run the cases as one of the ranks, and write down what came of them."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = os.environ.get("TE_MX_RANKS_DEVICE", "cpu")
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank,
        world_size=ranks, timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    told = {}
    for case in names:
        module, _, name = case.partition(".")
        torch.manual_seed(0)
        if case == DIES:
            told[case] = importlib.import_module(module).outlive()
            (folder / f"rank{rank}.json").write_text(json.dumps(told))
            os._exit(0)
        try:
            getattr(importlib.import_module(module), f"case_{name}")()
            told[case] = ""
        except Exception:
            told[case] = traceback.format_exc()[-4000:]
        (folder / f"rank{rank}.json").write_text(json.dumps(told))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
