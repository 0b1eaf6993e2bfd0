"""Times of a few calls that do the same, on weights that no cache holds.

Calls take turns, in a new order every round, so that whatever else the machine does meets all of
them. On CUDA each is a graph of one call for each set of weights; on a CPU they are timed in a row.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Call = Callable[[int], Any]  # given the number of the set of weights that it reads
ROUNDS = 7
_LEAST_SECONDS = {"cuda": 1e-3, "cpu": 4e-3}  # of a round of one call
_MOST_SETS = 512


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
    calls: dict[str, Call], sets: int, device: torch.device, rounds: int = ROUNDS
) -> dict[str, float]:
    """The median time of each call."""
    repeat = {
        name: _graph(call, sets, device) if device.type == "cuda" else _loop(call, sets)
        for name, call in calls.items()
    }
    clock = _event_seconds if device.type == "cuda" else _wall_seconds
    times, found = {}, {name: [] for name in calls}  # type: dict[str, int], dict[str, list[float]]
    for name, run in repeat.items():
        run()
        once = clock(run)
        times[name] = max(1, round(_LEAST_SECONDS[device.type] / max(once, 1e-9)))
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            found[name].append(clock(repeat[name], times[name]) / times[name] / sets)
    return {name: 1e6 * statistics.median(seconds) for name, seconds in found.items()}


def _loop(call: Call, sets: int) -> Callable[[], None]:
    def run() -> None:
        for i in range(sets):
            call(i)

    return run


def _wall_seconds(run: Callable[[], None], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()
    return time.perf_counter() - start


def _graph(call: Call, sets: int, device: torch.device) -> Callable[[], None]:
    """A CUDA graph of the call on every set of weights, one after the other."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call(0)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(sets):
                call(i)
    return graph.replay


def _event_seconds(run: Callable[[], None], times: int = 1) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
