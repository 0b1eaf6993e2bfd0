"""What runs and why: explanations before a call, records of what ran, and one warning per kind of
fallback.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from te_mx.arguments import as_device, check_flag, check_size, shown
from te_mx.backends import cpu, sm90, sm90_layout
from te_mx.backends.base import Operand
from te_mx.engine import envelopes, layout
from te_mx.engine import split_k as _split_k
from te_mx.recipe import check_precision

# Kernel that the last GEMM with a tag ran on; `te_mx.audit` reads it. One entry a tag, written
# without a lock. Tags of modules come from `new_tags` and end with the module.
LAST_RUN: dict[int, str] = {}
TAGS = 6  # of a module: three GEMMs for each linear step, of which there are two at most

_first_tags = itertools.count(step=TAGS)
_living: set[int] = set()

_warned: set[str] = set()


def new_tags(module: Any) -> int:
    """The first of TAGS tags that are a module's own, while it lives."""
    first = next(_first_tags)
    # A backward pass may outlive its module and record once more.
    if len(LAST_RUN) > 2 * TAGS * (len(_living) + TAGS):
        for tag in list(LAST_RUN):
            if tag < first and tag - tag % TAGS not in _living:
                LAST_RUN.pop(tag, None)
    _living.add(first)
    weakref.finalize(module, _end_tags, first).atexit = False
    return first


def _end_tags(first: int) -> None:
    _living.discard(first)
    for tag in range(first, first + TAGS):
        LAST_RUN.pop(tag, None)


class FallbackWarning(RuntimeWarning):
    """Something ran on the slow reference backend on a device that has a native one."""


def warn_fallback(kind: str, why: str) -> None:
    """Warn once in this process about one kind of fallback."""
    if kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(
        f"te_mx runs {kind} on the plain torch reference backend, which is slow: {why}. "
        "te_mx.explain() tells more.",
        FallbackWarning,
        stacklevel=3,
    )


@dataclass(frozen=True)
class Explanation:
    """The kernel of a problem, the parts that it cuts k into, and why each other one does not run
    it. Printable."""

    problem: str
    kernel: str
    declined: tuple[tuple[str, str], ...]
    note: str = ""
    parts: int = 1

    def __str__(self) -> str:
        lines = [f"{self.problem}: {self.kernel}"]
        width = max((len(name) for name, _ in self.declined), default=0)
        lines += [f"  {name:<{width}}  {why}" for name, why in self.declined]
        return "\n".join([*lines, f"  note: {self.note}"] if self.note else lines)


def explain(
    A: Any = None,
    B: Any = None,
    layout: str = "TN",
    *,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    device: Any = None,
    precision: str = "adaptive",
    alignment_spread: int = sm90_layout.DEFAULT_SPREAD,
    split_k: bool = True,
    classes: bool = False,
) -> Explanation:
    """Say which kernel `te_mx.gemm(A, B, layout)` runs on, and why every other one declines.

    Pass two MXTensors, or the sizes m, n, k of D[n, m] (te_mx.Linear: m out features, n tokens, k
    in features). Formats, dtypes and epilogues do not change the choice: every kernel takes all.

    Args:
        A, B: MXTensors as for `te_mx.gemm`.
        layout: "TN", "NN" or "NT".
        m, n, k: sizes, when A and B are not given.
        device: device of the problem without tensors; the CPU by default.
        precision, alignment_spread, split_k: as for `te_mx.gemm`; they matter on Hopper GPUs.
            Modules cut k only when their recipe says split_k=True.
        classes: also count the tiles of A and B by what aligning their scales makes of them
            (docs/numerics.md): it needs the tensors, works on every device and waits for it.

    Raises:
        ValueError: neither two tensors nor three sizes, or an unknown layout, or operands that do
            not fit, or an argument that means nothing.
        TypeError: an argument of the wrong type.
    """
    check_precision(precision, alignment_spread)
    check_flag("split_k", split_k)
    check_flag("classes", classes)
    problem, sides = _problem(A, B, layout, m, n, k, device, precision)
    counted = ""
    if classes:
        if not sides:
            raise ValueError("classes=True counts tiles of tensors; pass A and B")
        counted = "; ".join(
            f"{side} has {_count(operand, alignment_spread)}" for side, operand in sides.items()
        )
    text = (
        f"D[{problem.n}, {problem.m}], k {problem.k}, {layout}, {problem.device}"
        if problem.device != "cpu" or problem.isa < 0
        else f"D[{problem.n}, {problem.m}], k {problem.k}, {layout}, cpu at level "
        f"{cpu.ISA_LEVELS[problem.isa]}"
    )
    kernel = envelopes.select_for(problem)
    if kernel == envelopes.ZERO_SIZE:
        why = "there is nothing to multiply: the epilogue of zeros"
        return Explanation(text, kernel, tuple((other.name, why) for other in envelopes.KERNELS))
    declined = [
        (other.name, other.declines(problem) or f"takes it too; {kernel} comes first")
        for other in envelopes.KERNELS
        if other.name != kernel
    ]
    notes = [counted] if counted else []
    if kernel == envelopes.REFERENCE:
        if problem.device == "cpu":
            notes.append(cpu.missing_reason() or "")
    else:
        declined.append((envelopes.REFERENCE, "only runs what no native kernel takes"))
        if problem.device == "cpu":
            notes.append(
                f"32-row blocks with a row whose scales span more than 2^{cpu.WIDE_SPREAD} run on "
                "wide_f64"
            )
        elif kernel == sm90.ADAPTIVE:
            notes.append(
                f"scales of tiles of 128 x 128 are aligned where they differ by at most "
                f"2^{alignment_spread}; docs/numerics.md has the error"
            )
    parts = 1
    if kernel == sm90.ADAPTIVE and split_k:
        parts = _split_k.parts(problem.gpu, problem.n, problem.m, problem.k)
    if parts > 1:
        notes.append(f"k is cut into {parts} parts, added up in order (split_k)")
    return Explanation(text, kernel, tuple(declined), "; ".join(filter(None, notes)), parts)


def _problem(
    A: Any, B: Any, name: str, m: int | None, n: int | None, k: int | None, device: Any,
    precision: str,
) -> tuple[envelopes.Problem, dict[str, Operand]]:  # fmt: skip
    sizes = {"m": m, "n": n, "k": k}
    given = [size for size in sizes.values() if size is not None]
    if A is not None and B is not None and not given and device is None:
        a, b = layout.operands(A, B, name)
        made = envelopes.problem(a.codes.device, b.rows, a.rows, a.k, precision)
        return made, {"A": a, "B": b}
    if A is not None or B is not None or len(given) < 3:
        raise ValueError(
            "explain needs two MXTensors (A and B) or three sizes (m, n and k, perhaps a device), "
            f"got A={A is not None}, B={B is not None}, m={shown(m)}, n={shown(n)}, k={shown(k)}, "
            f"device={shown(device)}"
        )
    layout.check_layout(name)
    where = as_device("device", "cpu" if device is None else device)
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={where} is not here: torch finds {torch.cuda.device_count()} CUDA "
            'devices; pass another one, or device="cpu"'
        )
    m, n, k = (check_size(*item) for item in sizes.items())
    return envelopes.problem(where, n, m, k, precision), {}


def _count(operand: Operand, spread: int) -> str:
    codes, scales = operand.codes, operand.scales
    if operand.order == "k_first":
        codes, scales = codes.t(), scales.t()
    found = sm90_layout.classes(sm90_layout.pack(codes, scales, operand.fmt, spread))
    counts = torch.bincount(found.flatten().int(), minlength=4).tolist()
    words = zip(("tile-shared", "row-shared", "spread", "far"), counts, strict=True)
    return ", ".join(f"{count} {word}" for word, count in words if count) + " tiles"
