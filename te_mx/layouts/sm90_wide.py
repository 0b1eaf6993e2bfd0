"""Blocks of 1 x 128 with fp32 scales on Hopper, as blocks of MX: four of 32 with one scale."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.formats import Format

WIDE, BLOCK = 128, 32
MULTIPLIED = torch.float8_e4m3fn, torch.float8_e5m2  # elements that the tensor cores know


def takes_wide(fmt: Format) -> bool:
    """Whether the tensor cores read the codes of a format that has blocks of 1 x 128, whose scales
    can be aligned where they are powers of two."""
    scaling = fmt.scaling
    known = fmt.element.torch_dtype in MULTIPLIED
    return known and scaling.scale == "fp32" and scaling.block == (1, WIDE)


def block_bytes(scales: Tensor, k: int) -> Tensor:
    """uint8 [R, ceil(k/32)]: the scale bytes of MX for fp32 powers of two [R, ceil(k/128)].

    Raises ValueError for scales that are no powers of two (or NaN). Waits for a device.
    """
    bits = scales.view(torch.int32)
    exponents = bits >> 23
    powers = (bits & 0x7FFFFF == 0) & (exponents > 0) & (exponents < 255)
    if not bool((powers | scales.isnan()).all()):
        raise ValueError(
            "te_mx: scales must be powers of two to be aligned, got other fp32 numbers; quantize "
            "by the rule 'pow2', or pack to layout 'sm90_factors'"
        )
    exponents = torch.where(scales.isnan(), 255, exponents).to(torch.uint8)
    return exponents.repeat_interleave(WIDE // BLOCK, 1)[:, : -(-k // BLOCK)].contiguous()
