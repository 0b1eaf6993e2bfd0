"""Owners of weight gradients (te_mx/autograd/grad_target.py): parameters of which every rank
has a part, or a copy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement


class Placed:
    """A DTensor parameter; `grads` is how the ranks' gradients make one."""

    reached = False

    def __init__(self, parameter: Any, grads: list[Placement]) -> None:
        self.parameter, self._grads = parameter, grads

    def reduced(self, dw: Tensor) -> Tensor:
        return placed(dw, self.parameter, self._grads)


def placed(dw: Tensor, parameter: Any, grads: list[Placement]) -> DTensor:
    """What ranks computed, as a DTensor that lies as the parameter does."""
    made = DTensor.from_local(
        dw, parameter.device_mesh, grads, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
    return made.redistribute(placements=parameter.placements)
