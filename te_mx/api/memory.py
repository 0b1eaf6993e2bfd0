"""te_mx.record_saved: how many bytes each layer keeps for backward; te_mx.checkpoint_ops: what
selective activation checkpointing may save of te_mx layers.

torch's hooks on saved tensors see all that autograd saves, of every layer and of whatever lies
between them; hooks on the layers say whose forward is running."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from te_mx._ops.gemm import GEMM
from te_mx._ops.grouped_gemm import GEMM_ROWS
from te_mx.nn.base import MXModule
from te_mx.runtime.arguments import check_module


class Saved(NamedTuple):
    """Bytes that the forwards of one layer kept for backward, and how many others keep too."""

    bytes: int
    shared: int


class Recorded(NamedTuple):
    """What the forwards of a model kept: its layers together, what lies outside of them (counting
    what layers do not keep), and all of it."""

    layers: int
    elsewhere: int

    @property
    def total(self) -> int:
        return self.layers + self.elsewhere


_of_layers: WeakKeyDictionary[nn.Module, Saved] = WeakKeyDictionary()
_of_models: WeakKeyDictionary[nn.Module, Recorded] = WeakKeyDictionary()


def is_layer(module: nn.Module) -> bool:
    """Whether te_mx.audit has a row for a module."""
    return isinstance(module, MXModule | nn.Linear)


def saved_by(layer: nn.Module) -> Saved | None:
    """What was recorded last of a layer, None where nothing was."""
    return _of_layers.get(layer)


def recorded(model: nn.Module) -> Recorded | None:
    """What was recorded last of a model, None where nothing was."""
    return _of_models.get(model)


class record_saved:
    """Record what every linear layer of `model` keeps for backward, for
    ``te_mx.audit(model, memory=True)``::

        with te_mx.record_saved(model):
            loss = model(x).sum()
        print(te_mx.audit(model, memory=True))

    Counted are the storages that autograd saves while forwards run inside, whole, each once a
    layer, and not those of the model's parameters and buffers. What a layer that runs again in
    backward (checkpointing) keeps is what it does not throw away, often nothing. Compiled code
    shows nothing: record without torch.compile. Meanwhile autograd does not notice when something
    that it saved is changed in place.

    Args:
        model: what it recorded before is replaced when the region is left.

    Raises:
        TypeError: `model` is no nn.Module.
        RuntimeError: the same object is entered twice.
    """

    def __init__(self, model: nn.Module) -> None:
        check_module(model)
        self._model = model
        self._running: list[nn.Module | None] = []
        self._exits: list[Any] = []
        self._sizes: dict[int, int] = {}
        self._seen: dict[StorageWeakRef, set[nn.Module | None]] = {}
        self._entered = False

    def __enter__(self) -> "record_saved":
        if self._entered:
            raise RuntimeError("record_saved: was entered before; make a new one")
        self._entered = True
        self._running.append(None)
        for module in self._model.modules():
            if is_layer(module):
                self._exits += [
                    module.register_forward_pre_hook(self._starts, prepend=True).remove,
                    module.register_forward_hook(self._ends, always_call=True).remove,
                ]
        # A copy that shares memory: returned as it is, an output would hold its own graph.
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)
        hooks.__enter__()
        self._exits.append(lambda: hooks.__exit__())
        return self

    def __exit__(self, *exc_info: object) -> None:
        for leave in reversed(self._exits):
            leave()
        self._exits.clear()
        if exc_info[0] is None:
            self._count()
        self._seen.clear()

    def _starts(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def _ends(self, module: nn.Module, args: Any, out: Any) -> None:
        while self._running[-1] is not None and self._running.pop() is not module:
            pass

    def _pack(self, saved: Tensor) -> Tensor:
        # Weak references keep a storage's identity, not its memory.
        storage = saved.untyped_storage()
        ref = StorageWeakRef(storage)
        self._seen.setdefault(ref, set()).add(self._running[-1])
        self._sizes[ref.cdata] = storage.nbytes()
        return saved.detach()

    def _count(self) -> None:
        held = [*self._model.parameters(), *self._model.buffers()]
        own = {StorageWeakRef(tensor.untyped_storage()) for tensor in held}
        sizes: dict[nn.Module, list[int]] = {
            m: [0, 0] for m in self._model.modules() if is_layer(m)
        }
        inside = elsewhere = 0
        for ref, keepers in self._seen.items():
            if ref in own:
                continue
            size = self._sizes[ref.cdata]
            layers = [keeper for keeper in keepers if keeper is not None]
            inside += size if layers else 0
            elsewhere += 0 if layers else size
            for layer in layers:
                sizes[layer][0] += size
                sizes[layer][1] += size if len(keepers) > 1 else 0
        for layer, (whole, shared) in sizes.items():
            _of_layers[layer] = Saved(whole, shared)
        _of_models[self._model] = Recorded(inside, elsewhere)


def checkpoint_ops() -> list[Any]:
    """The ops of te_mx that are dear to run again: the GEMMs of forward passes, those of groups
    included. For ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, alone or beside
    ops of torch::

        context = functools.partial(
            create_selective_checkpoint_contexts, te_mx.checkpoint_ops()
        )
        y = checkpoint(block, x, use_reentrant=False, context_fn=context)

    Backward then quantizes, normalizes and activates again, and multiplies nothing again. What a
    GEMM returns is saved: its result, and inside te_mx.LayerNormMLP what GELU reads."""
    return [GEMM, GEMM_ROWS]
