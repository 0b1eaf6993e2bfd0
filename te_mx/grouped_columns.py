"""Operands of te_mx.grouped_wgrad that are quantized already: columnwise copies, whose blocks hold
rows of one group where every group starts at a block.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import Operand
from te_mx.arguments import shown
from te_mx.autograd.grouped_operands import Groups
from te_mx.dispatch.groups import scale_rows
from te_mx.grouped_arguments import readable
from te_mx.grouped_rows import aligned
from te_mx.layouts.plain import COLS, GROUPED_COLS
from te_mx.tensor import MXTensor

OWNER = "grouped_wgrad"


def columns_of(name: str, tensor: Any) -> Operand:
    """The columnwise copy of an MXTensor [R, .], logical [., R] in layout "cols".

    Raises:
        TypeError: it is no MXTensor.
        ValueError: it is no matrix, has no columnwise copy, or blocks that hold several columns.
    """
    if not isinstance(tensor, MXTensor):
        raise TypeError(
            f"{OWNER}: grad and inp must both be tensors or both MXTensors, got {name} of "
            f"{shown(tensor)}"
        )
    if len(tensor.shape) != 2:
        raise ValueError(f"{OWNER}: {name} must be a matrix, got shape {tuple(tensor.shape)}")
    operand = tensor.operand("columnwise")
    if operand is None:
        raise ValueError(
            f"{OWNER}: {name} has no columnwise copy, whose blocks run along the rows that are "
            "summed; quantize with columnwise=True"
        )
    fmt = operand.format
    if not GROUPED_COLS.takes(fmt):
        raise ValueError(
            f"{OWNER}: {name} is {fmt.name}, whose blocks hold several columns; quantize it in "
            "blocks of one row"
        )
    if fmt.transform is not None:
        raise ValueError(
            f"{OWNER}: {name} is {fmt.name}, whose transform mixes the rows of a block, also those "
            f"of no group; quantize it as {fmt.untransformed.name!r}"
        )
    if operand.layout.name != COLS.name:
        codes, scales = COLS.pack(fmt, operand.codes, operand.scales, operand.k)
        operand = operand._replace(codes=codes, scales=scales, spec=f"{fmt.name}@{COLS.name}")
    return operand


def grouped_columns(
    sides: dict[str, Operand], offs: Tensor, alignment: int
) -> tuple[list[Operand], Groups]:
    """Operands in layout "cols", by name, as `gemm_k` reads them, and their groups.

    Raises:
        ValueError: a group starts inside of a block, or may do so where the host cannot look.
    """
    tokens = next(iter(sides.values())).codes
    rows = aligned(offs, alignment, tokens, OWNER, gather=False)
    ends = rows.groups.offs
    for name, side in sides.items():
        block = side.format.block
        if alignment % block == 0 or len(ends) < 2:
            continue
        remedy = f"let groups start at multiples of {block}, with alignment={block}"
        if not readable(ends):
            raise ValueError(
                f"{OWNER}: {name} is quantized in blocks of {block} rows, and where offs is on a "
                f"device nobody can see whether groups start at blocks; {remedy}"
            )
        bounds = ends.tolist()
        for g, (start, end) in enumerate(itertools.pairwise(bounds), 1):
            if start % block and end > start:
                raise ValueError(
                    f"{OWNER}: group {g} starts at row {start}, inside of one of the blocks of "
                    f"{block} rows in which {name} is quantized; {remedy}"
                )
    made = []
    for side in sides.values():
        codes = rows.taken(side.codes)
        scales = _grouped_scales(side, ends.to(codes.device))
        spec = side.spec.replace(f"@{COLS.name}", f"@{GROUPED_COLS.name}")
        made.append(side._replace(codes=codes, scales=scales, spec=spec))
    return made, rows.groups


def _grouped_scales(side: Operand, ends: Tensor) -> Tensor:
    """Scales [blocks, columns] with the row for each group that layout "grouped_cols" has room for:
    those of group i lie i rows later."""
    block, scales = side.format.block, side.scales
    made = scales.new_zeros(scale_rows(side.k, len(ends), block), scales.shape[1])
    if not len(ends):
        return made
    at = torch.arange(len(scales), device=scales.device)
    last = (ends.long().clamp(0, side.k).cummax(0).values + block - 1) // block
    group = torch.searchsorted(last, at, right=True).clamp(max=len(ends) - 1)
    return made.index_copy(0, at + group, scales)
