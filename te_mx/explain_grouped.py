"""te_mx.explain_grouped: which kernels a grouped layer runs on, before the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from te_mx.arguments import as_device, check_size, shown
from te_mx.dispatch.groups import INDEX_DTYPES
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import pick_problem
from te_mx.dispatch.run import REFERENCE, ZERO_SIZE
from te_mx.explain import Explanation, explain
from te_mx.recipe import MAX_SPREAD, check_precision, resolve_recipe


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
    """Say which kernels `te_mx.GroupedLinear` runs groups of m_splits rows on, and why others
    decline.

    Groups of few rows run on another kernel than groups of many, exactly as te_mx.Linear does with
    as many tokens; the names are joined by " + ".

    Args:
        m_splits: rows of every group, a sequence of ints or an int tensor [groups].
        in_features, out_features: of every group.
        device: the CPU by default.
        precision: as for `te_mx.gemm`; it matters on GPUs without block-scaled tensor
            cores.
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
    details, names = [], {}
    for gemm, (m, k) in {
        "fprop": (out_features, in_features),
        "dgrad": (in_features, out_features),
    }.items():
        ran: list[str] = []
        layout = "TN" if gemm == "fprop" else "NN"
        how = {"layout": layout, "device": where, "precision": precision}
        for size in sizes:  # the largest group of every kernel
            found = explain(m=m, n=size, k=k, recipe=recipe, **how)  # type: ignore[arg-type]
            if found.kernel not in ran:
                ran.append(found.kernel)
                details.append((f"{gemm} of a group of {size} rows", found))
        names[gemm] = " + ".join(ran) or ZERO_SIZE
    rows = max(splits, default=0)
    found = explain(
        m=in_features, n=out_features, k=rows, device=where, precision=precision, layout="NT",
        recipe=recipe,
    )  # fmt: skip
    details.append((f"wgrad of a group of {rows} rows", found))
    note = ""
    settings, many = resolve_recipe(recipe).settings, 1 << 10
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
