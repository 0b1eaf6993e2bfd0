"""Checks of what users say of codes and scales: the name of a format, parts that were not made by
te_mx.quantize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx import formats
from te_mx.arguments import check_address, check_dense, shown
from te_mx.formats import Format
from te_mx.runtime import streams


def format_of(fmt: Any) -> Format:
    """The format of a name. Raises ValueError for anything else."""
    if isinstance(fmt, str):
        return formats.get(fmt)
    raise ValueError(f"fmt must be one of {', '.join(formats.names())}, got {shown(fmt)}")


def name_of(fmt: Format) -> str:
    """How a format is shown: by its short name where it has one."""
    return fmt.short_names[0] if fmt.short_names else fmt.name


def check_copy(
    usage: str, data: Tensor | None, scale: Tensor | None, fmt: Format, rows: int, cols: int,
    transposed: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Codes and scales of one copy as te_mx keeps them, contiguous, checked."""
    if data is None and scale is None:
        return None, None
    if data is None or scale is None:
        have, lack = ("data", "scale") if scale is None else ("scale", "data")
        raise ValueError(f"{usage}_{have} was given without {usage}_{lack}; give both or none")
    # A columnwise copy that lies as the matrix does has its codes one a byte.
    if usage == "rowwise":
        shapes = fmt.codes_shape(rows, cols), fmt.scales_shape(rows, cols)
    elif transposed:
        shapes = fmt.codes_shape(cols, rows), fmt.scales_shape(cols, rows)
    else:
        shapes = (rows, cols), fmt.scales_shape(cols, rows)[::-1]
    codes = _part(f"{usage}_data", data, fmt.element.torch_dtype, shapes[0])
    scales = _part(f"{usage}_scale", scale, fmt.scaling.torch_dtype, shapes[1])
    if codes.device != scales.device:
        raise ValueError(
            f"{usage}_data is on {codes.device} and {usage}_scale on {scales.device}; "
            "move them to one device"
        )
    return codes, scales


def check_codes(fmt: Format, codes: Tensor) -> None:
    """Raise ValueError where bytes of columnwise_data, one code each, are none of the format's."""
    count = 1 << fmt.element.bits
    plain = type(codes) is Tensor and not codes.is_meta and not torch.compiler.is_compiling()
    if count == 256 or not plain or codes.numel() == 0 or streams.capturing(codes.device):
        return
    if (largest := int(codes.max())) >= count:
        raise ValueError(
            f"columnwise_data holds the byte {largest}, and codes of {fmt.name} are 0 to "
            f"{count - 1}, one a byte where they lie as [rows, cols]; packed ones go with "
            "columnwise_transposed=True"
        )


def _part(name: str, tensor: Tensor, dtype: torch.dtype | None, shape: tuple[int, int]) -> Tensor:
    """A part of a `dtype` of one byte as uint8, of fp32 as it is."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    check_dense(name, tensor)
    if dtype == torch.float32:
        if tensor.dtype != dtype:
            use = ".float()"
            if not tensor.is_floating_point():  # bytes of E8M0 are no numbers
                use = ".view(torch.float8_e8m0fnu).float() of E8M0 bytes"
            raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}; use {use}")
    elif tensor.dtype not in (torch.uint8, dtype):
        both = "uint8" if dtype is None else f"uint8 or {dtype}"
        use = ".view(torch.uint8)"
        if tensor.element_size() > 1:
            use = "te_mx.quantize"
            if "scale" in name and tensor.is_floating_point():
                use = ".to(torch.float8_e8m0fnu)"
            elif "scale" in name:
                use = (
                    ".to(torch.uint8) of integers with a byte each, or for four bytes in an int32, "
                    "as DeepGEMM packs them, te_mx.formats.mxfp4_checkpoints.from_deep_gemm"
                )
        raise TypeError(f"{name} must be {both}, got {tensor.dtype}; use {use}")
    if tuple(tensor.shape) != shape:
        why = "one scale for every block, unpadded" if "scale" in name else "flattened to 2-D"
        raise ValueError(f"{name} must have shape {shape} ({why}), got {tuple(tensor.shape)}")
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise ValueError(f"{name} is a negative view, whose bytes are not its codes; copy it")
    check_address(name, tensor)
    stored = torch.float32 if dtype == torch.float32 else torch.uint8
    return tensor.detach().view(stored).contiguous()
