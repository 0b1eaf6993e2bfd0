"""What a forward in MXFP8 asks of its input and of every parameter that it reads.

Parameters may be replaced at any time (by name, by load_state_dict(assign=True), on the meta
device), so this is asked in every call, before any address is taken. Outside te_mx.autocast torch's
own functions ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

_STRIDED = torch.strided
FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))


class Checked:
    """Mixin of the modules: looks at dtypes, devices and shapes, which costs little and waits for
    no device."""

    def _label(self) -> str:
        """The layer's name in errors."""
        raise NotImplementedError

    def _codes(self, key: str) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight without a master."""
        raise NotImplementedError

    def _check_shape(self, inp: Tensor, name: str, size: int) -> None:
        """Raise unless inp is a tensor [..., size]."""
        if not isinstance(inp, Tensor):
            raise TypeError(f"{self._label()}: inp must be a tensor, got {type(inp).__name__}")
        shape = inp.shape
        if not shape or shape[-1] != size:
            raise ValueError(
                f"{self._label()}: the last dimension of inp must be {name}={size}, got inp of "
                f"shape {tuple(shape)}"
            )

    def _check_kind(self, inp: Tensor) -> None:
        """Raise unless inp is dense and of a dtype that is quantized."""
        if inp.dtype not in FLOATS or inp.layout is not _STRIDED:
            raise TypeError(
                f"{self._label()}: MXFP8 takes dense tensors in float32, bfloat16 and float16, got "
                f"inp {inp.dtype}, {inp.layout}; {_REMEDY}"
            )

    def _check_codes(self, keys: Sequence[str], device: torch.device) -> None:
        """Raise unless the codes of weights without a master are on this device."""
        for key in keys:
            codes, _ = self._codes(key)
            if codes.device != device:
                raise ValueError(
                    f"{self._label()}: inp is on {device} and {key}_codes on {codes.device}; move "
                    "one"
                )

    def _check_parameter(
        self, name: str, value: Tensor | None, shape: tuple[int, ...], device: torch.device
    ) -> None:
        """Raise unless a parameter can be read beside an inp on this device."""
        if (
            value is None
            or value.device != device
            or value.shape != shape
            or value.dtype not in FLOATS
        ):
            self._refuse_parameter(name, value, shape, device)

    def _refuse_parameter(
        self, name: str, value: Tensor | None, shape: tuple[int, ...], device: torch.device
    ) -> NoReturn:
        if value is None:
            raise ValueError(f"{self._label()}: {name} is None, it must be a parameter of {shape}")
        if value.dtype not in FLOATS:
            raise TypeError(
                f"{self._label()}: MXFP8 takes float32, bfloat16 and float16, got {name} "
                f"{value.dtype}; {_REMEDY}"
            )
        if value.device != device:
            remedy = "move one"
            if value.is_meta:
                remedy = f"{name} has no values yet: load it, or to_empty() and reset_parameters()"
            raise ValueError(
                f"{self._label()}: inp is on {device} and {name} on {value.device}; {remedy}"
            )
        raise ValueError(
            f"{self._label()}: {name} must have shape {shape}, got {tuple(value.shape)}; give it "
            "that shape, or build the layer with other sizes"
        )


_REMEDY = "convert it, or run this layer under te_mx.autocast(enabled=False)"
