"""Sequence parallelism that gathers the input of a layer as codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from te_mx.autograd import node, sequence_parallel
from te_mx.distributed.collectives import Ranks
from te_mx.nn.layernorm_linear import LayerNormLinear
from te_mx.nn.layernorm_mlp import LayerNormMLP
from te_mx.nn.linear import Linear
from te_mx.runtime.arguments import check_flag, check_module


def quantized_input_gather(model: nn.Module, enabled: bool = True) -> int:
    """Have the te_mx layers in `model` gather inputs whose tokens are sharded as codes and scales,
    1.03 bytes an element in MXFP8 instead of 2, and keep for backward what one rank has of them.

    Results are those of gathering values, bit for bit. Forward gathers rowwise codes, backward
    columnwise ones: two small gathers for a large one, and 1 / ranks of what is kept.
    LayerNormLinear and LayerNormMLP normalize the tokens of the rank alone, and sum the gradient of
    what they normalized over the ranks.

    It concerns te_mx.Linear, LayerNormLinear and LayerNormMLP in front of which tokens are gathered
    along dimension 0: with a process group and ``sequence_parallel=True``, or as DTensors whose
    gather is left to the layer (docs/distributed.md). Elsewhere, outside of te_mx.autocast and for
    weights of codes whose inputs are not quantized the values are gathered.

    Args:
        model: before or after it is sharded.
        enabled: False takes it back.

    Returns:
        The number of layers.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such layer in `model`.
    """
    check_module(model)
    check_flag("enabled", enabled)
    layers = [m for m in model.modules() if isinstance(m, (Linear, LayerNormLinear, LayerNormMLP))]
    if not layers:
        raise ValueError(
            f"no te_mx.Linear, LayerNormLinear or LayerNormMLP in {type(model).__name__}; call "
            "te_mx.convert_model first"
        )
    for layer in layers:
        layer._gathers_inputs = enabled
    return len(layers)


def gathers_codes(module: Any, inp: Tensor) -> bool:
    """Whether this call on tokens of one rank gathers codes."""
    if not module._gathers_inputs or inp.dim() < 2 or node.active():
        return False
    settings = module._one_settings()
    quantizes = module._source.quantizes_inputs
    return settings is not None and quantizes and sequence_parallel.takes(settings)


def tokens_of(module: Any, mesh: Any, wanted: Sequence[Placement], x: DTensor) -> Ranks | None:
    """The ranks whose tokens a layer gathers as codes, of an input x that is wanted elsewhere; None
    where it gathers values, or nothing."""
    moved = [dim for dim in range(mesh.ndim) if x.placements[dim] != wanted[dim]]
    if len(moved) != 1 or x.device_mesh != mesh or not gathers_codes(module, x):
        return None
    (dim,), ranks = moved, mesh.size(moved[0])
    whole_parts = x.placements[dim] == Shard(0) and x.shape[0] % ranks == 0
    if not whole_parts or wanted[dim] != Replicate():
        return None
    if any(place.is_shard(0) for place in wanted):
        return None  # tokens of several dimensions do not stand one behind the other
    return Ranks(mesh.get_group(dim), ranks)
