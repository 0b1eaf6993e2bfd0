"""Timing on a machine that other work may share: candidates take turns, ratios are per turn."""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

Call = Callable[[int], object]  # the argument counts up, so that a call can rotate through its data


@dataclass(frozen=True)
class Effort:
    """How long to measure: `min_rounds`, then up to `max_rounds` while `seconds` are left."""

    seconds: float = 6.0
    min_rounds: int = 5
    max_rounds: int = 41
    min_batch_ms: float = 2.0  # shorter calls are timed in batches of this length

    @classmethod
    def quick(cls) -> "Effort":
        return cls(seconds=0.1, min_rounds=3, max_rounds=3, min_batch_ms=0.2)


@dataclass(frozen=True)
class Times:
    """Seconds a call of every candidate, one entry a round."""

    rounds: dict[str, list[float]]

    def seconds(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def best(self, name: str) -> float:
        """The fastest round: for limits, which other work can only hide."""
        return min(self.rounds[name])

    def ratio(self, peer: str, ours: str) -> float:
        """How many times faster ours is: the median over rounds of time(peer) / time(ours)."""
        pairs = zip(self.rounds[peer], self.rounds[ours], strict=True)
        return statistics.median(p / o for p, o in pairs)

    def difference(self, ours: str, peer: str) -> float:
        """Seconds that ours takes longer: the median over rounds."""
        pairs = zip(self.rounds[peer], self.rounds[ours], strict=True)
        return statistics.median(o - p for p, o in pairs)


def interleaved(calls: dict[str, Call], effort: Effort, warm_up: int = 3) -> Times:
    """Time the calls in turns, in a new order every round."""
    batches = {}
    for name, call in calls.items():
        for i in range(warm_up):
            call(i)
        start = time.perf_counter()
        call(0)
        once = time.perf_counter() - start
        batches[name] = max(1, math.ceil(effort.min_batch_ms / 1e3 / max(once, 1e-7)))
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    indices = {name: count() for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    began = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for turn in range(effort.max_rounds):
            if turn >= effort.min_rounds and time.perf_counter() - began > effort.seconds:
                break
            shuffle(order)
            for name in order:
                call, index, batch = calls[name], indices[name], batches[name]
                start = time.perf_counter()
                for _ in range(batch):
                    call(next(index))
                rounds[name].append((time.perf_counter() - start) / batch)
    finally:
        gc.enable()
    return Times(rounds)
