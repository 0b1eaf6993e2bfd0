"""The halves of a gated fc1 (te_mx/weights/gated_halves.py) as one DTensor, and back; and what an
optimizer has of them, as of one parameter: its state_dict follows parameters."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, empty

from te_mx.nn.layernorm_mlp import LayerNormMLP
from te_mx.runtime.arguments import check_module, shown
from te_mx.weights import gated_halves
from te_mx.weights.ranks import shard_of


def _places(parts: Sequence[Any]) -> list[Placement]:
    """Where the rows of all parts are in one DTensor: every rank has one run of them."""
    cut = [getattr(place, "dim", None) for place in parts[0].placements]
    return [Replicate() if dim is None else Shard(dim) for dim in cut]


@torch.no_grad()
def join(parts: Sequence[Any]) -> DTensor:
    """One DTensor of the rows of several, which are gathered for it, and freed."""
    whole = torch.cat([_whole(part) for part in parts])
    return distribute_tensor(whole, parts[0].device_mesh, _places(parts), src_data_rank=None)


def blank(parts: Sequence[Any]) -> DTensor:
    """The same without values, and without a word to other ranks."""
    first = parts[0]
    shape = sum(len(part) for part in parts), *first.shape[1:]
    made: Any = empty(
        shape, dtype=first.dtype, device_mesh=first.device_mesh, placements=_places(parts)
    )  # fmt: skip
    made._te_mx_blank = shard_of(made)._version
    return made


def is_blank(tensor: Any) -> bool:
    """Whether it is such a one that nobody has filled."""
    version = getattr(tensor, "_te_mx_blank", None)
    return version is not None and version == shard_of(tensor)._version


@torch.no_grad()
def cut(whole: Tensor, like: Sequence[Any]) -> list[Tensor]:
    """The rows of a tensor, whole or this rank's part, as DTensors like those of a module."""
    rows = [len(part) for part in like]
    return [
        distribute_tensor(
            part.to(own.device), own.device_mesh, own.placements, src_data_rank=None
        ) if isinstance(own, DTensor) else part
        for part, own in zip(_whole(whole).split(rows), like, strict=True)
    ]  # fmt: skip


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


_HALF = re.compile(r"(?:^|(?<=\.))fc1_(?:activated|gate)_(weight|bias)(?=\.|$)")
_FLAT = ("", "state.", "param_groups.")  # in front of the name of a parameter


def join_halves(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state_dict of an optimizer as it is for layers that no ranks share: what it says of
    ``fc1_activated_weight`` and ``fc1_gate_weight``, which `te_mx.distributed.ModuleParallel` makes
    of a gated LayerNormMLP, stands under ``fc1_weight``, and biases likewise. state_dicts of models
    are so anyway.

    Args:
        state: of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, nested or flat.
            Tensors like the parameters, as Adam's, are joined by rows; DTensors by a collective
            operation, so on every rank. Steps and learning rates are the same of both.

    Returns:
        A new dict; `state` stays as it is.

    Raises:
        TypeError: `state` is no dict.
        ValueError: it has one half without the other.
    """
    _check_state("join_halves", state)

    def both(name: str, of: "Mapping[str, Any]") -> "dict[str, Any]":
        found = _HALF.search(name)
        if found is None:
            return {name: of[name]}
        start, kind, end = name[: found.start()], found[1], name[found.end() :]
        names = [start + half + end for half in gated_halves.names_of(f"fc1_{kind}")]
        if any(one not in of for one in names):
            raise ValueError(
                f"join_halves: {names[0]} and {names[1]} belong together, got {name} alone"
            )
        return {f"{start}fc1_{kind}{end}": _both(*(of[one] for one in names))}

    def group(names: "list[str]") -> "list[str]":
        return list(dict.fromkeys(_HALF.sub(r"fc1_\1", name) for name in names))

    return _renamed(state, both, group)


def split_halves(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The way back from `join_halves`, and from the state_dict of an optimizer for a model that no
    ranks share: for the parameters of `model`.

    Args:
        model: a model with the parameter names of `state`, in which ModuleParallel made halves.
        state: as of `join_halves`. Whole tensors are cut in two, DTensors follow the parameters.

    Returns:
        A new dict; `state` stays as it is.

    Raises:
        TypeError: an argument has the wrong type.
    """
    check_module(model)
    _check_state("split_halves", state)
    like: dict[str, tuple[list[str], list[Any]]] = {}
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        for key in gated_halves.KEYS if isinstance(module, LayerNormMLP) else ():
            if len(names := module._parts_of(key)) > 1:
                parts = [module._parameters[name] for name in names]
                like[path + key] = [path + name for name in names], parts

    def two(name: str, of: "Mapping[str, Any]") -> "dict[str, Any]":
        for start in _FLAT:
            for whole, (names, parts) in like.items():
                if name == start + whole or (start and name.startswith(f"{start}{whole}.")):
                    end = name[len(start + whole) :]
                    values = _two(of[name], parts)
                    return {start + n + end: v for n, v in zip(names, values, strict=True)}
        return {name: of[name]}

    def group(names: "list[str]") -> "list[str]":
        return [one for name in names for one in like.get(name, ([name],))[0]]

    return _renamed(state, two, group)


def _check_state(owner: str, state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"{owner}: state must be a dict, of an optimizer, got {shown(state)}")


def _renamed(
    state: Mapping[str, Any], entries: Callable[[str, Mapping[str, Any]], dict[str, Any]],
    group: Callable[[list[str]], list[str]],
) -> dict[str, Any]:  # fmt: skip
    """A state with other entries for parameters; `group` gives the names in a parameter group."""
    if "state" not in state or "param_groups" not in state:
        made: dict[str, Any] = {}
        for name in state:
            made |= entries(name, state)
        return made
    groups = [{**one, "params": group(one["params"])} for one in state["param_groups"]]
    inner: dict[str, Any] = {}
    for name in state["state"]:
        inner |= entries(name, state["state"])
    return {**state, "state": inner, "param_groups": groups}


def _both(first: Any, second: Any) -> Any:
    if isinstance(first, Mapping):
        return {key: _both(value, second[key]) for key, value in first.items()}
    if not isinstance(first, Tensor) or first.dim() == 0:
        return first
    return join([first, second]) if isinstance(first, DTensor) else torch.cat([first, second])


def _two(value: Any, like: list[Any]) -> list[Any]:
    if isinstance(value, Mapping):
        pairs = {key: _two(one, like) for key, one in value.items()}
        return [{key: pair[i] for key, pair in pairs.items()} for i in range(len(like))]
    if not isinstance(value, Tensor) or value.dim() == 0:
        return [copy.deepcopy(value) for _ in like]  # each counts its own steps
    return cut(value, like) if isinstance(value, DTensor) else list(value.chunk(len(like)))
