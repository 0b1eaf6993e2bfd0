"""Checks of codes and scales that were not made by te_mx.quantize."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.arguments import check_dense
from te_mx.backends.base import FORMATS, blocks


def check_copy(
    usage: str, data: Tensor | None, scale: Tensor | None, fmt: str, rows: int, cols: int,
    transposed: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Codes and scales of one copy as contiguous uint8, checked."""
    if data is None and scale is None:
        return None, None
    if data is None or scale is None:
        have, lack = ("data", "scale") if scale is None else ("scale", "data")
        raise ValueError(f"{usage}_{have} was given without {usage}_{lack}; give both or none")
    if usage == "rowwise":
        shapes = (rows, cols), (rows, blocks(cols))
    elif transposed:
        shapes = (cols, rows), (cols, blocks(rows))
    else:
        shapes = (rows, cols), (blocks(rows), cols)
    codes = _bytes(f"{usage}_data", data, FORMATS[fmt].torch_dtype, shapes[0])
    scales = _bytes(f"{usage}_scale", scale, torch.float8_e8m0fnu, shapes[1])
    if codes.device != scales.device:
        raise ValueError(
            f"{usage}_data is on {codes.device} and {usage}_scale on {scales.device}; "
            "move them to one device"
        )
    return codes, scales


def _bytes(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    check_dense(name, tensor)
    if tensor.dtype not in (torch.uint8, dtype):
        raise TypeError(
            f"{name} must be uint8 or {dtype}, got {tensor.dtype}; use .view(torch.uint8)"
        )
    if tuple(tensor.shape) != shape:
        why = "one scale for every 32 elements, unpadded" if "scale" in name else "flattened to 2-D"
        raise ValueError(f"{name} must have shape {shape} ({why}), got {tuple(tensor.shape)}")
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise ValueError(f"{name} is a negative view, whose bytes are not its codes; copy it")
    return tensor.detach().view(torch.uint8).contiguous()
