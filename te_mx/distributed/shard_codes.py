"""What FSDP2 sends of a weight that is gathered as codes: codes and scales of the rows of a rank.

FSDP2 asks weight by weight, on a stream of its own beside the layers that run. Kernels there wait
for a gap between two products, each of them again: where a layer quantized its seven weights when
they were asked for, their gather came late. So the first weight of a forward pass that is asked for
has all weights of the model quantized, before the layers have work. Codes are kept for the
backward pass, which gathers again what it still needs, and asks for each once: 1.03 bytes for a
parameter of this rank. Nothing is kept for longer, for layers that keep the whole weight for
backward anyway or that do not train, or where the shard was written meanwhile.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import rows_2d
from te_mx._ops.grouped_quantize import quantize_weights
from te_mx.autograd.steps import at_rest
from te_mx.context import backward_pass_id
from te_mx.recipes.settings import Settings
from te_mx.runtime import exposed, streams

Sent = tuple[Tensor, ...]


class Ahead(NamedTuple):
    """Codes and scales that were made before they were asked for, and of what."""

    sent: Sent
    version: int
    address: int
    dtype: torch.dtype
    stream: int
    forward: bool  # still to be sent in the forward pass

    def is_of(self, shard: Tensor, dtype: torch.dtype) -> bool:
        """Whether they are what would be made now."""
        made = self.version, self.address, self.dtype, self.stream
        now = shard._version, shard.data_ptr(), dtype, streams.current(shard.device)
        return made == now and not exposed.is_exposed(shard)


class Model:
    """The weights that one call of quantized_all_gather found."""

    def __init__(self) -> None:
        self._shards: list[weakref.ref[ShardCodes]] = []

    def add(self, shard: ShardCodes) -> None:
        self._shards = [ref for ref in self._shards if ref() is not None]
        self._shards.append(weakref.ref(shard))

    def quantize(self) -> None:
        """All weights of modules that train, for a forward pass that begins."""
        for ref in self._shards:
            shard = ref()
            if shard is not None:
                shard.quantize_ahead()


class Place:
    """Where a weight is: the module that has it, what fully_shard knows of it, and of its group."""

    def __init__(self, module: Any, param: Any, groups: Any) -> None:
        self._module = weakref.ref(module)
        self._param = None if param is None else weakref.ref(param)
        self._group = None if param is None else groups.get(param)

    def trains(self) -> bool:
        """Whether a backward pass will come."""
        module = self._module()
        return module is not None and module.training

    def gathers_again(self) -> bool:
        """Whether the whole weight is given up after the forward pass."""
        group: Any = None if self._group is None else self._group()
        return group is not None and group.post_forward_mesh_info is not None

    def dtype(self, shard: Tensor) -> torch.dtype | None:
        """In what the module computes; None where nobody knows."""
        param: Any = None if self._param is None else self._param()
        return None if param is None else param.mp_policy.param_dtype or shard.dtype


class ShardCodes:
    """One sharded weight."""

    def __init__(self, shard: Tensor, settings: Settings, place: Place, model: Model) -> None:
        self._shard, self._settings = weakref.ref(shard), settings
        self._place, self._model = place, model
        self._ahead: Ahead | None = None
        model.add(self)

    def sent(self, dtype: torch.dtype | None) -> Sent:
        """What this rank sends now, computed as in dtype; None: in that of the shard."""
        shard: Any = self._shard()
        dtype = dtype or shard.dtype
        going_back = backward_pass_id() != -1
        found, self._ahead = self._ahead, None
        if not going_back and (found is None or not found.forward) and self._may_keep(shard):
            self._model.quantize()
            found, self._ahead = self._ahead, None
        if found is None or not found.is_of(shard, dtype):
            return self._made(shard, dtype)
        if not going_back and self._place.gathers_again():
            self._ahead = found._replace(forward=False)
        return found.sent

    def quantize_ahead(self) -> None:
        """Keep what a forward pass will ask for."""
        shard: Any = self._shard()
        dtype = None if shard is None else self._place.dtype(shard)
        if dtype is None or not self._may_keep(shard):
            return
        version, address = shard._version, shard.data_ptr()
        stream = streams.current(shard.device)
        self._ahead = Ahead(self._made(shard, dtype), version, address, dtype, stream, True)

    def _may_keep(self, shard: Tensor) -> bool:
        changes_unseen = shard.is_inference() or exposed.is_exposed(shard)
        return self._place.trains() and not changes_unseen and not streams.capturing(shard.device)

    def _made(self, shard: Tensor, dtype: torch.dtype) -> Sent:
        settings = self._settings
        with torch.no_grad():
            values = shard.to(dtype)
            if values.dim() == 3:
                stack = quantize_weights(
                    list(values.unbind(0)), at_rest(settings.w), rule=settings.scale_rule
                )[0]
                return stack.codes, stack.scales
            row = rows_2d(values, at_rest(settings.w), settings.scale_rule)
            return row.codes, row.scales


def _five(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> None:
    """The arguments that FSDP2 gives."""


SIGNATURE = inspect.signature(_five)  # FSDP2 asks for it at every gather, which takes 25 us
