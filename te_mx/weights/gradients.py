"""Weight gradients with a place or a time of their own (main_grad, backward_dw) under torch's
data-parallel wrappers, which expect gradients in .grad when backward ends.

Under fully_shard a gradient is averaged over the ranks when it is computed, and added to what the
optimizer has: ``grad`` or ``main_grad`` of the sharded parameter. Under DistributedDataParallel it
is added to what this rank has, and the sum averaged over the ranks; not so inside of no_sync().

The part of a module that holds weight gradients back (delay_wgrad_compute), of every family."""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_mx.autograd.grad_target import (
    Label,
    OwnedGradient,
    Owner,
    Queue,
    Start,
    Use,
    WeightGradient,
    Wgrad,
    started,
)
from te_mx.context.region import first_run
from te_mx.runtime.arguments import shown
from te_mx.torch_internals import running_ddp, wrapped
from te_mx.weights.ranks import above


def owners_of(
    module: Any, parameters: Sequence[Tensor], owned: Mapping[int, Owner] | None
) -> Sequence[Owner]:
    """Whom gradients of weights belong to that several ranks share; none where none do."""
    if owned is not None:
        return [owned[id(parameter)] for parameter in parameters]
    return above.distributed.owners(module, parameters) if wrapped else ()


def grad_target(
    layer: Any, parameters: Sequence[Tensor], first: bool | None, queue: Queue | None,
    owned: Mapping[int, Owner] | None,
) -> WeightGradient | None:  # fmt: skip
    """The place of the gradient of one weight in one call; None when there will be none. owned: the
    owners of local weights, by the id of these."""
    fuse, delay = layer.fuse_wgrad_accumulation, layer.delay_wgrad_compute
    again = first_run() if fuse and first is True else None
    trains = len(parameters) == 1 and parameters[0].requires_grad
    if not (torch.is_grad_enabled() and (trains or any(p.requires_grad for p in parameters))):
        if again is not None:  # a reentrant checkpoint, which runs this again with gradients
            _started(parameters, again)
        return None
    if queue is None and delay:
        queue = layer._wgrad_queue()
    owners = owners_of(layer, parameters, owned) if owned is not None or wrapped else ()
    for parameter in parameters:
        if parameter.is_leaf or (hasattr(parameter, "main_grad") and not delay):
            continue
        which = "delay_wgrad_compute" if delay else "fuse_wgrad_accumulation"
        raise RuntimeError(
            f"{layer._label()}: {which}=True needs weights that are parameters, but something "
            "computes one: a parametrization, functional_call, or FullyShardedDataParallel, in "
            f"place of which use fully_shard; build the module without {which}"
        )
    starts: Sequence[Start | None] = ()
    if fuse and first is True:
        own: Sequence[Tensor] = [owner.parameter for owner in owners] or parameters
        starts = _started(own, again)
    label = layer.__dict__.get("_wgrad_label")
    if label is None:
        label = layer.__dict__["_wgrad_label"] = Label(layer)
    if owners:
        return OwnedGradient(parameters, owners, label, fuse, starts, queue)
    if running_ddp() is not None:
        return replicated(layer, parameters, label, starts, queue)
    return WeightGradient(parameters, label, fuse, starts, queue)


def _started(parameters: Sequence[Tensor], again: dict[int, Start] | None) -> list[Start | None]:
    return [started(p, again) for p in parameters if p.requires_grad]


def reducing_group(parameters: Sequence[Tensor]) -> Any:
    """The process group over which DistributedDataParallel, which runs a forward now, averages the
    gradients of these parameters; None where it does not."""
    ddp = running_ddp()
    if ddp is None or not ddp.require_backward_grad_sync:
        return None
    if ddp not in _reduced:
        named, ignored = ddp.module.named_parameters(), ddp.parameters_to_ignore
        _reduced[ddp] = {id(parameter) for name, parameter in named if name not in ignored}
    reduced = _reduced[ddp]
    return ddp.process_group if any(id(p) in reduced for p in parameters) else None


# What each DistributedDataParallel averages: it fixes that when it is built, and holds them.
_reduced: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()


class ReplicatedGradient(WeightGradient):
    """The place of the gradient of a weight that DistributedDataParallel has on every rank of
    `group`: what is there after this one was added is averaged."""

    __slots__ = ("group",)
    group: Any

    @torch.no_grad()
    def _put(self, wgrad: Wgrad, dtype: torch.dtype, use: Use) -> None:
        super()._put(wgrad, dtype, use)
        if not self.fuse:
            self._average([p.grad for p in self.parameters if p.requires_grad])

    def _fuse(self, wgrad: Wgrad, use: Use) -> None:
        super()._fuse(wgrad, use)
        self._average(self._main_grads(use))

    def _average(self, grads: Sequence[Tensor | None]) -> None:
        for grad in grads:
            if grad is not None:
                grad.div_(torch.distributed.get_world_size(self.group))
                torch.distributed.all_reduce(grad, group=self.group)


def replicated(
    module: Any, parameters: Sequence[Tensor], label: Label, starts: Sequence[Start | None],
    queue: Queue | None,
) -> WeightGradient:  # fmt: skip
    """The place of the gradient of a weight of a module that this rank has as a whole.

    Raises:
        NotImplementedError: DistributedDataParallel lets ranks leave layers out.
    """
    fuse, group = module.fuse_wgrad_accumulation, reducing_group(parameters)
    if group is not None and running_ddp().find_unused_parameters:
        which = "fuse_wgrad_accumulation" if fuse else "delay_wgrad_compute"
        raise NotImplementedError(
            f"{module._label()}: {which}=True does not work under DistributedDataParallel("
            "find_unused_parameters=True): such a gradient is averaged where it is computed, and "
            "ranks that run the layer would wait for those that do not; use "
            "find_unused_parameters=False where all ranks run all layers, or build the layer with "
            f"{which}=False"
        )
    if group is None:
        return WeightGradient(parameters, label, fuse, starts, queue)
    made = ReplicatedGradient(parameters, label, fuse, starts, queue)
    made.group = group
    return made


class DelayedWgrad:
    """Mixin of modules whose backward may leave the weight gradients for ``backward_dw()``."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    delay_wgrad_compute: bool = False
    _delayed: Queue | None = None  # one GEMM for each weight and backward pass, oldest first
    _wgrad_hooks: tuple[Callable[[], Any], ...] = ()

    def _start_delaying(self) -> None:
        """Called by a constructor, when the parameters are there."""
        self.delay_wgrad_compute = True
        self._mark_delayed()

    def _mark_delayed(self: Any) -> None:
        """Data-parallel wrappers written for Transformer Engine wait for backward_dw of parameters
        that say so."""
        for parameter in self.parameters(recurse=False) if self.delay_wgrad_compute else ():
            parameter.skip_backward_post_hook = True

    def _wgrad_queue(self) -> Queue | None:
        """Where a forward tells its backward to leave the GEMM."""
        if not self.delay_wgrad_compute:
            return None
        if self._delayed is None:
            self.__dict__["_delayed"] = deque()
        return self._delayed

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for `backward_dw`: the value of delay_wgrad_compute."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradient that the oldest backward pass left, and put it where that
        pass would have: added to ``weight.grad``, or into ``weight.main_grad``. Then call the
        registered hooks. Without delay_wgrad_compute it does nothing.

        Raises:
            RuntimeError: no backward pass is waiting; or the GEMM reads the input or the output
                gradient itself (save_original_input, recipes with a backward in high precision,
                outside te_mx.autocast), and it was modified in place after that pass. That pass
                no longer waits then.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._delayed:
            raise RuntimeError(
                f"{type(self).__name__}.backward_dw(): no weight gradient is waiting; call it once "
                "after each backward pass in which the weight needs a gradient"
            )
        self._delayed.popleft()()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Have ``hook()`` called at the end of every `backward_dw`; Transformer Engine's name.

        Raises TypeError for what cannot be called."""
        if not callable(hook):
            raise TypeError(f"{type(self).__name__}: hook must be a function, got {shown(hook)}")
        self._wgrad_hooks = (*self._wgrad_hooks, hook)
