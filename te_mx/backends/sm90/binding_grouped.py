"""Grouped problems on Hopper: one launch quantizes all groups, one multiplies them. Ends of groups
are read by the device, and nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import (
    FLOAT_DTYPES,
    FORMATS,
    LAYOUTS,
    SCALE_RULES,
    Operand,
    QuantizedParts,
    StackedOperand,
    blocks,
    code_bytes,
    format_fields,
    pointer,
    typed_address,
)
from te_mx.backends.sm90 import binding as sm90
from te_mx.backends.sm90.layouts.groups import group_tiles, shapes_k, shapes_rows
from te_mx.backends.sm90.layouts.tiles import packed_shapes
from te_mx.dispatch.problem import MOST

_MOST_PLACES = 256  # te_mx/sm90.h
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
    expect(status, "end offsets")
    return there


def expect(status: int, what: str) -> None:
    if not sm90.supported(status):
        raise RuntimeError(
            f"te_mx internal error: the Hopper kernels do not take {what}; they count rows, "
            "columns and rows of all weights in 31 bits"
        )


def groups_of(offs: Tensor, capacity: int, rows: int) -> Any:
    """The native record of groups whose ends are on the device."""
    return sm90.native().Groups(  # type: ignore[union-attr]
        count=len(offs), rows=rows, ends=offs.data_ptr(), ends_int32=offs.dtype == torch.int32,
        capacity=capacity,
    )  # fmt: skip


def _empty(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    codes, words = shapes
    return (
        torch.empty(codes, dtype=_U8, device=device),
        torch.empty(words, dtype=_I32, device=device),
    )


def _set_source(args: Any, x: Tensor, fmt: str, rule: str, spread: int) -> None:
    args.x_data, (args.x_rows, args.x_cols) = x.data_ptr(), x.shape
    args.x_row_stride, args.x_dtype = x.stride(0), FLOAT_DTYPES[x.dtype]
    args.element, args.rule, args.spread = FORMATS[fmt], SCALE_RULES[rule], spread


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
    native = sm90.native()
    args = native.GroupedQuantizeArgs()  # type: ignore[union-attr]
    _set_source(args, x, fmt, rule, spread)
    args.groups = groups_of(offs, capacity, rows)
    if row is not None:
        args.row_codes, args.row_scales = row[0].data_ptr(), row[1].data_ptr()
        args.row_layout = LAYOUTS["sm90_rows"]
    if col is not None:
        args.col_codes, args.col_scales = col[0].data_ptr(), col[1].data_ptr()
        args.col_layout = LAYOUTS["sm90_k"]
    args.col_sum, args.col_sum_ws = pointer(sums), pointer(partial)
    sm90.set_execution(args, device.index)
    status = native.quantize_grouped(args)  # type: ignore[union-attr]
    expect(status, f"{groups} groups of rows of {tuple(x.shape)}")
    return QuantizedParts(
        row[0][:, :cols] if row else None, row[1] if row else None,
        col[0] if col else None, col[1] if col else None, sums,
    )  # fmt: skip


def weights_shapes(groups: int, rows: int, cols: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the codes, with the padding of their rows, and the scales of all weights."""
    codes, words = packed_shapes(rows, cols)
    return (groups, *codes), (groups, *words)


def sources(weights: Sequence[Tensor] | Tensor) -> tuple[list[int], int, torch.dtype, object]:
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
    weights: Sequence[Tensor] | Tensor, fmt: str, wanted: tuple[bool, bool], rule: str, spread: int
) -> list[Tensor]:
    """As te_mx::quantize_weights, for weights that are not empty, or one tensor of all
    [G, rows, cols]; wanted: rowwise, columnwise."""
    groups, (rows, cols), device = len(weights), weights[0].shape, weights[0].device
    addresses, stride, dtype, _alive = sources(weights)
    packed = spread >= 0
    native = sm90.native()
    args = native.QuantizeArgs(  # type: ignore[union-attr]
        x_rows=rows, x_cols=cols, x_row_stride=stride, x_dtype=FLOAT_DTYPES[dtype],
        element=FORMATS[fmt], rule=SCALE_RULES[rule], spread=max(spread, 0),
    )  # fmt: skip
    args.row_layout = LAYOUTS["sm90" if packed else "k_last"]
    args.col_layout = LAYOUTS["sm90" if packed else "k_first"]
    parts: list[Tensor] = []
    for side, asked, shape in zip(
        ("row", "col"), wanted, ((rows, cols), (cols, rows)), strict=True
    ):
        if not asked:
            continue
        if packed:
            codes, scales = _empty(weights_shapes(groups, *shape), device)
        else:
            codes, scales = _empty_plain(groups, rows, cols, "" if side == "col" else fmt, device)
        setattr(args, f"{side}_codes", codes.data_ptr())
        setattr(args, f"{side}_scales", scales.data_ptr())
        parts += [codes[:, :, : shape[1]] if packed else codes, scales]
    sm90.set_execution(args, device.index)
    status = native.quantize_stacked(args, addresses)  # type: ignore[union-attr]
    expect(status, f"{groups} weights of {(rows, cols)}")
    return parts


def _empty_plain(
    groups: int, rows: int, cols: int, fmt: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Plain codes and scale bytes of all weights, by rows; without a format those of columns, which
    lie as the weight does, one code a byte."""
    scales = (groups, rows, blocks(cols)) if fmt else (groups, blocks(rows), cols)
    codes = torch.empty((groups, rows, code_bytes(fmt, cols)), dtype=_U8, device=device)
    return codes, torch.empty(scales, dtype=_U8, device=device)


def gemm_rows(
    a: StackedOperand, b: Operand, offs: Tensor, capacity: int, bias: Tensor | None, out: Tensor
) -> None:
    """As te_mx::gemm_rows on packed operands that are not empty."""
    if bias is not None:
        bias = bias.contiguous()
    offs = offs_on_device(offs, out.device)
    args = _gemm_args(b, a, len(out), a.rows, a.k, out)
    args.rhs_layout = LAYOUTS["sm90"]
    args.lhs_layout = LAYOUTS["sm90_rows"]
    args.bias, args.bias_dtype = typed_address(bias)
    args.groups = groups_of(offs, capacity, len(out))
    status = sm90.native().gemm_grouped(args)  # type: ignore[union-attr]
    expect(status, f"groups of rows of {tuple(out.shape)} and {a.groups} weights")


def gemm_k(
    a: Operand, b: Operand, offs: Tensor, capacity: int, rows: int, out: Tensor, accumulate: bool,
    first_rows: Sequence[int] = (),
) -> None:  # fmt: skip
    """As te_mx::gemm_k on packed operands that are not empty. With first_rows, `out` [n, m] is the
    product that lies first in memory, and that of group i begins first_rows[i] rows behind it."""
    offs = offs_on_device(offs, out.device)
    args = _gemm_args(b, a, len(b.codes), len(a.codes), 0, out)
    args.lhs_layout = args.rhs_layout = LAYOUTS["sm90_k"]
    args.along_k, args.accumulate = True, accumulate
    args.groups = groups_of(offs, capacity, rows)
    status = sm90.native().gemm_grouped(args, first_rows)  # type: ignore[union-attr]
    expect(status, f"products of {tuple(out.shape)}")


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
    return None if max(rows) + len(first) > MOST else (first, rows)


def _gemm_args(
    lhs: Operand, rhs: Operand | StackedOperand, m: int, n: int, k: int, out: Tensor
) -> Any:
    """The native record of a grouped GEMM, but for layouts and groups."""
    args = sm90.native().GroupedGemmArgs()  # type: ignore[union-attr]
    args.lhs_codes, args.lhs_scales = lhs.codes.data_ptr(), lhs.scales.data_ptr()
    args.rhs_codes, args.rhs_scales = rhs.codes.data_ptr(), rhs.scales.data_ptr()
    for side, fmt in (("lhs", lhs.fmt), ("rhs", rhs.fmt)):
        for name, value in format_fields(fmt).items():
            setattr(args, f"{side}_{name}", value)
    args.lhs_rows, args.rhs_rows, args.lhs_k, args.rhs_k = m, n, k, k
    args.out, args.out_dtype = typed_address(out)
    args.ldo = out.shape[-1]
    sm90.set_execution(args, out.device.index)
    return args
