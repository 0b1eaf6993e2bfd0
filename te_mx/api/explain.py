"""te_mx.explain: what runs a GEMM and why, before the call.

te_mx.explain_grouped: which kernels a grouped layer runs on, before the call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_mx.api import blas
from te_mx.dispatch.calls import DEFAULT_SPREAD
from te_mx.dispatch.explain import Explanation, explain_problem
from te_mx.dispatch.groups import INDEX_DTYPES
from te_mx.dispatch.problem import Problem, level_name, place_of
from te_mx.dispatch.registry import find, pick_problem
from te_mx.dispatch.run import REFERENCE, ZERO_SIZE
from te_mx.layouts import aligning
from te_mx.layouts.operand import Operand
from te_mx.recipe import MAX_SPREAD, Settings, check_precision, resolve_recipe
from te_mx.recipes.resolve import DEFAULT_SETTINGS
from te_mx.runtime.arguments import as_device, check_flag, check_size, shown
from te_mx.runtime.kernel_log import FallbackWarning

__all__ = ["Explanation", "FallbackWarning", "explain"]

_ROLES = {  # of A and B in te_mx.Linear
    "TN": ("w", "x"), "NN": ("w_columns", "g"), "NT": ("x_columns", "g_columns")
}  # fmt: skip


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
    alignment_spread: int = DEFAULT_SPREAD,
    split_k: bool = True,
    classes: bool = False,
    recipe: Any = None,
    experts: int | None = None,
    top_k: int | None = None,
) -> Explanation:
    """Say which kernel `te_mx.gemm(A, B, layout)` runs on, and why every other one declines.

    Pass two MXTensors, or the sizes m, n, k of D[n, m] (te_mx.Linear: m out features, n tokens, k
    in features), which stand for MXFP8 or for what a recipe says. Dtypes and epilogues do not
    change the choice: every kernel takes all.

    Args:
        A, B: MXTensors as for `te_mx.gemm`.
        layout: "TN", "NN" or "NT".
        m, n, k: sizes, when A and B are not given.
        device: device of the problem without tensors; the CPU by default.
        precision, alignment_spread, split_k: as for `te_mx.gemm`; they matter on Hopper GPUs.
            Modules cut k only when their recipe says split_k=True.
        classes: also count the tiles of A and B by what aligning their scales makes of them
            (docs/numerics.md): it needs the tensors, works on every device and waits for it.
        recipe: of sizes, the recipe of a te_mx.Linear, whose fprop is TN, dgrad NN and wgrad NT: it
            names the formats. None means E4M3 everywhere.
        experts, top_k: of sizes, a product of a mixture of experts in place of a GEMM:
            `te_mx.moe.grouped_gemm` of n tokens, each sent to top_k experts of m out features.

    Raises:
        ValueError: neither two tensors nor three sizes, or an unknown layout, or operands that do
            not fit, or an argument that means nothing.
        TypeError: an argument of the wrong type.
    """
    check_precision(precision, alignment_spread)
    check_flag("split_k", split_k)
    check_flag("classes", classes)
    settings = None if recipe is None else resolve_recipe(recipe).settings
    sizes = {"m": m, "n": n, "k": k}
    problem, sides = _problem(A, B, layout, sizes, device, (precision, alignment_spread), settings)
    if experts is not None or top_k is not None:
        if sides or layout != "TN":
            raise ValueError("experts and top_k go with sizes, layout TN; leave them away")
        return _of_experts(problem, experts, top_k)
    notes: tuple[str, ...] = ()
    if classes:
        if not sides:
            raise ValueError("classes=True counts tiles of tensors; pass A and B")
        for side, operand in sides.items():
            if not aligning(alignment_spread).has_classes(operand.format):
                raise ValueError(
                    "classes=True counts tiles of MXFP8 and MXFP4 tensors, "
                    f"{side} is {operand.format.name}"
                )
        notes = tuple(
            f"{side} has {_count(operand, alignment_spread)}" for side, operand in sides.items()
        )
    if layout == "TN" and not sides:
        frozen = find(problem._replace(op="linear_frozen", dtype=torch.bfloat16))
        if frozen is not None and frozen.multiplies:
            notes += (f"a frozen te_mx.Linear runs on {frozen.name}",)
    text = f"D[{problem.m}, {problem.n}], k {problem.k}, {layout}, {_where(problem)}"
    return explain_problem(problem, text, notes, split_k)


def _of_experts(problem: Problem, experts: Any, top_k: Any) -> Explanation:
    """That of te_mx.moe.grouped_gemm."""
    if experts is None or top_k is None:
        raise ValueError(
            f"experts and top_k go together, got {shown(experts)} and {shown(top_k)}; pass both"
        )
    experts, top_k = check_size("experts", experts, 1), check_size("top_k", top_k, 1)
    if top_k > experts:
        raise ValueError(f"top_k must be at most experts, got {top_k} of {experts}")
    lhs, rhs = (f"{spec.partition('@')[0]}@rows" for spec in (problem.lhs, problem.rhs))
    problem = problem._replace(
        op="moe_gemm", lhs=lhs, rhs=rhs, groups=experts, top_k=top_k, dtype=torch.bfloat16
    )
    text = (
        f"{problem.m} tokens to {top_k} of {experts} experts, each [{problem.n}, {problem.k}], "
        f"{_where(problem)}"
    )
    return explain_problem(problem, text)


def _where(problem: Problem) -> str:
    place = problem.place
    level = f" at level {level_name(place)}" if place.level >= 0 else ""
    return f"{place.device}{level}"


def _gemm(
    device: torch.device, lhs: str, rhs: str, m: int, n: int, k: int, precision: str, spread: int
) -> Problem:
    return Problem("gemm", place_of(device), lhs, rhs, m, n, k, precision=precision, spread=spread)


def _problem(
    A: Any, B: Any, name: str, sizes: dict[str, int | None], device: Any, how: tuple[str, int],
    settings: Settings | None,
) -> tuple[Problem, dict[str, Operand]]:  # fmt: skip
    precision, spread = how
    given = [size for size in sizes.values() if size is not None]
    if A is not None and B is not None and settings is not None:
        raise ValueError("recipe names the formats of sizes; A and B have theirs, leave it away")
    if A is not None and B is not None and not given and device is None:
        for side, one, other in (("A", A, B), ("B", B, A)):
            if isinstance(one, Tensor) and hasattr(other, "operand"):
                raise TypeError(
                    f"{side} must be an MXTensor, got {shown(one)}: with a plain tensor te_mx.gemm "
                    "decodes the other side and torch multiplies; quantize it to run a kernel"
                )
        a, b = blas.operands(A, B, name)
        made = _gemm(a.codes.device, b.spec, a.spec, b.rows, a.rows, a.k, precision, spread)
        return made, {"A": a, "B": b}
    if A is not None or B is not None or len(given) < 3:
        raise ValueError(
            "explain needs two MXTensors (A and B) or three sizes (m, n and k, perhaps a device), "
            f"got A={A is not None}, B={B is not None}, "
            f"{', '.join(f'{size}={shown(value)}' for size, value in sizes.items())}, "
            f"device={shown(device)}"
        )
    blas.check_layout(name)
    where = as_device("device", "cpu" if device is None else device)
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={where} is not here: torch finds {torch.cuda.device_count()} CUDA "
            'devices; pass another one, or device="cpu"'
        )
    m, n, k = (check_size(*item) for item in sizes.items())
    usual = DEFAULT_SETTINGS
    rhs, lhs = (f"{getattr(settings or usual, role)}@any" for role in _ROLES[name])
    return _gemm(where, lhs, rhs, n, m, k, precision, spread), {}


def _count(operand: Operand, spread: int) -> str:
    fmt, layout = operand.format, operand.layout
    codes, scales = layout.unpack(fmt, operand.codes, operand.scales, operand.k)
    codes = fmt.unpack(codes, operand.k)
    tiles = aligning(spread)
    found = tiles.classes(fmt, codes, scales)
    counts = torch.bincount(found.flatten().int(), minlength=len(tiles.class_names)).tolist()
    words = zip(tiles.class_names, counts, strict=True)
    return ", ".join(f"{count} {word}" for word, count in words if count) + " tiles"


@dataclass(frozen=True)
class GroupedExplanation:
    """The kernels of the three GEMMs of a grouped layer. Printable."""

    problem: str
    fprop: str
    dgrad: str
    wgrad: str
    details: tuple[tuple[str, Explanation], ...]
    note: str = ""

    def __str__(self) -> str:
        lines = [self.problem]
        lines += [f"  {name}: {getattr(self, name)}" for name in ("fprop", "dgrad", "wgrad")]
        for label, explanation in self.details:
            lines += [f"  {label}:", *(f"    {line}" for line in str(explanation).splitlines())]
        return "\n".join([*lines, f"  note: {self.note}"] if self.note else lines)


def explain_grouped(
    m_splits: Sequence[int] | Tensor,
    *,
    in_features: int,
    out_features: int,
    device: Any = None,
    precision: str = "adaptive",
    recipe: Any = None,
) -> GroupedExplanation:
    """Say which kernels `te_mx.GroupedLinear` runs groups of rows on, and why others decline.

    Groups of few rows run on another kernel than groups of many, exactly as te_mx.Linear does with
    as many tokens; the names are joined by " + ".

    Args:
        m_splits: rows of every group, a sequence of ints or an int tensor [groups].
        in_features, out_features: of every group.
        device: the CPU by default.
        precision: as for `te_mx.gemm`; it matters on Hopper GPUs. dgrad and wgrad are "adaptive"
            under "invariant" and "fp8", which are about forward.
        recipe: names the formats; None means E4M3 everywhere.

    Raises:
        TypeError, ValueError: an argument of the wrong type, or one that means nothing.
    """
    where = as_device("device", "cpu" if device is None else device)
    in_features = check_size("in_features", in_features)
    out_features = check_size("out_features", out_features)
    check_precision(precision, MAX_SPREAD)
    splits = _sizes(m_splits)
    sizes = sorted({split for split in splits if split}, reverse=True)
    settings, many = resolve_recipe(recipe).settings, 1 << 10
    backward = settings._replace(precision=precision).backward_precision
    details, names = [], {}
    for gemm, (m, k) in {
        "fprop": (out_features, in_features),
        "dgrad": (in_features, out_features),
    }.items():
        ran: list[str] = []
        layout = "TN" if gemm == "fprop" else "NN"
        how = {"layout": layout, "device": where}
        how["precision"] = precision if gemm == "fprop" else backward
        for size in sizes:  # the largest group of every kernel
            found = explain(m=m, n=size, k=k, recipe=recipe, **how)  # type: ignore[arg-type]
            if found.kernel not in ran:
                ran.append(found.kernel)
                details.append((f"{gemm} of a group of {size} rows", found))
        names[gemm] = " + ".join(ran) or ZERO_SIZE
    rows = max(splits, default=0)
    found = explain(
        m=in_features, n=out_features, k=rows, device=where, precision=backward, layout="NT",
        recipe=recipe,
    )  # fmt: skip
    details.append((f"wgrad of a group of {rows} rows", found))
    note = ""
    x, w = (f"{fmt}@any" for fmt in settings[:2])
    problem = Problem(
        "gemm_rows", place_of(where), x, w, many, many, many, len(splits), precision,
        "device" if where.type == "cuda" else "host",
    )  # fmt: skip
    kernel = pick_problem(problem)
    if kernel.name != REFERENCE:
        note = kernel.note(problem)
    elif where.type != "meta":
        note = (
            "one group after the other where m_splits is a list or lies on the CPU; on the "
            "reference backend, every group on all rows, where m_splits lies on the device"
        )
    text = f"{len(splits)} groups of {splits} rows, {in_features} -> {out_features}, {where.type}"
    return GroupedExplanation(
        text, names["fprop"], names["dgrad"], found.kernel, tuple(details), note
    )


def _sizes(m_splits: Sequence[int] | Tensor) -> list[int]:
    """m_splits as ints. Raises TypeError or ValueError for what they cannot be."""
    if isinstance(m_splits, Tensor):
        if m_splits.dtype not in INDEX_DTYPES or m_splits.dim() != 1 or m_splits.is_meta:
            raise TypeError(
                "m_splits must be a sequence of ints or an int32 or int64 tensor [groups], got "
                f"{shown(m_splits)}"
            )
        m_splits = m_splits.tolist()
    if isinstance(m_splits, str | bytes) or not isinstance(m_splits, Sequence):
        raise TypeError(f"m_splits must be a sequence of ints, got {shown(m_splits)}")
    return [check_size(f"m_splits[{i}]", split) for i, split in enumerate(m_splits)]
