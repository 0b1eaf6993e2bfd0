"""reset_parameters() of the modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_mx.arguments import check_flag


class Resettable:
    """Mixin of the modules, beside an nn.Module: initial values, also for parameters on the meta
    device."""

    _building: bool = False  # in the constructor, which leaves the meta device alone

    def _initialize(self) -> None:
        """Write the initial values."""
        raise NotImplementedError

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Give the parameters their initial values again.

        Parameters on the meta device are made real first, as in Transformer Engine: on torch's
        default device, as new nn.Parameters. ``to_empty(device=...)`` before it, as for layers of
        torch, puts them on another one. Where meta is the default device they stay there.

        Args:
            defer_init: Transformer Engine's: True changes nothing.

        Raises:
            TypeError: `defer_init` is no bool.
            RuntimeError: the module is frozen without its high-precision weights.
        """
        assert isinstance(self, nn.Module)
        module: Any = self
        check_flag("reset_parameters: defer_init", defer_init)
        if defer_init or (self._building and _on_meta(self)):
            return
        if module._is_dropped():
            raise RuntimeError(
                f"{module._label()}: frozen without its high-precision weights, there is nothing "
                "to reset; call te_mx.unfreeze_weights(model, dequantize=True) first"
            )
        _make_real(self)
        self._initialize()
        # What was kept of the weights before is old now.
        self.__dict__.pop("_microbatch", None)
        if module._frozen is not None:
            module._frozen.kept.clear()

    def _finish_building(self) -> None:
        """The end of a constructor: parameters on the meta device have no values yet."""
        assert isinstance(self, nn.Module)
        if not _on_meta(self):
            self.reset_parameters()


def _on_meta(module: nn.Module) -> bool:
    return any(p is not None and p.is_meta for p in module._parameters.values())


def _make_real(module: nn.Module) -> None:
    device = torch.get_default_device()
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta and device.type != "meta":
            made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)  # marks such as skip_backward_post_hook
            module._parameters[name] = made
