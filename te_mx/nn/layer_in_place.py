"""What the layers of other libraries that run in MXFP8 in place have in common."""

from __future__ import annotations

from typing import Any

from torch import nn

from te_mx.nn.mx_module import MXModule
from te_mx.nn.reclassed import Reclassed


class LayerInPlace(Reclassed, MXModule):
    """Mixin before the class of such a layer."""

    def _label(self) -> str:
        assert isinstance(self, nn.Module)
        kind = f"te_mx.{type(self).__name__}"
        return f"{kind} {self.name!r}" if self.name else kind

    @property
    def reset_parameters(self) -> Any:
        """Hidden: the model initializes such layers, and whoever looks for this method must not
        find one."""
        raise AttributeError("reset_parameters: the model initializes this layer")
