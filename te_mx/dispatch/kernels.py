"""What a kernel is, the kernels that there are, by op in the order of preference, and the one cache
of what follows from a choice: plans, and what callers derive under keys of their own."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from te_mx.dispatch.problem import ENCODED, INVARIANT, STREAM_ROWS, Problem
from te_mx.layouts.operand import Operand, Stack

Plan = Callable[..., Any]

_derived: dict[Any, Any] = {}
_MOST_DERIVED = 4096


def derived() -> dict[Any, Any]:
    """What follows from the kernels, tables and levels of now, by key; forgotten with them."""
    return _derived


def derive(key: Any, made: Any) -> Any:
    """Keep what a caller made; of keys that tell sizes there may be many, and all go then."""
    if len(_derived) > _MOST_DERIVED:
        _derived.clear()
    _derived[key] = made
    return made


class PreferredLayouts(NamedTuple):
    """Layouts that a kernel reads best: of both sides as rowwise copies, and as columnwise ones;
    right_col, right_row: of right operands, if not so. Backward may have to wait for the former."""

    row: str = "rows"
    col: str = "cols"
    right_col: str = ""
    right_row: str = ""


class Kernel:
    """One way to run an op. Subclasses give `accepts`, and `run` or, where something can be made
    once for all calls of a problem, `make_plan`.

    op, name: what it runs, and what te_mx.explain and te_mx.audit call it.
    rank: kernels of an op are asked in the order of their ranks.
    configuration: one of `configurations`; "": the kernel chooses, by its cost model if it has one.
    invariant: whether the bits of a row of the product depend on that row of lhs and on rhs alone.
    encodes: whether operands are encoded anew, which rounds.
    multiplies: by itself; False: by the kernel that is chosen for the GEMM.
    planner: makes a plan of a problem, where nothing else decides on it; None: plans are `run`."""

    op: str
    name: str
    rank: int = 0
    configuration: str = ""
    invariant: bool = False
    encodes: bool = False
    multiplies: bool = True
    planner: type | None = None

    def accepts(self, problem: Problem) -> str | None:
        """None, or the reason why this kernel does not run the problem: its envelope."""
        raise NotImplementedError

    def declines(self, problem: Problem) -> str | None:
        """The same, with what the precision of the problem asks of any kernel."""
        reason = self.accepts(problem)
        if reason is None and problem.precision == INVARIANT and not self.invariant:
            reason = "may give a row other bits beside other rows; this asks for 'invariant'"
        if reason is None and problem.precision == ENCODED and not self.encodes:
            reason = "reads codes as they are; this asks for 'fp8'"
        return reason

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        """The layouts that the operands of the problem should lie in, so that nothing is copied."""
        return PreferredLayouts()

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

    def configured(self, configuration: str) -> "Kernel":
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

    def plan(self, problem: Any) -> Any:
        """What runs calls of a problem (the words of its op's calls say of what), made once and
        kept until kernels, tables or the level change."""
        key = self, problem
        found = _derived.get(key)
        if found is None:
            found = derive(key, self.make_plan(problem))
        return found

    def make_plan(self, problem: Any) -> Any:
        """A plan, with all that the problem says made before. None from a call of it, as from
        `run`, where native code does not take it."""
        return self.run if self.planner is None else self.planner(problem)

    run: Callable[..., Any]


_kernels: dict[str, list[Kernel]] = {}


def add(kernel: Kernel) -> None:
    """Add a kernel to its op. Raises ValueError if the op has one of its name."""
    listed = _kernels.setdefault(kernel.op, [])
    if any(other.name == kernel.name for other in listed):
        raise ValueError(f"op {kernel.op!r} has a kernel {kernel.name!r} already")
    listed.append(kernel)
    listed.sort(key=lambda one: one.rank)


def kernels(op: str) -> tuple[Kernel, ...]:
    """The kernels of an op in order of preference."""
    return tuple(_kernels.get(op, ()))


def ops() -> tuple[str, ...]:
    """Names of the ops that have kernels."""
    return tuple(_kernels)
