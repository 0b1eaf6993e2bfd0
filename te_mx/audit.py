"""te_mx.audit: what every linear layer of a model ran last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from te_mx.arguments import check_module, shown
from te_mx.autograd.steps import GEMMS
from te_mx.nn.mx_module import MXModule
from te_mx.nn.reclassed import RAN, Reclassed
from te_mx.report import table
from te_mx.runtime.ran import LAST_RUN

HIGH_PRECISION, NEVER = "high precision", "never ran"
_ALL_HIGH = (HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION)


class LayerAudit(NamedTuple):
    """One layer: the kernel that each GEMM ran on last, "high precision", or "never ran"."""

    name: str
    kind: str
    fprop: str
    dgrad: str
    wgrad: str
    weight: str


class AuditReport:
    """What `audit` found: iterable, printable as a table."""

    def __init__(self, layers: list[LayerAudit]) -> None:
        self.layers = layers

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerAudit]:
        return iter(self.layers)

    def __getitem__(self, name: str) -> LayerAudit:
        for layer in self.layers:
            if layer.name == name:
                return layer
        names = ", ".join(layer.name for layer in self.layers[:3])
        more = ", ..." if len(self.layers) > 3 else ""
        raise KeyError(f"no linear layer is named {shown(name)}; there are {names or 'none'}{more}")

    def __str__(self) -> str:
        return table(["layer", "class", "fprop", "dgrad", "wgrad", "weight"], self.layers)

    __repr__ = __str__


def audit(model: nn.Module) -> AuditReport:
    """Say for every linear layer of `model` on which kernel its GEMMs ran last.

    ``fprop``, ``dgrad`` and ``wgrad`` hold the name of the kernel, "high precision" after a forward
    outside autocast (and for every layer that is no te_mx.Linear), or "never ran". ``weight`` says
    whether the layer is frozen. A layer of which nothing was asked, such as the wgrad of a frozen
    weight, keeps "never ran" there.

    A te_mx.GroupedLinear runs groups of few rows on other kernels than groups of many; it shows
    all, joined by " + ".

    MLP blocks and normalizations that convert_model(fuse=True) fused have rows of their own beside
    those of their layers: ``kind`` says whether they ran fused the last time, or why not.

    A te_mx.LayerNormLinear is one row, a te_mx.LayerNormMLP two: ``<name>.fc1``, ``<name>.fc2``.

    Code compiled by torch.compile does not record: a number per layer inside the graph would make
    every layer compile anew. Run once without torch.compile to see what runs; compiled code runs
    the same kernels.

    Raises:
        TypeError: `model` is no nn.Module.
    """
    check_module(model)
    layers = []
    for name, m in model.named_modules():
        if isinstance(m, MXModule):
            layers += _audit_module(name or "(root)", m)
        elif isinstance(m, Reclassed):
            kind = f"{type(m).__name__}: {m.__dict__.get(RAN, NEVER) or HIGH_PRECISION}"
            layers.append(LayerAudit(name or "(root)", kind, "", "", "", ""))
        elif isinstance(m, nn.Linear):
            kind = f"{type(m).__module__.split('.')[0]}.{type(m).__name__}"
            layers.append(LayerAudit(name or "(root)", kind, *_ALL_HIGH, "master"))
    return AuditReport(layers)


def _audit_module(name: str, module: MXModule) -> list[LayerAudit]:
    """The linear steps of a module: "name", or "name.fc1" and "name.fc2"."""
    kind, keys = f"te_mx.{type(module).__name__}", module._weight_keys
    steps = [name] if len(keys) == 1 else [f"{name}.{key.removesuffix('_weight')}" for key in keys]
    dropped, rows = module._is_dropped(), []
    weight = "master" if module._frozen is None else "frozen, no master" if dropped else "frozen"
    for i, step in enumerate(steps):
        ran = _ALL_HIGH
        if module._seen is not None or dropped:
            first = module._tag + len(GEMMS) * i
            fprop, dgrad, wgrad = (
                LAST_RUN.get(first + gemm, NEVER) if module._tag >= 0 else NEVER
                for gemm in range(len(GEMMS))
            )
            ran = fprop, dgrad, wgrad
        rows.append(LayerAudit(step, kind, *ran, weight))
    return rows
