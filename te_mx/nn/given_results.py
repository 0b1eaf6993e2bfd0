"""An input that brings the results of the layers that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Given:
    """Stands for a tensor x in a forward that asks for its shape and hands it to these layers, and
    does nothing else with it."""

    def __init__(self, x: Tensor, layers: Sequence[Any], made: Sequence[Tensor]) -> None:
        self.x, self.layers, self.made = x, layers, made

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def result_of(self, layer: Any) -> Tensor:
        """What a layer makes of x."""
        for one, made in zip(self.layers, self.made, strict=True):
            if one is layer:
                return made
        raise RuntimeError("te_mx internal error: a layer was given the results of others")
