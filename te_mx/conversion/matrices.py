"""How much of a model its te_mx layers hold: the matrices among its parameters, counted."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from te_mx.nn.mx_module import MXModule

# Their parameters of two or three dimensions are looked up, slid over the input, or scale it.
_NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, _ConvNd, nn.LayerNorm, nn.RMSNorm)


class Matrix(NamedTuple):
    """One parameter that a module multiplies by: its name, the class of the module that holds it,
    its shape, the number of its elements, and whether a te_mx module holds it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    elements: int
    held: bool


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
        if isinstance(module, MXModule) and module._is_dropped():
            for key in module._weight_keys:
                codes, kind = module._codes(key)[0], type(module).__name__
                name = f"{prefix}.{key}" if prefix else key
                found[id(codes)] = Matrix(name, kind, tuple(codes.shape), codes.numel(), True)
        for name, value in module.named_parameters(prefix, recurse=False):
            if is_lazy(value) or value.dim() not in (2, 3) or min(value.shape) < 2:
                continue
            kind = type(module).__name__
            matrix = Matrix(name, kind, tuple(value.shape), value.numel(), id(value) in held)
            found.setdefault(id(value), matrix)
    return list(found.values())


def describe(matrices: list[Matrix], shown: int = 5) -> str:
    """One line: the share that te_mx holds, and the largest of the others."""
    total = sum(matrix.elements for matrix in matrices)
    left = left_of(matrices)
    share = 1000 * (total - sum(matrix.elements for matrix in left)) // total
    line = f"matrix parameters: {share / 10:g} % of {total:,} elements are in te_mx layers"
    if not left:
        return line
    names = [f"{m.name} {list(m.shape)} ({m.kind})" for m in left[:shown]]
    largest = "" if len(left) <= shown else f", the largest {shown}"
    return f"{line}; {len(left)} others{largest}: {', '.join(names)}"


def left_of(matrices: list[Matrix]) -> list[Matrix]:
    """Those that no te_mx module holds, the largest first."""
    return sorted((m for m in matrices if not m.held), key=lambda m: -m.elements)
