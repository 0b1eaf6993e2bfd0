"""Times of a few trials that do the same, on weights that no cache holds.

Trials take turns, in a new order every round, so that whatever else the machine does meets all of
them. On CUDA each is a graph of one call for each set of weights; on a CPU they are timed in a row.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Trial(NamedTuple):
    """prepare: makes its choices those of the process. call: is given the number of the set of
    weights that it reads."""

    prepare: Callable[[], None]
    call: Callable[[int], Any]


ROUNDS = 7
_LEAST_SECONDS = {"cuda": 1e-3, "cpu": 4e-3}  # of a round of one call
_MOST_SETS = 512
_HOPELESS = 3.0


def cache_bytes(device: torch.device) -> int:
    """The size of the last cache of a device: 32 MB of a CPU that does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 0)
        if unit and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=32 << 20)


def sets_for(nbytes: int, device: torch.device) -> int:
    """How many copies of weights of so many bytes to take turns with: twice the last cache."""
    return max(2, min(_MOST_SETS, -(-2 * cache_bytes(device) // max(nbytes, 1))))


def microseconds(
    trials: dict[str, Trial], sets: int, device: torch.device, rounds: int = ROUNDS
) -> dict[str, float]:
    """The median time of a call of each; of one that takes several times as long as the fastest,
    the only one."""
    make = _graph if device.type == "cuda" else _loop
    repeat = {name: make(trial, sets, device) for name, trial in trials.items()}
    clock = _event_seconds if device.type == "cuda" else _wall_seconds
    once = {}
    for name, (ready, run) in repeat.items():
        ready()
        once[name] = max(clock(run), 1e-9)
    least = _LEAST_SECONDS[device.type]
    times = {name: max(1, round(least / seconds)) for name, seconds in once.items()}
    found = {name: [seconds / sets] for name, seconds in once.items()}
    order = [name for name in trials if once[name] < _HOPELESS * min(once.values())]
    for name in order:
        found[name].clear()
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            ready, run = repeat[name]
            ready()
            found[name].append(clock(run, times[name]) / times[name] / sets)
    return {name: 1e6 * statistics.median(seconds) for name, seconds in found.items()}


# What goes before a timed run, and the run: a call on every set.
_Repeat = tuple[Callable[[], Any], Callable[[], None]]


def _loop(trial: Trial, sets: int, device: torch.device) -> _Repeat:
    def ready() -> None:
        trial.prepare()
        trial.call(0)

    def run() -> None:
        for i in range(sets):
            trial.call(i)

    return ready, run


def _wall_seconds(run: Callable[[], None], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    return time.perf_counter() - start


def _graph(trial: Trial, sets: int, device: torch.device) -> _Repeat:
    """A CUDA graph of the call on every set of weights, one after the other; a replay goes before
    timed ones, so that the GPU has work while they are launched."""
    trial.prepare()
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in (0, 1, *range(sets)):  # twice some, and all that a layer makes at its first
                trial.call(i)
        torch.cuda.current_stream().wait_stream(side)
        gc.collect()  # a graph that is destroyed during a capture ends it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(sets):
                trial.call(i)
    return graph.replay, graph.replay


def _event_seconds(run: Callable[[], None], times: int = 1) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
