"""Weight gradients with a place or a time of their own (main_grad, backward_dw) under torch's
data-parallel wrappers, which expect gradients in .grad when backward ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from te_mx.autograd.owned_gradients import Owner


def owners_of(module: Any, label: str, parameters: Sequence[Tensor]) -> list[Owner]:
    """Who puts the gradients of weights together that belong to several ranks; none where they
    belong to this one.

    Raises:
        NotImplementedError: a wrapper that runs a module now would lose the gradients, or leave
            them different on every rank.
    """
    if module._owned is not None:
        return [module._owned[id(parameter)] for parameter in parameters]
    # What fully_shard and FullyShardedDataParallel set on every module whose parameters they swap.
    if getattr(module, "_is_fsdp_managed_module", False):
        if module.delay_wgrad_compute:
            raise NotImplementedError(
                f"{label}: delay_wgrad_compute=True does not work under fully_shard or "
                "FullyShardedDataParallel, which reduce gradients when backward ends and free what "
                "they belong to: those that backward_dw computes later would be lost, and the "
                "weight never move; build the layer with delay_wgrad_compute=False"
            )
        raise NotImplementedError(
            f"{label}: fuse_wgrad_accumulation=True does not work under fully_shard or "
            "FullyShardedDataParallel, which make the weight of every forward from its shards: it "
            "has no main_grad, and its optimizer would not see one; build the layer with "
            "fuse_wgrad_accumulation=False"
        )
    ddp: Any = DistributedDataParallel._active_ddp_module
    if ddp is None or not module.delay_wgrad_compute:
        return []
    reduced = {id(parameter) for parameter in ddp._module_parameters}
    if any(id(parameter) in reduced for parameter in parameters):
        raise NotImplementedError(
            f"{label}: delay_wgrad_compute=True does not work under DistributedDataParallel, which "
            "averages gradients inside the backward pass: those that backward_dw computes later "
            "would differ from rank to rank; build the layer with delay_wgrad_compute=False, or "
            "have DistributedDataParallel ignore its weight and average the gradient after "
            "backward_dw"
        )
    return []
