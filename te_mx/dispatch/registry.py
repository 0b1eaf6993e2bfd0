"""The kernels that there are, by op, and the choice among them: the only place that chooses.

A kernel is registered once, in the order of preference of its op. The first one that accepts a
problem runs it, unless a table of measured choices (tuned/) names another one that accepts it too.
`pick` costs a look-up by what envelopes look at; `explain` walks the same list and keeps the
reasons.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.dispatch.problem import (
    FEW_ROWS,
    MOST,
    STREAM_ROWS,
    Problem,
    place_of,
    whole_vectors,
)
from te_mx.dispatch.tuned import tables
from te_mx.dispatch.tuned.follow import Tuning, follow
from te_mx.dispatch.tuned.table import MOST_ROWS
from te_mx.layouts.operand import Operand, Stack

# (lhs, rhs, out) -> whether native code took it
PreparedGemm = Callable[[Operand, Operand, Tensor], bool]


class Wants(NamedTuple):
    """Layouts that a kernel reads best: of both sides as rowwise copies, and as columnwise ones."""

    row: str = "rows"
    col: str = "cols"


class Kernel:
    """One way to run an op. Subclasses give `accepts` and `run`.

    op, name: what it runs, and what te_mx.explain and te_mx.audit call it.
    rank: kernels of an op are asked in the order of their ranks.
    configuration: one of `configurations`; "": the kernel chooses, by its cost model if it has one.
    multiplies: by itself; False: by the kernel that is chosen for the GEMM.
    """

    op: str
    name: str
    rank: int = 0
    configuration: str = ""
    multiplies: bool = True

    def accepts(self, problem: Problem) -> str | None:
        """None, or the reason why this kernel does not run the problem: its envelope."""
        raise NotImplementedError

    def wants(self, problem: Problem) -> Wants:
        """The layouts that the operands of the problem should lie in, so that nothing is copied."""
        return Wants()

    def sized(self, problem: Problem) -> bool:
        """Whether `accepts` looks at sizes that `pick` does not keep apart otherwise: the answer is
        then kept under m, n and k."""
        return False

    def prepares(self, m: int, n: int, k: int) -> bool:
        """Of a GEMM: whether operands that stand still are worth `prepare` for these sizes."""
        return m > STREAM_ROWS

    def note(self, problem: Problem) -> str:
        """What te_mx.explain adds, of a problem that this kernel runs."""
        return ""

    def parts(self, problem: Problem) -> int:
        """Into how many parts k is cut, where that is allowed."""
        return 1

    def configurations(self, problem: Problem) -> tuple[str, ...]:
        """The ways to run a problem that a table may choose between, in words."""
        return ()

    def configured(self, configuration: str) -> Kernel:
        """This kernel, which runs in one of these ways and no other."""
        made = copy.copy(self)
        made.configuration = configuration
        return made

    def sums(self, problem: Problem) -> str:
        """A word for the order in which this kernel, as it is configured, adds up and rounds the
        sums of a problem. Kernels and configurations of an op that say the same give a row of the
        result the same bits; so do problems that differ in m alone, whatever rows are beside it.
        Here: those of no other kernel, and of no other m."""
        return f"{self.name}, {self.configuration}, {problem.m} rows"

    def prepare(self, operand: Operand, side: str, problem: Problem) -> Operand:
        """An operand that stands still ("lhs" or "rhs" of a GEMM) in the form that this kernel
        reads without work; as it is where there is nothing to gain."""
        return operand

    def prepare_stack(self, stack: Stack, problem: Problem) -> Stack:
        """The same of the weights of all groups."""
        return stack

    def prepared(self, problem: Problem) -> PreparedGemm | None:
        """The call of a GEMM without an epilogue on operands that `prepare` made, of these sizes;
        None where there is nothing to prepare."""
        return None

    def once(self, problem: Problem) -> Callable[..., Any] | None:
        """The call of a problem, with all that its sizes say made before; None where `run` does as
        well. Of a GEMM as `prepared`, of operands that lie as the problem says. Of a quantizer: the
        operand of x, rowwise alone, in memory for codes and scales of any shape and dtype if a pair
        is given. Of values: those of an operand, contiguous, in a given memory too. None from a
        call where native code does not take it."""
        return None

    def run_two(self, first: Any, second: Any) -> tuple[Any, Any] | None:
        """What `run` makes of either call, both at the same time; None where it cannot."""
        return None

    def run_joined(self, parts: Sequence[Tensor], row: str, col: str, rule: str) -> Any:
        """Of a quantizer: matrices as one, their rows behind each other, read where they lie; None
        where they must be joined first."""
        return None

    run: Callable[..., Any]


_kernels: dict[str, list[Kernel]] = {}
_chosen: dict[tuple[Any, ...], Any] = {}  # kernels, or dicts of them by sizes
_by_groups: dict[Problem, Kernel] = {}
forms_known: dict[tuple[Any, ...], Any] = {}  # what kernels want, of dispatch/forms.py
_derived: dict[tuple[Any, ...], Any] = {}
_MOST_DERIVED = 4096
_MOST_SIZES = 1 << 14


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to its op."""
    listed = _kernels.setdefault(kernel.op, [])
    if any(other.name == kernel.name for other in listed):
        raise ValueError(f"op {kernel.op!r} has a kernel {kernel.name!r} already")
    listed.append(kernel)
    listed.sort(key=lambda one: one.rank)
    forget()
    return kernel


def kernels(op: str) -> tuple[Kernel, ...]:
    """The kernels of an op in order of preference."""
    return tuple(_kernels.get(op, ()))


def ops() -> tuple[str, ...]:
    """Names of the ops that have kernels."""
    return tuple(_kernels)


def forget() -> None:
    """Choose anew: a kernel came, or a level changed its meaning."""
    _chosen.clear()
    _by_groups.clear()
    forms_known.clear()
    _derived.clear()


def pick(
    op: str, device: torch.device, lhs: str, rhs: str, sizes: tuple[int, int, int],
    dtype: torch.dtype = torch.float32, precision: str = "adaptive", ends: str = "",
    spread: int = 8, rule: str = "rceil",
) -> Kernel:  # fmt: skip
    """The kernel of a problem (see Problem for the words; sizes are m, n, k). The reference accepts
    everything, so there is one. The hot path: one look-up, two where sizes decide.
    """
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
        problem = Problem(op, place, lhs, rhs, m, n, k, 0, precision, ends, dtype, spread, rule)
        kernel = choose(problem)[0]
        if device.type != "cuda" or device.index is not None:
            _keep(key, problem, kernel)
    return kernel


def _keep(key: tuple[Any, ...], problem: Problem, kernel: Kernel) -> None:
    sizes = any(one.sized(problem) for one in _kernels[problem.op])
    if not (sizes or tables.has_rows(problem)):
        _chosen[key] = kernel
        return
    sized = _chosen.setdefault(key, {})
    if len(sized) >= _MOST_SIZES:
        sized.clear()
    sized[problem.n, problem.k, min(problem.m, MOST_ROWS + 1)] = kernel


def pick_grouped(problem: Problem) -> Kernel:
    """As `pick`, of groups whose number tables look at."""
    kernel = _by_groups.get(problem)
    if kernel is None:
        kernel = choose(problem)[0]
        if len(_by_groups) >= _MOST_SIZES:
            _by_groups.clear()
        _by_groups[problem] = kernel
    return kernel


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
    accepting = (one for one in _kernels.get(problem.op, ()) if one.accepts(problem) is None)
    return next(accepting, None)


def derived() -> dict[tuple[Any, ...], Any]:
    """What callers made of answers of the registry, under their own keys; forgotten with them."""
    return _derived


def derive(key: tuple[Any, ...], made: Any) -> Any:
    """Keep what a caller made; of keys that tell sizes there may be many, and all go then."""
    if len(_derived) > _MOST_DERIVED:
        _derived.clear()
    _derived[key] = made
    return made


def tuning(problem: Problem) -> Tuning:
    """What tables of measured choices say of a problem."""
    return follow(problem, _kernels.get(problem.op, ()))


def choose(problem: Problem) -> tuple[Kernel, list[tuple[str, str]]]:
    """(the kernel that runs a problem, [(name, reason), ...] of those that decline it and come
    before the default)."""
    kernel, declined = default(problem)
    return tuning(problem).kernel or kernel, declined


def default(problem: Problem) -> tuple[Kernel, list[tuple[str, str]]]:
    """The same without tables: the first kernel that accepts the problem."""
    declined: list[tuple[str, str]] = []
    for kernel in _kernels[problem.op]:
        reason = kernel.accepts(problem)
        if reason is None:
            return kernel, declined
        declined.append((kernel.name, reason))
    raise LookupError(f"no kernel of {problem.op!r} accepts {problem}")
