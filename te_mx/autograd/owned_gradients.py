"""Weight gradients that a process computes and does not own alone: what several ranks computed is
summed and cut, and what is left for this rank goes to the parameter that the optimizer sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from te_mx.autograd.wgrad import (
    Queue,
    Start,
    Use,
    Versions,
    WeightGradient,
    Wgrad,
    has_begun,
    overwrites,
)


class Owner(Protocol):
    """Whom the gradient of one weight belongs to.

    parameter: what the optimizer has. reached: whether autograd goes from what the forward ran with
    to a parameter of the module, and so knows what backward passes for some tensors only are for.
    """

    parameter: Tensor
    reached: bool

    def reduced(self, dw: Tensor) -> Tensor:
        """What this rank has of the gradient, like the parameter; a collective operation."""


class OwnedGradient(WeightGradient):
    """The place of the gradient of one weight: ``main_grad`` or ``grad`` of its owners.

    Args:
        weights: what the forward ran with.
        owners: one for each of them.
        label, fuse, starts, queue: as of WeightGradient.
    """

    __slots__ = ("owners",)

    def __init__(
        self, weights: Sequence[Tensor], owners: Sequence[Owner], label: str, fuse: bool,
        starts: Sequence[Start | None], queue: Queue | None,
    ) -> None:  # fmt: skip
        super().__init__(weights, label, fuse, starts, queue)
        self.owners = owners

    def take(self, wgrad: Wgrad, dtype: torch.dtype, node: Any = None) -> Tensor | None:
        use = self._use(node)
        for weight, owner, wanted in zip(self.parameters, self.owners, use.wanted, strict=True):
            if weight.requires_grad and not wanted and not owner.reached:
                raise NotImplementedError(
                    f"{self.label}: a backward pass for some tensors only (torch.autograd.grad, "
                    "backward(inputs=..), the input part of a zero-bubble pipeline) does not say "
                    "whether its weight, a DTensor, is one of them; run a whole backward pass, "
                    "such as Schedule1F1B does, or build the layer without fuse_wgrad_accumulation "
                    "and delay_wgrad_compute"
                )
        if not any(use.wanted):
            return None
        for owner in self.owners:
            if self.fuse and owner.parameter.requires_grad:
                self._main_grad(owner)  # what is wrong with it is said before anything runs
        versions = Versions(wgrad.reads)
        if self.queue is None:
            self._finish(wgrad, dtype, versions, use)
        else:
            self.queue.append(lambda: self._finish(wgrad, dtype, versions, use))
        return self._zeros(use, dtype)

    @torch.no_grad()
    def _finish(self, wgrad: Wgrad, dtype: torch.dtype, versions: Versions, use: Use) -> None:
        versions.check(self.label)
        dw_NK = wgrad(None, torch.float32 if self.fuse else dtype, False)
        parts = [dw_NK] if len(self.owners) == 1 else [p.clone() for p in self._parts(dw_NK)]
        for owner, dw, wanted in zip(self.owners, parts, use.wanted, strict=True):
            if not (wanted and owner.parameter.requires_grad):
                continue
            mine, parameter = owner.reduced(dw), owner.parameter
            if self.fuse:
                self._add_to_main(owner, mine, use)
            elif parameter.grad is None:
                parameter.grad = mine.to(parameter.dtype)
            else:
                parameter.grad += mine

    def _add_to_main(self, owner: Owner, mine: Tensor, use: Use) -> None:
        main, parameter = self._main_grad(owner), owner.parameter
        if not hasattr(main, "to_local") and hasattr(mine, "to_local"):
            mine = mine.to_local()
        if overwrites(parameter, use.task):
            main.copy_(mine)
            has_begun(parameter, use.task)
        else:
            main.add_(mine)
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True

    def _main_grad(self, owner: Owner) -> Tensor:
        parameter = owner.parameter
        main = getattr(parameter, "main_grad", None)
        if not isinstance(main, Tensor):
            raise RuntimeError(
                f"{self.label}: fuse_wgrad_accumulation=True adds the weight gradient to "
                "main_grad of the parameter that the optimizer has, and it has none; set it before "
                "backward, e.g. weight.main_grad = torch.zeros_like(weight, dtype=torch.float32) "
                "for the weights of model.parameters()"
            )
        held = parameter if hasattr(main, "to_local") else _local(parameter)
        if main.shape != held.shape or main.device != held.device:
            raise RuntimeError(
                f"{self.label}: main_grad must be like the parameter, {_kind(parameter)} "
                f"{tuple(parameter.shape)}, or like what this rank has of it, a plain tensor "
                f"{tuple(_local(parameter).shape)}, on {parameter.device}; got {_kind(main)} "
                f"{tuple(main.shape)} on {main.device}"
            )
        return main


def _kind(tensor: Tensor) -> str:
    return "a DTensor" if hasattr(tensor, "to_local") else "a plain tensor"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
