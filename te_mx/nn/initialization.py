"""reset_parameters() of the modules."""

from __future__ import annotations

from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from te_mx.arguments import check_flag

# Whether modules made here keep a copy of what their weights start with: see
# te_mx.pytorch.quantized_model_init.
preserves: ContextVar[bool] = ContextVar("te_mx_preserves_init", default=False)


def get_high_precision_init_val(parameter: Any) -> Tensor | None:
    """What a weight started with, on the CPU; None once that was cleared."""
    return getattr(parameter, "_high_precision_init_val", None)


def clear_high_precision_init_val(parameter: Any) -> None:
    """Give the memory of that copy back."""
    parameter.__dict__.pop("_high_precision_init_val", None)


def _preserve(parameter: Any) -> None:
    parameter._high_precision_init_val = parameter.detach().to("cpu", copy=True)
    for function in (get_high_precision_init_val, clear_high_precision_init_val):
        setattr(parameter, function.__name__, MethodType(function, parameter))


class Resettable:
    """Mixin of the modules, beside an nn.Module: initial values, also for parameters on the meta
    device."""

    _building: bool = False  # in the constructor, which leaves the meta device alone
    _preserves: bool = False  # copies of what weights start with

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
        self._note_preserving()
        if defer_init or (self._building and _on_meta(self)):
            return
        if module._is_dropped():
            raise RuntimeError(
                f"{module._label()}: frozen without its high-precision weights, there is nothing "
                "to reset; call te_mx.unfreeze_weights(model, dequantize=True) first"
            )
        _make_real(self)
        self._initialize()
        self._preserve_weights()
        # What was kept of the weights before is old now.
        self.__dict__.pop("_microbatch", None)
        if module._frozen is not None:
            module._frozen.kept.clear()

    def _finish_building(self) -> None:
        """The end of a constructor: parameters on the meta device have no values yet."""
        assert isinstance(self, nn.Module)
        self._note_preserving()
        if not _on_meta(self):
            self.reset_parameters()

    def _preserve_weights(self) -> None:
        module: Any = self
        for parameter in module._parameters.values() if self._preserves else ():
            # Norms and biases are not quantized.
            if parameter is not None and parameter.dim() > 1 and not parameter.is_meta:
                _preserve(parameter)

    def _note_preserving(self) -> None:
        if preserves.get():
            self._preserves = True


def _on_meta(module: nn.Module) -> bool:
    return any(p is not None and p.is_meta for p in module._parameters.values())


def _make_real(module: nn.Module) -> None:
    device = torch.get_default_device()
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta and device.type != "meta":
            made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)  # marks such as skip_backward_post_hook
            module._parameters[name] = made
