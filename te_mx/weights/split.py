"""parameters_split: a weight and a bias as several parameters along out_features, under Transformer
Engine's names: ``<name>_weight``, ``<name>_bias``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from te_mx.autograd import weight_parts
from te_mx.runtime.arguments import shown


def split_sizes(
    owner: str, module: nn.Module, parameters_split: Iterable[str] | Mapping[str, int],
    out_features: int, ranks: int = 1,
) -> dict[str, int]:  # fmt: skip
    """The rows of each part, by name: what the mapping says, or equal shares of out_features. Of
    several ranks each has its share of every part, and of out_features.

    Raises:
        TypeError: names that are no strings, or sizes that are no ints.
        ValueError: no parts, a name twice or in the way of another attribute, or sizes that do not
            add up to out_features.
    """
    if isinstance(parameters_split, str):
        parameters_split = (parameters_split,)
    iterable = isinstance(parameters_split, Iterable) and not isinstance(parameters_split, Tensor)
    names = list(parameters_split) if iterable else []
    if not names or not all(isinstance(name, str) for name in names):
        kind = ValueError if iterable and not names else TypeError
        raise kind(
            f"{owner}: parameters_split must be names or a dict of names and sizes, got "
            f"{shown(parameters_split)}"
        )
    if isinstance(parameters_split, Mapping):
        sizes = [parameters_split[name] for name in names]
        if any(type(size) is int and size % ranks for size in sizes):
            raise ValueError(
                f"{owner}: the sizes of parameters_split must divide by tp_size={ranks}, got "
                f"{shown(sizes)}"
            )
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise TypeError(
                f"{owner}: the sizes of parameters_split must be ints, got {shown(sizes)}"
            )
        sizes = [size // ranks for size in sizes]
    else:
        sizes = [out_features // len(names)] * len(names)
    stripped = [name.rstrip("_") for name in names]
    if len(set(stripped)) != len(names) or not all(part.isidentifier() for part in stripped):
        raise ValueError(
            f"{owner}: the names of parameters_split must be different identifiers, got {names}"
        )
    taken = [
        f"{name}_{kind}"
        for name in stripped for kind in ("weight", "bias") if hasattr(module, f"{name}_{kind}")
    ]  # fmt: skip
    if taken:
        raise ValueError(
            f"{owner}: parameters_split would make {', '.join(taken)}, which the module has for "
            "something else; give other names"
        )
    if sum(sizes) != out_features:
        raise ValueError(
            f"{owner}: the sizes of parameters_split must add up to out_features="
            f"{out_features * ranks}, got {[size * ranks for size in sizes]}"
        )
    return dict(zip(stripped, sizes, strict=True))


def register_parts(module: nn.Module, sizes: dict[str, int]) -> None:
    """Turn the parameters ``weight`` and ``bias`` of a module into parts of these sizes."""
    for kind in ("weight", "bias"):
        whole = module._parameters[kind]
        module.register_parameter(kind, None)
        if whole is None:
            continue
        for name, part in zip(sizes, whole.detach().split(list(sizes.values())), strict=True):
            # Each has memory of its own: checkpoint formats write or refuse shared memory.
            module.register_parameter(f"{name}_{kind}", nn.Parameter(part.clone()))


def parts(module: nn.Module, sizes: dict[str, int], kind: str) -> list[Tensor]:
    """The parts of a ``weight`` or ``bias``, none for a layer without a bias."""
    found = (getattr(module, f"{name}_{kind}", None) for name in sizes)
    return [part for part in found if part is not None]


def joined(module: nn.Module, sizes: dict[str, int], kind: str) -> Tensor | None:
    """The whole ``weight`` or ``bias``, differentiable; None for a layer without a bias. A weight
    whose parts are gathered as codes is joined before the forward.

    Raises:
        ValueError: a part is missing beside others, or on another device.
    """
    if kind == "weight" and module._joined is not None:
        return module._joined  # type: ignore[return-value]
    found = parts(module, sizes, kind)
    if not found:
        return None
    device = found[0].device
    if len(found) < len(sizes) or any(part.device != device for part in found):
        names = [f"{name}_{kind}" for name in sizes]
        held = {name: getattr(module, name, None) for name in names}
        got = [f"{name} {'None' if p is None else f'on {p.device}'}" for name, p in held.items()]
        raise ValueError(
            f"{module._label()}: the parts of {kind} must be parameters on one device, got "  # type: ignore[operator]
            f"{', '.join(got)}"
        )
    return weight_parts.cat(found)


def reset_parts(
    module: nn.Module,
    sizes: dict[str, int],
    in_features: int,
    init_method: Callable[[Tensor], Any] | None,
) -> None:
    """nn.Linear's default initialization of each part, then `init_method` on each weight."""
    bound = 1 / math.sqrt(in_features) if in_features else 0.0
    for weight in parts(module, sizes, "weight"):
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if init_method is not None:
            init_method(weight)
    for bias in parts(module, sizes, "bias"):
        nn.init.uniform_(bias, -bound, bound)
