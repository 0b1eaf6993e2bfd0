"""Grouped problems on Hopper: one launch quantizes all groups, one multiplies them. Ends of groups
are read by the device, and nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_mx.backends import sm90
from te_mx.backends.base import (
    FLOAT_DTYPES,
    FORMATS,
    SCALE_RULES,
    Operand,
    QuantizedParts,
    blocks,
    pointer,
    typed_address,
)
from te_mx.backends.grouped import StackedOperand
from te_mx.backends.sm90_grouped_layout import group_tiles, shapes_k, shapes_rows
from te_mx.backends.sm90_layout import packed_shapes

_MOST_PLACES = 256  # te_mx/sm90_grouped.h
_U8, _I32, _F32 = torch.uint8, torch.int32, torch.float32


def offs_on_device(offs: Tensor, device: torch.device) -> Tensor:
    """End offsets on the device. Those of the CPU travel as arguments of a kernel: no copy from
    memory that a CUDA graph could not read again.
    """
    if not offs.is_cpu:
        return offs.contiguous()
    there = torch.empty(len(offs), dtype=_I32, device=device)
    index = there.device.index
    status = sm90.native().upload_ends(  # type: ignore[union-attr]
        offs.tolist(), there.data_ptr(), sm90.stream(index), index
    )
    _expect(status, "end offsets")
    return there


def _expect(status: int, what: str) -> None:
    if not sm90.supported(status):
        raise RuntimeError(
            f"te_mx internal error: the Hopper kernels do not take {what}; they count rows, "
            "columns and rows of all weights in 31 bits"
        )


def _groups(offs: Tensor, capacity: int, rows: int) -> tuple[int, bool, int, int, int]:
    return offs.data_ptr(), offs.dtype == torch.int64, len(offs), rows, capacity


def _empty(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    codes, words = shapes
    return (
        torch.empty(codes, dtype=_U8, device=device),
        torch.empty(words, dtype=_I32, device=device),
    )


def _addresses(parts: tuple[Tensor, Tensor] | None) -> tuple[int, int]:
    return (0, 0) if parts is None else (parts[0].data_ptr(), parts[1].data_ptr())


def quantize(
    x: Tensor, offs: Tensor, capacity: int, fmt: str, rowwise: bool, columnwise: bool, rule: str,
    col_sum: bool, spread: int,
) -> QuantizedParts:  # fmt: skip
    """As ops.quantize_grouped with a spread, for a non-empty x."""
    (rows, cols), groups, device = x.shape, len(offs), x.device
    x, offs = sm90.rows_of(x), offs_on_device(offs, device)
    row = _empty(shapes_rows(rows, cols, groups), device) if rowwise else None
    col = _empty(shapes_k(rows, cols, groups), device) if columnwise else None
    sums = partial = None
    if col_sum:
        sums = torch.empty((groups, cols), dtype=_F32, device=device)
        partial = torch.empty((group_tiles(rows, groups), cols), dtype=_F32, device=device)
    index = device.index
    status = sm90.native().quantize_grouped(  # type: ignore[union-attr]
        (x.data_ptr(), rows, cols, x.stride(0), FLOAT_DTYPES[x.dtype]),
        _groups(offs, capacity, rows), FORMATS[fmt].native_id, SCALE_RULES[rule],
        _addresses(row), _addresses(col), spread, pointer(sums), pointer(partial),
        sm90.stream(index), index,
    )  # fmt: skip
    _expect(status, f"{groups} groups of rows of {tuple(x.shape)}")
    return QuantizedParts(
        row[0][:, :cols] if row else None, row[1] if row else None,
        col[0] if col else None, col[1] if col else None, sums,
    )  # fmt: skip


def weights_shapes(groups: int, rows: int, cols: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the codes, with the padding of their rows, and the scales of all weights."""
    codes, words = packed_shapes(rows, cols)
    return (groups, *codes), (groups, *words)


def aligned(operand: StackedOperand) -> StackedOperand:
    """An operand of order "sm90" whose rows lie as the kernels read them."""
    codes, words = operand.codes, operand.scales
    shape, _ = weights_shapes(*codes.shape)
    lies = codes.stride() == (shape[1] * shape[2], shape[2], 1) and codes.data_ptr() % 16 == 0
    if not lies:
        fresh = torch.empty(shape, dtype=_U8, device=codes.device)[..., : codes.shape[2]]
        codes = fresh.copy_(codes)
    return operand._replace(codes=codes, scales=words.contiguous())


def _sources(weights: Sequence[Tensor] | Tensor) -> tuple[list[int], int, torch.dtype, object]:
    """Addresses of weights [rows, cols], elements between their rows, their dtype, and what must
    live until they are read."""
    if isinstance(weights, Tensor):
        if weights.stride(2) != 1:
            weights = weights.contiguous()
        start, step = weights.data_ptr(), weights.stride(0) * weights.element_size()
        addresses = [start + i * step for i in range(len(weights))]
        return addresses, weights.stride(1), weights.dtype, weights
    first = weights[0]
    stride, dtype = first.stride(), first.dtype
    if stride[1] != 1 or any(w.stride() != stride or w.dtype != dtype for w in weights):
        common = dtype if len({FLOAT_DTYPES[w.dtype] for w in weights}) == 1 else _F32
        weights = [w.to(common).contiguous() for w in weights]
        stride, dtype = weights[0].stride(), common
    return [w.data_ptr() for w in weights], stride[0], dtype, weights


def quantize_weights(
    weights: Sequence[Tensor] | Tensor, fmt: str, columnwise: bool, rule: str, spread: int
) -> list[Tensor]:
    """As te_mx::quantize_weights, for weights that are not empty, or one tensor of all
    [G, rows, cols]."""
    groups, (rows, cols), device = len(weights), weights[0].shape, weights[0].device
    addresses, stride, dtype, _alive = _sources(weights)
    made: list[tuple[Tensor, Tensor]] = []
    for shape in ((rows, cols), (cols, rows))[: 1 + columnwise]:
        if spread >= 0:
            made.append(_empty(weights_shapes(groups, *shape), device))
        else:
            made.append(_empty_plain(groups, rows, cols, bool(made), device))
    index = device.index
    status = sm90.native().quantize_stacked(  # type: ignore[union-attr]
        (0, rows, cols, stride, FLOAT_DTYPES[dtype]), addresses, FORMATS[fmt].native_id,
        SCALE_RULES[rule], _addresses(made[0]), _addresses(made[1] if columnwise else None), spread,
        sm90.stream(index), index,
    )  # fmt: skip
    _expect(status, f"{groups} weights of {(rows, cols)}")
    widths = (cols, rows) if spread >= 0 else (cols, cols)
    return [
        part for (codes, words), width in zip(made, widths, strict=False)
        for part in (codes[:, :, :width], words)
    ]  # fmt: skip


def _empty_plain(
    groups: int, rows: int, cols: int, columns: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Plain codes and scale bytes of all weights; columns lie as the weight does."""
    scales = (groups, blocks(rows), cols) if columns else (groups, rows, blocks(cols))
    codes = torch.empty((groups, rows, cols), dtype=_U8, device=device)
    return codes, torch.empty(scales, dtype=_U8, device=device)


def gemm_rows(
    a: StackedOperand, b: Operand, offs: Tensor, capacity: int, bias: Tensor | None, out: Tensor
) -> None:
    """As te_mx::gemm_rows on packed operands that are not empty."""
    if bias is not None:
        bias = bias.contiguous()
    problem = (*_side(b.codes, b), *_side(a.codes, a), len(out), a.rows, a.k)
    epilogue = _epilogue(out, out.shape[1], False, bias)
    offs, index = offs_on_device(offs, out.device), out.device.index
    status = sm90.native().gemm_rows(  # type: ignore[union-attr]
        problem, epilogue, _groups(offs, capacity, len(out)), -1, sm90.stream(index), index
    )
    _expect(status, f"groups of rows of {tuple(out.shape)} and {a.groups} weights")


def gemm_k(
    a: Operand, b: Operand, offs: Tensor, capacity: int, rows: int, out: Tensor, accumulate: bool,
    first_rows: Sequence[int] = (),
) -> None:  # fmt: skip
    """As te_mx::gemm_k on packed operands that are not empty. With first_rows, `out` [n, m] is the
    product that lies first in memory, and that of group i begins first_rows[i] rows behind it."""
    problem = (*_side(b.codes, b), *_side(a.codes, a), len(b.codes), len(a.codes), 0)
    epilogue = _epilogue(out, out.shape[-1], accumulate, None)
    offs, index = offs_on_device(offs, out.device), out.device.index
    status = sm90.native().gemm_k(  # type: ignore[union-attr]
        problem, epilogue, _groups(offs, capacity, rows), -1, sm90.stream(index), index, first_rows
    )
    _expect(status, f"products of {tuple(out.shape)}")


def places_of(outs: Sequence[Tensor]) -> tuple[Tensor, list[int]] | None:
    """The one of several matrices [n, m] that lies first, and how many rows behind it each begins;
    None unless these are whole numbers that the kernel can count.

    Slices of one buffer, in any order and with gaps of whole rows, are what this is for.
    """
    first = min(outs, key=Tensor.data_ptr)
    base, row = first.data_ptr(), first.shape[1] * first.element_size()
    behind = [out.data_ptr() - base for out in outs]
    if len(outs) > _MOST_PLACES or any(b % row for b in behind):
        return None
    rows = [b // row for b in behind]
    return None if max(rows) + len(first) > sm90.MOST else (first, rows)


def _side(codes: Tensor, operand: Operand | StackedOperand) -> tuple[tuple[int, int], int]:
    return (codes.data_ptr(), operand.scales.data_ptr()), FORMATS[operand.fmt].native_id


def _epilogue(out: Tensor, ldo: int, accumulate: bool, bias: Tensor | None) -> tuple[int, ...]:
    return (*typed_address(out), ldo, accumulate, *typed_address(bias), 0, 0, 0, 0, 0, 0)
