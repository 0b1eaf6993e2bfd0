"""Rotary embeddings, whose tables compiled code is to write once (te_mx/nn/stored_tables.py).

They are known by what they hold: frequencies under the name that all libraries give them, and
neither parameters nor submodules. Whatever else that were, storing its result changes no value.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from te_mx.fusion.sequences import Fusion
from te_mx.nn.reclassed import Reclassed
from te_mx.nn.stored_tables import TablesPlan
from te_mx.nn.surroundings import hooked

_FREQUENCIES = "inv_freq"


class Tables(NamedTuple):
    """A module whose results are tables."""

    module: nn.Module
    plan: TablesPlan


def plan_tables(
    model: nn.Module, converts: Collection[nn.Module]
) -> tuple[list[Fusion], list[Tables]]:
    """The report and what `fuse_in_place` is to do. converts: the layers that are te_mx.Linear
    afterwards."""
    found: list[Fusion] = []
    tables: list[Tables] = []
    beside = next((module for module in model.modules() if module in converts), None)
    for name, module in model.named_modules():
        frequencies = module._buffers.get(_FREQUENCIES)
        if frequencies is None or frequencies.dim() != 1 or not isinstance(beside, nn.Linear):
            continue
        others = any(True for _ in module.parameters()) or module._modules
        if others or isinstance(module, Reclassed) or hooked(module):
            continue
        what = f"{type(module).__name__}: its tables are written once in compiled code"
        found.append(Fusion(name or "(root)", str(2 * len(frequencies)), what, ""))
        tables.append(Tables(module, TablesPlan(beside)))
    return found, tables
