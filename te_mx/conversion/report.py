"""What convert_model and revert_model did to the layers of a model, and how much of it that is."""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from te_mx.nn.base import MXModule
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
    """What `convert_model` or `revert_model` did: iterable over `LayerReport`, printable.

    `model` is the model itself: layers change in place, also when the model is a single nn.Linear.
    `matrices` are its matrix parameters, which say how much of it was converted: parameters of two
    or three dimensions, each counted once, but those of embeddings, convolutions and
    normalizations, and those with a dimension of size 1. `convolutions` are the weights of those,
    which te_mx does not run, `parameters` is the number of elements of all parameters. `recipe` is
    what was bound, or None."""

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
    def left(self) -> "list[Matrix]":
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


# ---------------------------------------------------------------------------------------- matrices
# How much of a model its te_mx layers hold: the matrices among its parameters, counted.
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
# Their parameters of two or three dimensions are looked up, slid over the input, or scale it.
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NO_MATRICES = (*_EMBEDDINGS, *_CONVOLUTIONS, nn.LayerNorm, nn.RMSNorm)


class Matrix(NamedTuple):
    """One parameter that a module multiplies by: its name, the class of the module that holds it,
    its shape, the number of its elements, and whether a te_mx module holds it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    elements: int
    held: bool


class Census(NamedTuple):
    """The parameters of a model, each counted once: its matrices, the weights of its convolutions,
    the elements of all parameters, and its embeddings."""

    matrices: list[Matrix]
    convolutions: list[Matrix]
    elements: int
    embeddings: list[Matrix]


def census_of(model: nn.Module, also: Collection[nn.Module] = ()) -> Census:
    """`also`: modules that count as te_mx's."""
    matrices = matrices_of(model, also)
    tied = {matrix.name for matrix in matrices}
    linear = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in tied}
    convolutions = _weights_of(model, _CONVOLUTIONS, ())
    embeddings = _weights_of(model, _EMBEDDINGS, linear)
    elements = sum(value.numel() for value in model.parameters() if not is_lazy(value))
    dropped = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    codes = sum(matrix.elements for matrix in matrices if matrix.name not in dropped)
    return Census(matrices, convolutions, elements + codes, embeddings)


def _weights_of(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], but: Collection[int]
) -> list[Matrix]:
    """The weights of modules of these classes, each once, but those with one of these ids."""
    found: dict[int, Matrix] = {}
    for name, module in model.named_modules():
        weight: Any = module.weight if isinstance(module, kinds) else None
        if weight is not None and not is_lazy(weight) and id(weight) not in but:
            path = f"{name}.weight" if name else "weight"
            row = Matrix(path, type(module).__name__, tuple(weight.shape), weight.numel(), False)
            found.setdefault(id(weight), row)
    return list(found.values())


def matrices_of(model: nn.Module, also: Collection[nn.Module] = ()) -> list[Matrix]:
    """The matrix parameters of a model, each once: those of two or three dimensions (experts are
    stacked) without one of size 1, but no embeddings, convolutions and normalizations. An embedding
    whose weight is tied to a linear layer counts there. `also`: modules that count as te_mx's."""
    ours = [m for m in model.modules() if isinstance(m, MXModule) or m in also]
    held = {id(parameter) for module in ours for parameter in module.parameters()}
    found: dict[int, Matrix] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, _NO_MATRICES):
            continue
        if isinstance(module, MXModule):
            for key, codes in module._source.codes(module):
                kind = type(module).__name__
                name = f"{prefix}.{key}" if prefix else key
                found[id(codes)] = Matrix(name, kind, tuple(codes.shape), codes.numel(), True)
        for name, value in module.named_parameters(prefix, recurse=False):
            if is_lazy(value) or value.dim() not in (2, 3) or min(value.shape) < 2:
                continue
            kind = type(module).__name__
            matrix = Matrix(name, kind, tuple(value.shape), value.numel(), id(value) in held)
            found.setdefault(id(value), matrix)
    return list(found.values())


def describe(census: Census) -> str:
    """The share that te_mx holds, of the matrices and of all parameters; the largest of the other
    matrices; the embeddings and convolutions, if any."""
    lines, left = [], left_of(census.matrices)
    if census.matrices:
        total = sum(matrix.elements for matrix in census.matrices)
        held = total - sum(matrix.elements for matrix in left)
        line = (
            f"matrix parameters: {_percent(held, total)} % of {total:,} elements are in te_mx "
            f"layers, {_percent(held, census.elements)} % of all {census.elements:,} parameters"
        )
        lines.append(line + (f"; {len(left)} others{_some(left)}" if left else ""))
    for what, rows in (("embedding", census.embeddings), ("convolution", census.convolutions)):
        if not rows:
            continue
        large = sorted(rows, key=lambda m: -m.elements)
        share = _percent(sum(m.elements for m in large), census.elements)
        count = f"{len(large)} {what}s stay" if len(large) > 1 else f"1 {what} stays"
        lines.append(f"{count}, {share} % of all parameters{_some(large)}")
    return "\n".join(lines)


def _percent(part: int, whole: int) -> str:
    """Rounded down, so that 100 is all of it; small shares with two digits."""
    share = 100 * part / whole
    return f"{1000 * part // whole / 10:g}" if share >= 1 or not part else f"{share:.2g}"


def _some(matrices: list[Matrix]) -> str:
    """ ": name [shape] (class), ..", and that these are the largest where there are more."""
    names = [f"{m.name} {list(m.shape)} ({m.kind})" for m in matrices[:5]]
    largest = "" if len(matrices) <= 5 else ", the largest 5"
    return f"{largest}: {', '.join(names)}"


def left_of(matrices: list[Matrix]) -> list[Matrix]:
    """Those that no te_mx module holds, the largest first."""
    return sorted((m for m in matrices if not m.held), key=lambda m: -m.elements)
