"""Runs every case of a module on several processes at once, and says what each rank found.

A case is a function ``case_<name>()`` that raises where something is wrong; its docstring is for
the reader. All cases run in one pair of processes, because starting one takes seconds.

    python two_ranks.py MODULE RANK WORLD FOLDER [NAME ..]     what each process runs
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

WORLD = 2
LIMIT = 240  # seconds for all cases of a module
HERE = Path(__file__).parent


def run(module: str, folder: Path, names: tuple[str, ...] = (), device: str = "cpu") -> dict:
    """What came of every case: "" or what each rank said, by name."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
        "TE_MX_RANKS_DEVICE": device,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path]),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, __file__, module, str(rank), str(WORLD), str(folder), *names],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) for rank in range(WORLD)
    ]  # fmt: skip
    said = []
    for process in started:
        try:
            said.append(process.communicate(timeout=LIMIT)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            said.append(process.communicate()[0] + f"\nkilled after {LIMIT} s")
    found: dict[str, str] = {}
    for rank in range(WORLD):
        path = folder / f"rank{rank}.json"
        told = json.loads(path.read_text()) if path.exists() else {}
        for name in names or cases(module):
            wrong = told.get(name, f"never ran:\n{said[rank][-3000:]}")
            found[name] = found.get(name, "") + (f"rank {rank}: {wrong}\n" if wrong else "")
    return found


def cases(module: str) -> list[str]:
    """The names of the cases of a module."""
    made = importlib.import_module(module)
    return [name[5:] for name in vars(made) if name.startswith("case_")]


def work(module: str, rank: int, world: int, folder: Path, names: list[str]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = os.environ.get("TE_MX_RANKS_DEVICE", "cpu")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank,
        world_size=world, timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    made, told = importlib.import_module(module), {}
    for name in names or cases(module):
        torch.manual_seed(0)
        try:
            getattr(made, f"case_{name}")()
            told[name] = ""
        except Exception:
            told[name] = traceback.format_exc()[-4000:]
        (folder / f"rank{rank}.json").write_text(json.dumps(told))
        dist.barrier()
        torch._dynamo.reset() if "torch._dynamo" in sys.modules else None
    dist.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
