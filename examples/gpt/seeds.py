"""Several runs that differ in their seed alone, and their mean."""

import statistics
from collections.abc import Iterator
from dataclasses import replace

from gpt import train


def each(settings: train.Settings, count: int) -> Iterator[tuple[str, train.Settings]]:
    """(name of its files, settings) of `count` seeds from settings.seed on."""
    for seed in range(settings.seed, settings.seed + count):
        name = settings.mode if count == 1 else f"{settings.mode}-seed{seed}"
        yield name, replace(settings, seed=seed)


def mean(records: list[dict]) -> dict:
    """One record of runs of the same length: mean losses, the median speed, the highest memory.

    ``seeds`` has the validation loss of each.
    """
    first = records[0]
    by_seed = {seed: loss for r in records for seed, loss in r["seeds"].items()}
    if len(records) == 1:
        return first
    val = [
        (rows[0][0], statistics.fmean(loss for _, loss in rows)) for rows in _across(records, "val")
    ]
    return {
        **first,
        "seeds": by_seed,
        "losses": [statistics.fmean(losses) for losses in _across(records, "losses")],
        "val": val,
        "val_loss": statistics.fmean(by_seed.values()),
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in records),
        "step_seconds": [statistics.median(s) for s in _across(records, "step_seconds")],
        "train_seconds": sum(r["train_seconds"] for r in records),
        "memory_mb": {
            kind: max(r["memory_mb"][kind] for r in records) for kind in first["memory_mb"]
        },
    }


def _across(records: list[dict], key: str) -> Iterator[tuple]:
    return zip(*(r[key] for r in records), strict=True)
