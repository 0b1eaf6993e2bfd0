"""Runs cases on several processes at once, and says what each rank found.

A case is a function ``case_<name>()`` of a module beside this one, which raises where something is
wrong. They run in the same processes until one fails. Ranks are forked by a process that has
imported what they need, because that takes longer than most cases.

    python processes.py RANKS FOLDER LIMIT GRACE MODULE.NAME ..     what forks the ranks
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import signal
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
    """What came of each case, MODULE.NAME: "", or what the ranks said. limit: seconds for all."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
        "TE_MX_RANKS_DEVICE": device,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path]),
    }  # fmt: skip
    command = [sys.executable, __file__, str(ranks), str(folder), str(limit), str(GRACE), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    path = folder / "found.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    never = f"never ran: {limit} s were over" if done.returncode == 0 else done.stderr
    return {name: found.get(name, never) for name in cases}


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
    # A rank that fails and ends while another still connects breaks that one's init.
    outcomes.set(f"connected {rank}", "")
    outcomes.wait([f"connected {one}" for one in range(ranks)], limit)
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


def start(ranks: int, folder: Path, limit: float, grace: float, left: list[str]) -> None:
    """Write what came of each case. One that fails ends the ranks, which may have lost step; the
    next ones run in new ones."""
    if os.environ["TE_MX_RANKS_DEVICE"] == "cpu":  # CUDA works in no fork of who asked for it
        for name in left:
            importlib.import_module(name.partition(".")[0])
    found, at, until = {}, 0, time.monotonic() + limit
    while left and time.monotonic() < until:
        here, at = folder / str(at), at + 1
        here.mkdir()
        told, said = forked(left, here, until, grace, ranks)
        while left:
            name = left.pop(0)
            found[name] = "".join(
                f"rank {rank}: {wrong}\n"
                for rank in range(ranks if name != DIES else 1)
                if (wrong := told[rank].get(name, f"did not come back:\n{said[rank][-3000:]}"))
            )
            if found[name]:
                break
    (folder / "found.json").write_text(json.dumps(found))


def forked(
    cases: list[str], folder: Path, until: float, grace: float, ranks: int
) -> tuple[list[dict[str, str]], list[str]]:
    """What ranks told of each case, and what they said, when all of them have ended."""
    logs = [folder / f"rank{rank}.txt" for rank in range(ranks)]
    running = set()
    for rank, log in enumerate(logs):
        if not (child := os.fork()):
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            work(rank, ranks, folder, cases)
            sys.exit()
        running.add(child)
    failed = False
    while running:
        ended, status = os.waitpid(-1, os.WNOHANG)
        running.discard(ended)
        if status and not failed:
            failed, until = True, min(until, time.monotonic() + grace)
        if time.monotonic() > until:
            for child in running:
                os.kill(child, signal.SIGKILL)
        time.sleep(0 if ended else 0.02)
    paths = [log.with_suffix(".json") for log in logs]
    told = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    return told, [log.read_text(errors="replace") for log in logs]


if __name__ == "__main__":
    count, place, *limits = sys.argv[1:5]
    start(int(count), Path(place), *map(float, limits), sys.argv[5:])
