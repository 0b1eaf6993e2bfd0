"""te_mx.explain_grouped: which kernels a grouped layer runs on, before the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_mx.backends import cpu, sm90
from te_mx.engine import envelopes
from te_mx.engine.explain import Explanation, explain


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
    m_splits: Sequence[int],
    *,
    in_features: int,
    out_features: int,
    device: Any = None,
    precision: str = "adaptive",
) -> GroupedExplanation:
    """Say which kernels `te_mx.GroupedLinear` runs groups of m_splits rows on, and why others
    decline.

    Groups of few rows run on another kernel than groups of many, exactly as te_mx.Linear does with
    as many tokens; the names are joined by " + ".

    Args:
        m_splits: rows of every group, as numbers.
        in_features, out_features: of every group.
        device: the CPU by default.
        precision: as for `te_mx.gemm`; it matters on Hopper GPUs.
    """
    where = torch.device("cpu" if device is None else device)
    splits = [int(split) for split in m_splits]
    if any(split < 0 for split in splits):
        raise ValueError(f"m_splits must be 0 or more, got {splits}")
    sizes = {
        "few": max((s for s in splits if 0 < s <= envelopes.STREAM_MAX_ROWS), default=0),
        "many": max((s for s in splits if s > envelopes.STREAM_MAX_ROWS), default=0),
    }
    details, names = [], {}
    for gemm, (m, k) in {
        "fprop": (out_features, in_features),
        "dgrad": (in_features, out_features),
    }.items():
        ran = []
        for size in reversed(sizes.values()):
            if size:
                found = explain(m=m, n=size, k=k, device=where, precision=precision)
                ran.append(found.kernel)
                details.append((f"{gemm} of a group of {size} rows", found))
        names[gemm] = " + ".join(dict.fromkeys(ran)) or envelopes.ZERO_SIZE
    rows = max(splits, default=0)
    found = explain(
        m=in_features, n=out_features, k=rows, device=where, precision=precision, layout="NT"
    )
    details.append((f"wgrad of a group of {rows} rows", found))
    note = ""
    if where.type == "cpu" and cpu.missing_reason() is None:
        note = "one parallel region for all groups"
    elif found.kernel == sm90.ADAPTIVE:
        note = "one launch for all groups, wherever m_splits lies"
    elif where.type != "meta":
        note = (
            "one group after the other where m_splits is a list or lies on the CPU; on the "
            "reference backend, every group on all rows, where m_splits lies on the device"
        )
    problem = (
        f"{len(splits)} groups of {splits} rows, {in_features} -> {out_features}, {where.type}"
    )
    return GroupedExplanation(
        problem, names["fprop"], names["dgrad"], found.kernel, tuple(details), note
    )
