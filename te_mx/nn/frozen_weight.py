"""Weights that stand still: what `te_mx.freeze_weights` does to one module.

With the master weights kept, freezing adds quantized and packed copies that no checkpoint sees.
With the masters dropped the codes are the weights: for each of them buffers of codes and scales,
which a state_dict shows under the names of nn/frozen_state.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_mx.autograd.operands import quantize_weight, standing_weight
from te_mx.ops import Operand, dequantize_2d
from te_mx.recipe import Settings

FMT = "e4m3"  # of every weight: recipes have no other forward format


class Frozen:
    """How a module is frozen.

    `kept` holds the quantized copies beside kept masters, by key; what is missing is made again.
    `dtypes` (of the weights, by key) and `trained` (requires_grad of the parameters, by name) are
    what unfreezing restores.
    """

    __slots__ = ("dropped", "dtypes", "kept", "settings", "trained")

    def __init__(
        self,
        settings: Settings,
        dtypes: dict[str, torch.dtype],
        trained: dict[str, bool],
        dropped: bool = False,
    ) -> None:
        self.settings = settings
        self.dtypes = dtypes
        self.trained = trained
        self.dropped = dropped
        self.kept: dict[str, Any] = {}

    def without_copies(self) -> Frozen:
        """For a copy of the module, whose next forward quantizes again."""
        return Frozen(self.settings, dict(self.dtypes), dict(self.trained), self.dropped)


class Freezable:
    """Mixin of the modules, beside an nn.Module. A *key* names a weight of the module as the GEMMs
    see it, whatever parameters hold it: split ones are joined, those of groups stacked."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    _frozen: Frozen | None = None
    _weight_keys: tuple[str, ...] = ("weight",)

    # -------------------------------------------------- what a module family says of its weights
    def _whole(self, key: str) -> Tensor:
        """The weight of this key."""
        return getattr(self, key)

    def _sample(self, key: str) -> Tensor:
        """A tensor with the dtype and the device of the weight."""
        return self._whole(key)

    def _shape_of(self, key: str) -> tuple[int, ...]:
        """The shape that its codes have."""
        return tuple(self._whole(key).shape)

    def _held_by(self, key: str) -> tuple[str, ...]:
        """Names of the parameters that hold the weight, as far as it is not computed."""
        return (key,)

    def _standing_weight(self, key: str, settings: Settings, need_dx: bool) -> Any:
        """The weight quantized, and packed for the kernels, for several calls."""
        return standing_weight(self._whole(key), settings, need_dx)

    def _plain_codes(self, key: str, settings: Settings) -> tuple[Tensor, Tensor]:
        """Rowwise codes and scales of the weight."""
        row, _ = quantize_weight(self._whole(key).detach(), settings, False, packed=False)
        return row.codes, row.scales

    def _operand_of(self, codes: Tensor, scales: Tensor) -> Any:
        """What the forward multiplies by, of a weight without a master."""
        return Operand(codes, scales, FMT, "k_last")

    def _set_masters(self, key: str, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """Parameters with the values of the codes."""
        value = dequantize_2d(codes, scales, FMT, "k_last", dtype)
        self.register_parameter(key, nn.Parameter(value))  # type: ignore[attr-defined]

    # -------------------------------------------------------------------------- freezing and back
    def why_not_frozen(self, drop_master: bool) -> str:
        """Why this module cannot be frozen so, or an empty string."""
        if self._is_dropped():
            return ""
        for key in self._weight_keys:
            if self._sample(key).is_meta:
                return f"{key} is on the meta device and has no values; load the weights first"
            if drop_master and not self._is_held(key):
                return (
                    f"{key} is computed by a parametrization or split into parameters, so there "
                    "is no one master to drop; use drop_master=False"
                )
        return ""

    @torch.no_grad()
    def freeze(self, settings: Settings, drop_master: bool = False) -> None:
        """What te_mx.freeze_weights does to this module; frozen already, it stays as it is."""
        frozen = self._frozen or self._mark_frozen(settings)
        self.__dict__.pop("_microbatch", None)
        if frozen.dropped:
            return
        if drop_master:
            made = {key: self._plain_codes(key, frozen.settings) for key in self._weight_keys}
            self._drop_masters(made)
            return
        for key in self._weight_keys:
            if key not in frozen.kept:
                frozen.kept[key] = self._standing_weight(key, frozen.settings, False)

    @torch.no_grad()
    def unfreeze(self) -> None:
        """What te_mx.unfreeze_weights does, with parameters made of codes where there are only
        these."""
        frozen = self._frozen
        if frozen is None:
            return
        if frozen.dropped:
            for key in self._weight_keys:
                codes, scales = self._codes(key)
                delattr(self, f"{key}_codes")
                delattr(self, f"{key}_scale")
                self._set_masters(key, codes, scales, frozen.dtypes[key])
        self._frozen = None
        for name, trained in frozen.trained.items():
            getattr(self, name).requires_grad_(trained)

    def _mark_frozen(self, settings: Settings) -> Frozen:
        """Frozen with the masters kept: the parameters stop training."""
        dtypes = {key: self._sample(key).dtype for key in self._weight_keys}
        trained = {}
        for name, value in self.named_parameters(recurse=False):  # type: ignore[attr-defined]
            trained[name] = value.requires_grad
            value.requires_grad_(False)
        self._frozen = Frozen(settings, dtypes, trained)
        return self._frozen

    def _drop_masters(self, made: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Replace the weights of a frozen module by codes [..., out, in] and scales [..., out,
        ceil(in/32)]."""
        assert isinstance(self, nn.Module) and self._frozen is not None
        self._frozen.dropped = True
        self._frozen.kept.clear()
        for key, (codes, scales) in made.items():
            for name in self._held_by(key):
                self.register_parameter(name, None)
            # The state_dict has them under other names and dtypes. As uint8 they pass through
            # .to(dtype) unharmed.
            self.register_buffer(f"{key}_codes", codes, persistent=False)
            self.register_buffer(f"{key}_scale", scales, persistent=False)

    def _is_held(self, key: str) -> bool:
        """Whether parameters hold the weight, so that it has a place of its own."""
        assert isinstance(self, nn.Module)
        return all(self._parameters.get(name) is not None for name in self._held_by(key))

    # ------------------------------------------------------------------------- without the masters
    def _is_dropped(self) -> bool:
        return self._frozen is not None and self._frozen.dropped

    def _codes(self, key: str) -> tuple[Tensor, Tensor]:
        return getattr(self, f"{key}_codes"), getattr(self, f"{key}_scale")

    def _dropped_operand(self, key: str) -> Any:
        """The weight of a module without masters, for fprop."""
        return self._operand_of(*self._codes(key))

    def _refuse_gradient(self, *tensors: Tensor | None) -> None:
        """Raise RuntimeError where a gradient is asked of a module without masters."""
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            raise RuntimeError(
                f"{self._label()} was frozen with drop_master=True and cannot be differentiated: "  # type: ignore[attr-defined]
                "only the codes that the forward needs are left. Freeze with drop_master=False, "
                "or get a weight back with te_mx.unfreeze_weights(model, dequantize=True), or "
                "run under torch.no_grad()"
            )

    def _frozen_repr(self) -> str:
        if self._frozen is None:
            return ""
        return ", frozen, no master" if self._frozen.dropped else ", frozen"
