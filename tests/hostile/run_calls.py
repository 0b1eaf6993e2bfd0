"""Runs the malformed calls, in processes of their own.

    python tests/hostile/run_calls.py cpu public_calls 17

runs those of a table from the 17th on and prints two JSON lines for each: before it [number, null],
after it [number, complaint]. So whoever reads the lines knows which call ended the process, and
starts another one behind it.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import resource
import sys
import warnings

import fresh

SECONDS = 30  # for one call
GIBIBYTES = 16  # for the process, on the CPU: a call that asks for more is not to take the machine


TABLE = "public_calls"


def all_cases(table: str = TABLE) -> list[tuple[str, str]]:
    """(callable, "argument: malformation") of every call."""
    return [
        (call.name, f"{argument}: {bad.label}" if bad else "the valid call")
        for call in importlib.import_module(table).CALLS
        for argument, bad in call.cases()
    ]


def run_all(device: str, table: str = TABLE) -> dict[str, list[str]]:
    """What is wrong with the outcomes, by callable."""
    cases = all_cases(table)
    found: dict[str, list[str]] = {name: [] for name, _ in cases}
    at = 0
    while at < len(cases):
        done = fresh.run_file(__file__, device, table, at, seconds=1200)
        said: str | None = ""
        for line in done.stdout.splitlines():
            at, said = json.loads(line)
            if said:
                found[cases[at][0]].append(f"{cases[at][1]}: {said}")
        if said is None or not done.stdout:
            name, case = cases[at]
            why = f"the process ended with {done.returncode}: {done.stderr[-500:]}"
            found[name].append(f"{case}: {why}")
        at += 1
    return found


def main(device: str, table: str, first: int) -> None:
    import torch
    from judge import complaint

    import te_mx

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (GIBIBYTES << 30, GIBIBYTES << 30))
    else:
        torch.ones(1, device=device)
    if te_mx.explain(m=64, n=64, k=64, device=device).kernel != "reference":
        warnings.simplefilter("error", te_mx.FallbackWarning)
        # But for formats and rules that only the reference has, and routed rows of any k on Hopper.
        only = ".*, not (mxfp|even|stoch)|.* runs moe_gemm .* k in multiples of 32"
        warnings.filterwarnings("ignore", only, te_mx.FallbackWarning)
    calls = importlib.import_module(table).CALLS
    cases = ((call, *case) for call in calls for case in call.cases())
    for at, (call, argument, bad) in itertools.islice(enumerate(cases), first, None):
        print(json.dumps([at, None]), flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        said = complaint(call, argument, bad, device)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps([at, said]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
