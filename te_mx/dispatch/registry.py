"""The choice among the kernels that there are: the only place that chooses.

A kernel is registered once, in the order of preference of its op. The first one that accepts a
problem runs it, unless a table of measured choices (tuned/) names another one that accepts it too.
`pick` costs a look-up by what envelopes look at, `planned` one by all that a plan depends on;
`explain` walks the same list and keeps the reasons. What was chosen and all plans are forgotten in
one place, `forget`."""

from typing import Any

import torch

from te_mx.dispatch.kernels import Kernel, Plan, add, derive, derived, kernels
from te_mx.dispatch.problem import FEW_ROWS, MOST, STREAM_ROWS, Problem, place_of, whole_vectors
from te_mx.dispatch.tuned import tables
from te_mx.dispatch.tuned.tables import MOST_ROWS, Tuning, follow

_chosen: dict[tuple[Any, ...], Any] = {}  # kernels, or dicts of them by sizes
_known = derived()
_MOST_SIZES = 1 << 14


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to its op; all choices are made anew."""
    add(kernel)
    forget()
    return kernel


def forget() -> None:
    """Choose and plan anew: a kernel, a table, a native module or a level is another one."""
    _chosen.clear()
    _known.clear()


def pick(
    op: str, device: torch.device, lhs: str, rhs: str, sizes: tuple[int, int, int],
    dtype: torch.dtype = torch.float32, precision: str = "adaptive", ends: str = "",
    spread: int = 8, rule: str = "rceil",
) -> Kernel:  # fmt: skip
    """The kernel of a problem (see Problem for the words; sizes are m, n, k). The reference accepts
    everything, so there is one. The hot path: one look-up, two where sizes decide."""
    m, n, k = sizes
    # Sizes as far as envelopes look at them: nothing, few rows (of whole vectors or not), many, too
    # many to count.
    size = 1 if m <= STREAM_ROWS else 2
    if m <= FEW_ROWS and whole_vectors(k):
        size += 3
    if m == 0 or n == 0 or k == 0:
        size = 0
    elif m > MOST or n > MOST or k > MOST:
        size = 3
    key = (op, device, lhs, rhs, size, precision, ends, dtype, rule)
    kernel = _chosen.get(key)
    if type(kernel) is dict:  # by the sizes that tables or kernels of the op look at
        kernel = kernel.get((n, k, m if m <= MOST_ROWS else MOST_ROWS + 1))
    if kernel is None:
        place = place_of(device)
        groups = int(ends != "")  # no kernel of these ops asks how many there are
        problem = Problem(
            op, place, lhs, rhs, m, n, k, groups, precision, ends, dtype, spread, rule
        )  # fmt: skip
        kernel = choose(problem)[0]
        if device.type != "cuda" or device.index is not None:
            _keep(key, problem, kernel)
    return kernel


def _keep(key: tuple[Any, ...], problem: Problem, kernel: Kernel) -> None:
    sizes = any(one.sized(problem) for one in kernels(problem.op))
    if not (sizes or tables.has_rows(problem)):
        _chosen[key] = kernel
        return
    sized = _chosen.setdefault(key, {})
    if len(sized) >= _MOST_SIZES:
        sized.clear()
    sized[problem.n, problem.k, min(problem.m, MOST_ROWS + 1)] = kernel


def planned(
    op: str, device: torch.device, lhs: str, rhs: str, sizes: tuple[int, int, int],
    dtype: torch.dtype = torch.float32, precision: str = "adaptive", spread: int = 8,
    split_k: bool = False, rule: str = "rceil",
) -> tuple[Kernel, Plan]:  # fmt: skip
    """The kernel of a problem (words as of `pick`) and its plan. The hot path: one look-up."""
    key = op, device, lhs, rhs, sizes, dtype, precision, spread, split_k, rule
    found = _known.get(key)
    if found is None:
        kernel = pick(op, device, lhs, rhs, sizes, dtype, precision, "", spread, rule)
        problem = Problem(
            op, place_of(device), lhs, rhs, *sizes, 0, precision, "", dtype, spread, rule,
            split_k=split_k,
        )  # fmt: skip
        found = kernel, kernel.make_plan(problem)
        if device.type != "cuda" or device.index is not None:
            derive(key, found)
    return found


def planned_problem(problem: Problem) -> tuple[Kernel, Plan]:
    """As `planned`, of a problem, perhaps of groups, whose number tables look at."""
    found = _known.get(problem)
    if found is None:
        if problem.groups and tables.has_rows(problem):
            kernel = choose(problem)[0]
        else:
            op, place, lhs, rhs, m, n, k, _, precision, ends, dtype, spread, rule, *_ = problem
            kind, index, _ = place
            device = torch.device(kind, index) if index >= 0 else torch.device(kind)
            kernel = pick(op, device, lhs, rhs, (m, n, k), dtype, precision, ends, spread, rule)
        found = derive(problem, (kernel, kernel.make_plan(problem)))
    return found


def find(problem: Problem) -> Kernel | None:
    """The kernel of an op that need not have one, or None: none accepts the problem, or a table
    says that the steps are faster. Callers keep the answer in `derived`, under the sizes."""
    kernel = default_of(problem)
    if kernel is None:
        return None
    made = tuning(problem)
    return None if made.steps else made.kernel or kernel


def pick_problem(p: Problem) -> Kernel:
    """As `pick`, of a problem."""
    return choose(p)[0]


def default_of(problem: Problem) -> Kernel | None:
    """The first kernel that accepts a problem, whatever tables say, or None."""
    accepting = (one for one in kernels(problem.op) if one.declines(problem) is None)
    return next(accepting, None)


def tuning(problem: Problem) -> Tuning:
    """What tables of measured choices say of a problem."""
    return follow(problem, kernels(problem.op))


def choose(problem: Problem) -> tuple[Kernel, list[tuple[str, str]]]:
    """(the kernel of a problem, [(name, reason), ...] of those before it that decline)."""
    kernel, declined = default(problem)
    return tuning(problem).kernel or kernel, declined


def default(problem: Problem) -> tuple[Kernel, list[tuple[str, str]]]:
    """The same without tables: the first kernel that accepts the problem."""
    declined: list[tuple[str, str]] = []
    for kernel in kernels(problem.op):
        reason = kernel.declines(problem)
        if reason is None:
            return kernel, declined
        declined.append((kernel.name, reason))
    raise LookupError(f"no kernel of {problem.op!r} accepts {problem}")
