"""parameters_split: a weight and a bias as several parameters along out_features, under Transformer
Engine's names: ``<name>_weight``, ``<name>_bias``."""

import math
from collections.abc import Iterable, Mapping
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
        ValueError: no parts, a name twice or taken, or sizes that do not add up to out_features.
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


def part_names(sizes: Mapping[str, int], kind: str) -> tuple[str, ...]:
    """The names of the parameters of a ``weight`` or ``bias`` of these parts."""
    return tuple(f"{name}_{kind}" for name in sizes)


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
    if kind == "weight" and (whole := module._source.joined) is not None:  # type: ignore[union-attr]
        return whole  # type: ignore[return-value]
    found = parts(module, sizes, kind)
    if not found:
        return None
    device = found[0].device
    if len(found) < len(sizes) or any(part.device != device for part in found):
        names = part_names(sizes, kind)
        held = {name: getattr(module, name, None) for name in names}
        got = [f"{name} {'None' if p is None else f'on {p.device}'}" for name, p in held.items()]
        raise ValueError(
            f"{module._label()}: the parts of {kind} must be parameters on one device, got "  # type: ignore[operator]
            f"{', '.join(got)}"
        )
    return weight_parts.cat(found)


class SplitWeight:
    """Mixin of the modules with a ``weight`` and a ``bias`` that parameters_split may split."""

    _split: dict[str, int] | None = None  # rows of each part, by name

    def _split_into(
        self: Any, parameters_split: Iterable[str] | Mapping[str, int], out_features: int,
        ranks: int,
    ) -> None:  # fmt: skip
        """Turn the weight and the bias into parts, as `split_sizes` says."""
        sizes = split_sizes(self._label(), self, parameters_split, out_features, ranks)
        for kind in ("weight", "bias"):
            whole = self._parameters[kind]
            self.register_parameter(kind, None)
            own = () if whole is None else whole.detach().split(list(sizes.values()))
            for name, part in zip(sizes, own, strict=False):
                # Each has memory of its own: checkpoint formats write or refuse shared memory.
                self.register_parameter(f"{name}_{kind}", nn.Parameter(part.clone()))
        self._split = sizes

    def whole_weight(self: Any) -> Any:
        """The weight [out_features, in_features], also where it is split or parametrized."""
        return self.weight if self._split is None else joined(self, self._split, "weight")

    def whole_bias(self: Any) -> Tensor | None:
        """The bias [out_features], also where it is split."""
        return self.bias if self._split is None else joined(self, self._split, "bias")

    def _weight_and_bias(self) -> tuple[Any, Any]:
        """The whole of both, without nn.Module's slow look-up where they are plain."""
        parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        if self._split is None and "weight" in parameters and "bias" in parameters:
            return parameters["weight"], parameters["bias"]
        return self.whole_weight(), self.whole_bias()

    def _parts(self: Any, kind: str) -> list[Tensor]:
        """The parameters of the weight or the bias, none for a layer without a bias."""
        if self._split is not None:
            return parts(self, self._split, kind)
        whole = getattr(self, kind)
        return [] if whole is None else [whole]

    def _whole(self, key: str) -> Tensor:
        return self.whole_weight()

    def _reset_parts(self: Any) -> bool:
        """nn.Linear's default initialization of each part, then `init_method` on each weight; False
        where the weight is not split."""
        if self._split is None:
            return False
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for weight in self._parts("weight"):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            if self.init_method is not None:
                self.init_method(weight)
        for bias in self._parts("bias"):
            nn.init.uniform_(bias, -bound, bound)
        return True

    def _split_repr(self) -> str:
        return "" if self._split is None else f", parameters_split={self._split}"
