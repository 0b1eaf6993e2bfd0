"""What convert_model and revert_model did to the layers of a model, and how much of it that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import nn

from te_mx.conversion.matrices import Matrix, census_of, describe, left_of
from te_mx.recipe import Recipe
from te_mx.runtime.arguments import check_one_of
from te_mx.runtime.report import table

CONVERTED, WOULD_CONVERT, REVERTED, SKIPPED = "converted", "would convert", "reverted", "skipped"
FUSED, WOULD_FUSE = "fused", "would fuse"
BOUND, WOULD_BIND = "bound", "would bind"
_STATUSES = (
    CONVERTED, WOULD_CONVERT, REVERTED, SKIPPED, FUSED, WOULD_FUSE, BOUND, WOULD_BIND,
)  # fmt: skip


# The note of a layer that the fast path bypasses; the summary says more.
FAST_PATH = "bypassed by the fast path of nn.TransformerEncoderLayer"


class LayerReport(NamedTuple):
    """One layer: `status` is "converted", "would convert" (dry run), "fused", "would fuse",
    "reverted", "skipped", or of a te_mx module that was there before "bound", "would bind"; `note`
    says why."""

    name: str
    status: str
    shape: str
    note: str


class ConversionReport:
    """What `convert_model` or `revert_model` did: iterable over `LayerReport`, printable as a
    table.

    `model` is the model itself: layers change in place, also when the model is a single nn.Linear.
    `matrices` are its matrix parameters, which say how much of it was converted: parameters of two
    or three dimensions, each counted once, but those of embeddings, convolutions and
    normalizations, and those with a dimension of size 1. `convolutions` are the weights of those,
    which te_mx does not run, `parameters` is the number of elements of all parameters. `recipe` is
    what was bound, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[LayerReport],
        also: Collection[nn.Module] = (),
        recipe: Recipe | None = None,
    ) -> None:
        self.model = model
        self.layers = layers
        self.recipe = recipe
        self._census = census_of(model, also)
        self.matrices, self.convolutions, self.parameters, _ = self._census

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def count(self, status: str) -> int:
        """How many layers have this status. Raises ValueError for what is no status."""
        check_one_of("status", status, _STATUSES)
        return sum(layer.status == status for layer in self.layers)

    @property
    def converted(self) -> list[str]:
        """Names of the layers that were converted (or would be, in a dry run)."""
        return [layer.name for layer in self.layers if layer.status in (CONVERTED, WOULD_CONVERT)]

    @property
    def fused(self) -> list[str]:
        """Names of the modules that layers were fused into (or would be, in a dry run)."""
        return [layer.name for layer in self.layers if layer.status in (FUSED, WOULD_FUSE)]

    @property
    def skipped(self) -> dict[str, str]:
        """Names of the layers that stay as they are, with the reason."""
        return {layer.name: layer.note for layer in self.layers if layer.status == SKIPPED}

    @property
    def share(self) -> float:
        """The share of the elements of all matrix parameters that te_mx layers hold (or would, in a
        dry run), 0 to 1; 0 for a model without any. Convolutions and embeddings are no part of it;
        the last lines of the report say what share of all parameters it is."""
        total = sum(matrix.elements for matrix in self.matrices)
        return sum(m.elements for m in self.matrices if m.held) / total if total else 0.0

    @property
    def left(self) -> list[Matrix]:
        """The matrix parameters of other modules, the largest first."""
        return left_of(self.matrices)

    @property
    def totals(self) -> str:
        """The last lines: what te_mx holds of the matrices and of all parameters, and what of both
        is left; empty for a model without matrices, embeddings and convolutions."""
        return describe(self._census)

    def __str__(self) -> str:
        counts = Counter(layer.status for layer in self.layers)
        summary = ", ".join(f"{n} {status}" for status, n in counts.items()) or "none"
        lines = [f"{type(self.model).__name__}: linear layers: {summary}{self._bypassed()}"]
        if self.recipe is not None:
            lines.append(f"recipe bound to te_mx modules: {self.recipe!r}")
        if self.layers:
            lines.append(table(LayerReport._fields, self.layers))
        return "\n".join([*lines, *filter(None, [self.totals])])

    def _bypassed(self) -> str:
        """Of te_mx layers that do not run in eval mode."""
        count = sum(layer.name in self.converted and FAST_PATH in layer.note for layer in self)
        if not count:
            return ""
        return (
            f"; in eval mode without grad {count} of them do NOT run in te_mx: the fast path of "
            "nn.TransformerEncoderLayer bypasses them, unless it is turned off by "
            "torch.backends.mha.set_fastpath_enabled(False)"
        )

    __repr__ = __str__
