"""What a table makes of a choice: the envelope of each kernel is the truth, so a row counts only
where the kernel that it names takes the problem and knows the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import INVARIANT, Problem
from te_mx.dispatch.tuned.tables import DEFAULT, STEPS, lookup


class Tuning(NamedTuple):
    """The kernel that a table chooses, configured; None: the default runs. said: why, in words.
    steps: the op is left to the steps of other ops, where it need not have a kernel."""

    kernel: Kernel | None
    said: str
    steps: bool = False


def follow(problem: Problem, kernels: Sequence[Kernel]) -> Tuning:
    """What the tables say of a problem that these kernels are asked for."""
    found = lookup(problem) if problem.precision != INVARIANT else None
    if found is None:
        return Tuning(None, "not tuned: default")
    row, name = found
    table = f"tuned table {name}"
    if row.use == DEFAULT:
        return Tuning(None, f"{table}: the default, which nothing beat")
    if row.use == STEPS:
        return Tuning(None, f"{table}: the steps, one after the other", steps=True)
    kernel = next((one for one in kernels if one.name == row.use), None)
    if kernel is None:
        return Tuning(None, f"{table} names {row.use}, which this te_mx has not: default")
    reason = kernel.accepts(problem)
    if reason is not None:
        return Tuning(None, f"{table} names {row.use}, which {reason}: default")
    how = row.configuration
    if how and how not in kernel.configurations(problem._replace(split_k=True)):
        return Tuning(None, f"{table} names {row.use}, which has no configuration {how!r}: default")
    words = f"{table}: kernel {row.use}"
    if how:
        words += f", configuration {how}"
    if row.key.m != problem.m:
        words += f" (measured at {row.key.m} rows)"
    chosen = kernel.configured(how) if how else kernel
    usual = next(one for one in kernels if one.accepts(problem) is None)
    if chosen.sums(problem) != usual.sums(problem):
        words += "; its bits are not the default's"
    return Tuning(chosen, words)
