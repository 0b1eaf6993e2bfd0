"""What FSDP2 sends of a weight that is gathered as codes: codes and scales of the rows of a rank.

FSDP2 asks weight by weight, on a stream of its own beside the layers that run. Kernels there wait
for a gap between two products, each of them again: where a layer quantized its seven weights when
they were asked for, their gather came late. So the first weight of a forward pass that is asked for
has all weights of the model quantized, before the layers have work. Codes are kept for the
backward pass, which gathers again what it still needs, and asks for each once: 1.03 bytes for a
parameter of this rank. Nothing is kept for longer, for layers that keep the whole weight for
backward anyway or that do not train, or where the shard was written meanwhile.

Weights that are gathered together are cast in one call, to memory of all of them, and so are their
codes. They are sent as bytes: FSDP2 copies bf16 by way of fp32, which changes what would be NaN.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Operand, Stack, rows_2d, rows_call
from te_mx._ops.grouped_quantize import quantize_weights
from te_mx.autograd.linear_recipe import at_rest
from te_mx.context.region import backward_pass_id
from te_mx.recipes.settings import Settings
from te_mx.runtime import streams

Sent = tuple[Tensor, ...]
Forms = tuple[torch.Size, ...]  # sizes but for the first one

_VECTOR = 128  # bytes; kernels write faster where memory begins with so many


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
        return made == now


class Model:
    """The weights that one call of quantized_all_gather found."""

    def __init__(self) -> None:
        self._shards: list[weakref.ref[ShardCodes]] = []

    def add(self, shard: ShardCodes) -> None:
        self._shards = [ref for ref in self._shards if ref() is not None]
        self._shards.append(weakref.ref(shard))

    def quantize(self) -> None:
        """All weights of modules that train, for a forward pass that begins. Those that are
        gathered together are cast together."""
        batches: dict[Any, list[Due]] = {}
        for ref in self._shards:
            shard = ref()
            if shard is not None:
                shard.join(batches)
        with torch.no_grad():
            for (_, _, dtype, stream), batch in batches.items():
                for due, values, into in zip(
                    batch, _cast(batch, dtype), _memory(batch, dtype), strict=True
                ):
                    due.codes.keep(due, values, into, dtype, stream)


class Due(NamedTuple):
    """A weight that is to be quantized, and what it was when that was known."""

    codes: ShardCodes
    shard: Tensor
    version: int


def _cast(batch: list[Due], dtype: torch.dtype) -> list[Tensor]:
    """Shards of one dtype in another, each at the beginning of a vector: on GPUs a few launches
    for all of them."""
    if batch[0].shard.dtype == dtype:
        return [due.shard for due in batch]
    at, starts = 0, []
    for due in batch:
        starts.append(at)
        at += -(-due.shard.numel() // _VECTOR) * _VECTOR
    memory = torch.empty(at, dtype=dtype, device=batch[0].shard.device)
    made = [
        memory.as_strided(due.shard.shape, due.shard.stride(), start)
        for due, start in zip(batch, starts, strict=True)
    ]
    torch._foreach_copy_(made, [due.shard for due in batch])
    return made


def _memory(batch: list[Due], dtype: torch.dtype) -> Sequence[tuple[Tensor, Tensor] | None]:
    """Memory for what is sent of each, in one piece; None where sizes are not known or do not keep
    the pieces apart by whole vectors."""
    sizes: list[int] = []
    for due in batch:
        known = due.codes.sizes.get(dtype)
        if known is None:
            return [None] * len(batch)
        sizes += known
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=batch[0].shard.device)
    parts: Any = memory.split(sizes)
    return list(zip(parts[::2], parts[1::2], strict=True))


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

    def group(self) -> Any:
        """What fully_shard gathers with it; None where nobody knows."""
        return None if self._group is None else self._group()

    def gathers_again(self) -> bool:
        """Whether the whole weight is given up after the forward pass."""
        group = self.group()
        return group is not None and group.post_forward_mesh_info is not None

    def dtype(self, shard: Tensor) -> torch.dtype | None:
        """In what the module computes; None where nobody knows."""
        param: Any = None if self._param is None else self._param()
        return None if param is None else param.mp_policy.param_dtype or shard.dtype


class ShardCodes:
    """One sharded weight."""

    def __init__(self, shard: Tensor, settings: Settings, place: Place, model: Model) -> None:
        self._shard, self._settings = weakref.ref(shard), settings
        self._at_rest = at_rest(settings.w)
        self._place, self._model = place, model
        self._ahead: Ahead | None = None
        self.forms: Forms = ()
        # Of what is sent, by dtype of the values; None where it is not made in given memory.
        self.sizes: dict[torch.dtype, tuple[int, int] | None] = {}
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

    def join(self, batches: dict[Any, list[Due]]) -> None:
        """Put this weight where a forward pass will ask for it with others, if it will."""
        shard: Any = self._shard()
        dtype = None if shard is None else self._place.dtype(shard)
        if dtype is None or not self._may_keep(shard):
            return
        group = self._place.group() if shard.is_contiguous() else None
        together = self if group is None else group
        key = together, shard.dtype, dtype, streams.current(shard.device)
        batches.setdefault(key, []).append(Due(self, shard, shard._version))

    def keep(
        self, due: Due, values: Tensor, into: tuple[Tensor, Tensor] | None, dtype: torch.dtype,
        stream: int,
    ) -> None:  # fmt: skip
        """What a forward pass will ask for, of values that were cast; in `into`, if that is given
        and can be written to."""
        sent: Sent | None = None
        if into is not None:
            call = rows_call(values, self._at_rest, self._settings.scale_rule)
            sent = None if call is None or call(values, into) is None else into
        if sent is None:
            sent = self._sent(values)
        self._ahead = Ahead(sent, due.version, due.shard.data_ptr(), dtype, stream, True)

    def _may_keep(self, shard: Tensor) -> bool:
        counted = not shard.is_inference()  # whose writes have versions
        return self._place.trains() and counted and not streams.capturing(shard.device)

    def _made(self, shard: Tensor, dtype: torch.dtype) -> Sent:
        with torch.no_grad():
            return self._sent(shard.to(dtype))

    def _sent(self, values: Tensor) -> Sent:
        spec, rule = self._at_rest, self._settings.scale_rule
        made: Stack | Operand
        if values.dim() == 3:
            made = quantize_weights(list(values.unbind(0)), spec, rule=rule)[0]
        else:
            made = rows_2d(values, spec, rule)
        codes, scales = made.codes, made.scales
        if not self.forms:
            self.forms = codes.shape[1:], scales.shape[1:]
        sent = codes.view(-1), scales.view(-1)
        dtype = values.dtype
        if dtype not in self.sizes:
            apart = all(t.dtype == torch.uint8 and t.numel() % _VECTOR == 0 for t in sent)
            alone = values.dim() == 2 and rows_call(values, spec, rule) is not None
            known = (sent[0].numel(), sent[1].numel()) if apart and alone else None
            self.sizes[dtype] = known
        return sent


def restored(sent: Sent, forms: Forms) -> tuple[Tensor, Tensor]:
    """Codes and scales of a whole weight, of what was gathered: the same memory."""
    codes, scales = [flat.view(-1, *rest) for flat, rest in zip(sent, forms, strict=True)]
    return codes, scales


def _five(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> None:
    """The arguments that FSDP2 gives."""


SIGNATURE = inspect.signature(_five)  # FSDP2 asks for it at every gather, which takes 25 us
