"""Runs cases on several processes at once, and says what each rank found.

A case is a function ``case_<name>()`` of a module beside this one, which raises where something is
wrong. They run in the same processes until one fails, because starting these takes seconds.

    python processes.py RANK RANKS FOLDER MODULE.NAME ..     what each process runs
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
DIES = "dying_rank.outlive"  # always the last one: only rank 0 comes back
GRACE = 20.0  # seconds that other ranks have to end when one has failed


def run(
    cases: Sequence[str], folder: Path, device: str = "cpu", limit: int = 280, ranks: int = 2
) -> dict[str, str]:
    """What came of each case, MODULE.NAME: "", or what the ranks said. limit: seconds for all.

    A case that fails ends the processes, whose ranks may have lost step; the next ones run in new
    processes."""
    found, until = dict.fromkeys(cases, f"never ran: {limit} s were over"), time.monotonic() + limit
    left, at = list(cases), 0
    while left and time.monotonic() < until:
        here, at = folder / str(at), at + 1
        here.mkdir()
        told, said = _started(left, here, device, until, ranks)
        while left:
            name = left.pop(0)
            found[name] = "".join(
                f"rank {rank}: {wrong}\n"
                for rank in range(ranks if name != DIES else 1)
                if (wrong := told[rank].get(name, f"did not come back:\n{said[rank][-3000:]}"))
            )
            if found[name]:
                break
    return found


def _started(
    cases: list[str], folder: Path, device: str, until: float, ranks: int
) -> tuple[list[dict[str, str]], list[str]]:
    """What processes told of each case, and what they said, when all of them have ended."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
        "TE_MX_RANKS_DEVICE": device,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path]),
    }  # fmt: skip
    logs = [folder / f"rank{rank}.txt" for rank in range(ranks)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            command = [sys.executable, __file__, str(rank), str(ranks), str(folder), *cases]
            started.append(
                subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
            )
    failed = False
    while None in (codes := [process.poll() for process in started]):
        if not failed and any(codes):
            failed, until = True, min(until, time.monotonic() + GRACE)
        if time.monotonic() > until:
            for process in started:
                process.kill()
        time.sleep(0.02)
    paths = [folder / f"rank{rank}.json" for rank in range(ranks)]
    told = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    return told, [log.read_text(errors="replace") for log in logs]


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
    store, limit = dist.FileStore(f"{folder}/store", ranks), datetime.timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    outcomes = dist.PrefixStore("outcomes", store)
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
        # Not a collective, in which a rank that lost step would wait for the others.
        outcomes.set(f"{case} {rank}", "failed" if told[case] else "passed")
        keys = [f"{case} {one}" for one in range(ranks)]
        if told[case] or any(outcomes.get(key) == b"failed" for key in keys):
            sys.stdout.flush()
            os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
