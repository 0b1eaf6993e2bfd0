"""How much of a model its te_mx layers hold: the matrices among its parameters, counted."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from te_mx.nn.base import MXModule

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
    whose weight is tied to a linear layer counts there. `also`: modules that count as te_mx's.
    """
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


def describe(census: Census, shown: int = 5) -> str:
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
        lines.append(line + (f"; {len(left)} others{_some(left, shown)}" if left else ""))
    for what, rows in (("embedding", census.embeddings), ("convolution", census.convolutions)):
        if not rows:
            continue
        large = sorted(rows, key=lambda m: -m.elements)
        share = _percent(sum(m.elements for m in large), census.elements)
        count = f"{len(large)} {what}s stay" if len(large) > 1 else f"1 {what} stays"
        lines.append(f"{count}, {share} % of all parameters{_some(large, shown)}")
    return "\n".join(lines)


def _percent(part: int, whole: int) -> str:
    """Rounded down, so that 100 is all of it; small shares with two digits."""
    share = 100 * part / whole
    return f"{1000 * part // whole / 10:g}" if share >= 1 or not part else f"{share:.2g}"


def _some(matrices: list[Matrix], shown: int) -> str:
    """ ": name [shape] (class), ..", and that these are the largest where there are more."""
    names = [f"{m.name} {list(m.shape)} ({m.kind})" for m in matrices[:shown]]
    largest = "" if len(matrices) <= shown else f", the largest {shown}"
    return f"{largest}: {', '.join(names)}"


def left_of(matrices: list[Matrix]) -> list[Matrix]:
    """Those that no te_mx module holds, the largest first."""
    return sorted((m for m in matrices if not m.held), key=lambda m: -m.elements)
