"""What the quantized copy of a frozen weight was made of, so that a change of it is noticed; and
which frozen module holds a tensor: code that got tensors alone finds what is kept of them.

Seen is whatever raises a tensor's version counter (every in-place operation, also through views and
``detach()``: load_state_dict, torch.distributed.checkpoint, most optimizers), another memory, shape
or dtype under the same parameter (``weight.data = ...``), and that a parameter trains.

Not seen are writes that torch does not count: in place through ``weight.data``, NumPy, DLPack or
views made in inference_mode, by the kernels of optimizers with ``fused=True``, and by frameworks
that fill the memory of parameters behind autograd."""

import itertools
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from te_mx.weights.ranks import shard_of

# Parameters are pickled with their number, which must not be one of another process.
_ids = itertools.count(1 + int.from_bytes(os.urandom(7), "big"))


class Sources:
    """The tensors that one weight is computed from: which ones they were when the weight was
    frozen, and their state when its copy was made.

    Other tensors are never taken for the same weight, whatever they hold: sharded training and
    functional_call lend a module tensors for the time of a forward, and may fill the same memory
    anew for the next one."""

    __slots__ = ("_names", "_states")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = {name: id_of(tensor) for name, tensor in tensors.items()}
        self._states: list[tuple[Any, ...]] = []

    def are(self, tensors: Mapping[str, Tensor | None]) -> bool:
        """Whether these are the same tensors."""
        return all(
            getattr(tensors.get(name), "_te_mx_id", 0) == number
            for name, number in self._names.items()
        )

    def gone(self) -> bool:
        """Whether the memory of one was given back."""
        return any(state[4]() is None for state in self._states)

    def unchanged(self, tensors: Mapping[str, Tensor | None]) -> bool:
        """Whether these are the same tensors in the state of the last `follow`. Half a microsecond
        a tensor: every forward asks."""
        if not self._states:
            return False
        for name, number, version, address, storage, shape, stride, dtype, shard in self._states:
            tensor: Any = tensors.get(name)
            if tensor is None or getattr(tensor, "_te_mx_id", 0) != number:
                return False
            # In-place operations on a DTensor raise its version, not that of its shard.
            has = tensor if shard is None else shard_of(tensor)
            if (
                tensor._version != version
                or has.data_ptr() != address
                or has.untyped_storage() is not storage()
                or tensor.requires_grad
                or has.shape != shape
                or has.stride() != stride
                or tensor.dtype != dtype
                or (shard is not None and has._version != shard)
            ):
                return False
        return True

    def follow(self, tensors: Mapping[str, Tensor]) -> bool:
        """Take their state as that of a copy that is made now; False where a change could not be
        seen, so that no copy may be kept."""
        self._states = []
        if any(tensor.requires_grad for tensor in tensors.values()):
            return False
        own: list[Any] = [shard_of(tensor) for tensor in tensors.values()]
        try:
            self._states = [
                (
                    # A weak reference holds no memory, and no other storage is taken for it.
                    name, self._names[name], t._version, h.data_ptr(),
                    weakref.ref(h.untyped_storage()), h.shape, h.stride(), t.dtype,
                    None if h is t else h._version,
                )
                for (name, t), h in zip(tensors.items(), own, strict=True)
            ]  # fmt: skip
        except RuntimeError:  # tensors of inference_mode count no changes; some have no memory
            return False
        return True


def id_of(tensor: Any) -> int:
    """The number of a tensor: a weak reference would keep torch.utils.swap_tensors from working."""
    if not hasattr(tensor, "_te_mx_id"):
        tensor._te_mx_id = next(_ids)
    return tensor._te_mx_id


_owners: dict[int, weakref.ref[Any]] = {}  # by id of the first tensor of a weight


def register(module: Any) -> None:
    """Note a frozen module as the owner of its weights, as they are held now."""
    for key in module._weight_keys:
        held = module._held_tensors(key)
        if held is None:
            continue
        number = id(held[0])

        def gone(owner: "weakref.ref[Any]", number: int = number) -> None:
            if _owners.get(number) is owner:
                del _owners[number]

        _owners[number] = weakref.ref(module, gone)


def owner_of(tensors: Sequence[Tensor], key: str) -> Any:
    """The frozen module that holds these very tensors as a weight of this key, or None."""
    reference = _owners.get(id(tensors[0]))
    module = None if reference is None else reference()
    if module is None or key not in module._weight_keys or not module._source.standing:
        return None
    held = module._held_tensors(key)
    if held is None or len(held) != len(tensors):
        return None
    return module if all(a is b for a, b in zip(held, tensors, strict=True)) else None
