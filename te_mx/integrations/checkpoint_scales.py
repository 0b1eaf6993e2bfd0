"""Scales of checkpoints, in the dtypes that others give them."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

_BIAS, _LARGEST = 127, 254  # of E8M0; 255 is NaN


def scale_bytes(name: str, scales: Tensor) -> Tensor:
    """E8M0 bytes of the scales of a tensor of this name: bytes, float8_e8m0fnu, which is the same,
    or the powers of two themselves in another floating dtype.

    Raises:
        ValueError: they are none of these.
    """
    if scales.dtype == torch.uint8:
        return scales
    if scales.dtype == torch.float8_e8m0fnu:
        return scales.view(torch.uint8)
    got = str(scales.dtype)
    if scales.is_floating_point():
        mantissas, exponents = torch.frexp(scales.double())
        made = exponents + (_BIAS - 1)  # a mantissa is 1/2 and above
        wrong = (mantissas != 0.5) | (made < 0) | (made > _LARGEST)
        if not wrong.any():
            return made.to(torch.uint8)
        got += f" with {scales[wrong][0].item()}"
    raise ValueError(
        f"{name}: scales must be E8M0 bytes (uint8 or float8_e8m0fnu) or powers of two from 2^-127 "
        f"to 2^127 in a floating dtype, got {got}; if they are right, the format is another one: "
        "say so in the quantization_config, or dequantize the checkpoint with the tool that wrote "
        "it"
    )


class ScalesAsBytes(ConversionOps):
    """The first step of Transformers' conversions of scales: what is merged then is bytes, and does
    not depend on what torch makes of several dtypes."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The same tensors, or lists of tensors, as bytes."""
        name = kwargs.get("full_layer_name") or ""
        return {
            pattern: [scale_bytes(name or pattern, one) for one in given]
            if isinstance(given, list)
            else scale_bytes(name or pattern, given)
            for pattern, given in input_dict.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """Bytes are saved as bytes."""
        return self


def refuse_casts(files: Any, end: str) -> None:
    """Raise ValueError for scales that are no bytes in safetensors files where Transformers would
    cast them to bytes: before 5.21 it does not ask quantizers (``get_new_dtype``)."""
    if hasattr(HfQuantizer, "get_new_dtype"):
        return
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if not name.endswith(end):
                    continue
                if (dtype := file.get_slice(name).get_dtype()) != "U8":
                    raise ValueError(
                        f"{name}: scales must be bytes (U8) for this version of Transformers, "
                        f"which would round others to integers, got {dtype}; install 5.21 or later"
                    )
