"""Parameters of which fully_shard says other rows than the ranks have.

A gated fc1 has two halves, and ModuleParallel gives each rank its part of both: a strided shard.
fully_shard on top cuts what a rank has into runs of rows, and no placement of DTensor says which
rows of the whole these are. The one that it writes is for plain shards. Training needs none of it;
whoever puts the whole together, or cuts it, gets other rows.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from te_mx.distributed.fsdp import params_of

# Before 2.12 DTensor did not put such shards together at all.
_UNKNOWN = torch.__version__ < "2.12"


def is_misplaced(parameter: Any) -> bool:
    """Whether a strided shard is cut again, along the same dimension."""
    if not isinstance(parameter, DTensor):
        return False
    cut: set[int] = set()
    for dim, place in enumerate(parameter.placements):
        along = getattr(place, "dim", None)
        if along is None or parameter.device_mesh.size(dim) == 1:
            continue
        if along in cut and isinstance(place, _StridedShard):
            return True
        cut.add(along)
    return False


def is_strided(parameter: Any) -> bool:
    """Whether a rank has several runs of rows or columns: a strided shard that does not only say in
    which order fully_shard, on top of tensor parallelism, has cut."""
    if not isinstance(parameter, DTensor):
        return False
    places, mesh = parameter.placements, parameter.device_mesh
    for dim, place in enumerate(places):
        if isinstance(place, _StridedShard) and mesh.size(dim) > 1:
            later = range(dim + 1, mesh.ndim)
            inner = [mesh.size(i) for i in later if getattr(places[i], "dim", None) == place.dim]
            if math.prod(inner) != place.split_factor:
                return True
    return False


def why_not_saved(module: Any) -> str:
    """Why the parameters of a module are neither saved nor loaded, or an empty string."""
    return _why(module, module._parameters)


def warn(module: Any) -> None:
    """Before training, what its end would say."""
    known = {name: param.sharded_param for name, param in params_of(module).items()}
    if why := _why(module, known):
        warnings.warn(f"{why} It trains, and its state_dict is refused", UserWarning, stacklevel=2)


def _why(module: Any, parameters: dict[str, Any]) -> str:
    for name, parameter in parameters.items():
        if _UNKNOWN and is_strided(parameter):
            return (
                f"{module._label()}: {name} lies in strided shards, {parameter.placements}, of "
                f"which this PyTorch ({torch.__version__}) makes no whole: checkpoints and "
                "full_tensor() need 2.12 or newer. Use a newer one, or make gate and up layers of "
                "their own, which te_mx.convert_model(fuse=True) runs as one."
            )
        if is_misplaced(parameter):
            return (
                f"{module._label()}: fully_shard cut the strided shards of {name} by rows, and "
                f"says {parameter.placements}, which are other rows than the ranks have: "
                "checkpoints and full_tensor() would have them in another order. Without biases "
                "have it cut columns, fully_shard(layer, shard_placement_fn=lambda p: "
                "Shard(p.ndim - 1)); or make gate and up layers of their own, which "
                "te_mx.convert_model(fuse=True) runs as one."
            )
    return ""
