"""Why a kernel runs a problem and others do not: the registry's walk, with the reasons."""

from dataclasses import dataclass

from te_mx.dispatch.kernels import kernels
from te_mx.dispatch.problem import Place, Problem
from te_mx.dispatch.registry import choose, tuning
from te_mx.dispatch.run import REFERENCE, ZERO_SIZE, why_refused


@dataclass(frozen=True)
class Explanation:
    """The kernel of a problem, the parts that it cuts k into, why each other one does not run it,
    and what tables of measured choices say. Printable."""

    problem: str
    kernel: str
    declined: tuple[tuple[str, str], ...]
    note: str = ""
    parts: int = 1
    tuned: str = ""

    def __str__(self) -> str:
        lines = [f"{self.problem}: {self.kernel}"]
        width = max((len(name) for name, _ in self.declined), default=0)
        lines += [f"  {name:<{width}}  {why}" for name, why in self.declined]
        lines += [f"  note: {self.note}"] if self.note else []
        return "\n".join([*lines, f"  {self.tuned}"] if self.tuned else lines)


def explain_problem(
    problem: Problem, text: str, notes: tuple[str, ...] = (), split_k: bool = False
) -> Explanation:
    """The explanation of one problem, described as `text`."""
    chosen = choose(problem)[0]
    others = [kernel for kernel in kernels(problem.op) if kernel.name not in PLACEHOLDERS]
    if chosen.name == ZERO_SIZE:
        why = "there is nothing to multiply: the epilogue of zeros"
        return Explanation(text, chosen.name, tuple((other.name, why) for other in others))
    said = tuning(problem)
    first = "is the choice of a table" if said.kernel is not None else "comes first"
    declined = [
        (other.name, other.declines(problem) or f"takes it too; {chosen.name} {first}")
        for other in others
        if other.name != chosen.name
    ]
    if chosen.name != REFERENCE:
        declined.append((REFERENCE, "only runs what no native kernel takes"))
    elif why_refused(problem):
        notes += (f"te_mx refuses it at precision {problem.precision!r}, which no kernel has",)
    parts = chosen.parts(problem) if split_k else 1
    cut = f"k is cut into {parts} parts, added up in order (split_k)" if parts > 1 else ""
    note = "; ".join(filter(None, [*notes, chosen.note(problem), cut]))
    return Explanation(text, chosen.name, tuple(declined), note, parts, said.said)


PLACEHOLDERS = (REFERENCE, ZERO_SIZE)


def why_no_product(lhs: str, rhs: str) -> str | None:
    """None, or the reasons why not even the reference multiplies two formats."""
    problem = Problem("gemm", Place("cpu"), f"{lhs}@rows", f"{rhs}@rows")
    reasons = []
    for kernel in kernels("gemm"):
        reason = kernel.declines(problem)
        if reason is None:
            return None
        reasons.append(f"{kernel.name} {reason}")
    return "; ".join(reasons)
