"""Layers that a process group shares, as Transformer Engine's: every rank has its part of the
weights as plain parameters, and collectives of the group stand around the layer as DTensor's do
(the table of tensor_parallel.py, of which "both" is the last but one).

With sequence parallelism tokens are sharded along dimension 0: the input is gathered and the sum
scattered, and gradients of what every rank has (norm, bias of a sum) are left for the trainer to
sum, which ``parameter.sequence_parallel`` tells it. The input is gathered as it is, or as codes
(token_codes.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from te_mx.distributed import on_codes
from te_mx.distributed.collectives import COPIED, GATHERED, SCATTERED, Moved, OnOne, Ranks
from te_mx.distributed.local_layer import call, check_whole_blocks, local_layer
from te_mx.distributed.nodes import summed
from te_mx.distributed.token_codes import gathers_codes
from te_mx.nn.tensor_parallel import (
    COLUMN,
    NORM,
    ROW,
    SIZES,
    Shared,
    biases_of_sum,
)


def run(module: Any, inp: Any, *args: Any) -> Any:
    """The forward of a layer that a group shares.

    Raises:
        RuntimeError: the layer has no group yet.
        ValueError: its parts are no whole blocks, or the tokens do not divide by the ranks.
    """
    how, group, label = module._shared, module._tp_group, module._label()
    if group is None:
        raise RuntimeError(
            f"{label}: it is built for tp_size={how.size} and has no group; call "
            "layer.set_tensor_parallel_group(group) first, also of a copy"
        )
    name = SIZES[how.mode]
    whole = getattr(module, name) * how.size
    check_whole_blocks(label, module._settings(), name, whole, how.size)
    held = dict(module._parameters)
    for key in biases_of_sum(held, (how.mode,)) if group.rank() != 0 else ():
        if held.get(key) is not None:
            held[key] = OnOne.apply(held[key], False, not how.sequence)
    x, tokens = inp, None
    if how.mode != ROW and how.sequence and gathers_codes(module, inp):
        tokens = Ranks(group, how.size)
    elif how.mode != ROW:
        x = Moved.apply(inp, *(GATHERED if how.sequence else COPIED), group)
        for key in NORM if not how.sequence else ():
            if held.get(key) is not None:
                held[key] = Moved.apply(held[key], *COPIED, group)
    source = on_codes.gathered(module, held, module._settings(), module._source)
    layer = local_layer(module, held, _tokens=tokens, _source=source)
    made = call(module, layer, x, *args)
    y, *rest = made if isinstance(made, tuple) else (made,)
    if getattr(module, "return_layernorm_output", False):
        rest[-1] = _mine(rest[-1], how, group, tokens is not None)
    if how.mode != COLUMN:
        if how.sequence and y.shape[0] % how.size:
            raise ValueError(
                f"{label}: sequence_parallel=True shards {y.shape[0]} tokens (dimension 0) over "
                f"{how.size} ranks, which must divide it"
            )
        y = Moved.apply(y, *SCATTERED, group) if how.sequence else summed(y, group)
        if module.return_bias:
            rest[0] = module.whole_bias() if how.mode == ROW else module.fc2_bias
    return (y, *rest) if isinstance(made, tuple) else y


def _mine(z: Tensor, how: Shared, group: Any, is_mine: bool) -> Tensor:
    """The normalized input as a layer returns it: this rank's tokens, or all of them. Its gradient
    is counted once."""
    if is_mine:
        return z
    if how.sequence:
        return z.chunk(how.size)[group.rank()]
    return OnOne.apply(z, True, group.rank() == 0)
