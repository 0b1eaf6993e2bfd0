"""Timing on a machine that other work may share: candidates take turns, ratios are per turn."""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count

Call = Callable[[int], object]  # the argument counts up, so that a call can rotate through its data


def _wall(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Clock:
    """How time is taken: `seconds(work)` runs work and says how long it took.

    `lead_in` calls go right before a timed batch, so that the queue of a device is never empty.
    """

    seconds: Callable[[Callable[[], None]], float]
    lead_in: int = 0


WALL = Clock(_wall)


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


def _repeat(call: Call, index: Iterator[int], times: int) -> None:
    for _ in range(times):
        call(next(index))


def beside(peer: str, name: str) -> str:
    """What `Times` calls the rounds of a peer that ran right before those of a call."""
    return f"{peer} before {name}"


def interleaved(
    calls: dict[str, Call], effort: Effort, warm_up: int = 3, clock: Clock = WALL,
    peers: Mapping[str, str] | None = None,
) -> Times:  # fmt: skip
    """Time the calls in turns, in a new order every round; those with a peer right behind it, as
    what takes longest is not the same from one part of a round to the next (`beside`)."""
    batches = {}
    for name, call in calls.items():
        for i in range(warm_up):
            call(i)
        once = clock.seconds(partial(call, 0))
        batches[name] = max(1, math.ceil(effort.min_batch_ms / 1e3 / max(once, 1e-7)))
    peers = peers or {}
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    rounds |= {beside(peer, name): [] for name, peer in peers.items()}
    indices = {name: count() for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle

    def timed(name: str) -> float:
        repeat = partial(_repeat, calls[name], indices[name])
        repeat(clock.lead_in)
        return clock.seconds(partial(repeat, batches[name])) / batches[name]

    began = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for turn in range(effort.max_rounds):
            if turn >= effort.min_rounds and time.perf_counter() - began > effort.seconds:
                break
            shuffle(order)
            for name in order:
                if name in peers:
                    rounds[beside(peers[name], name)].append(timed(peers[name]))
                rounds[name].append(timed(name))
    finally:
        gc.enable()
    return Times(rounds)
