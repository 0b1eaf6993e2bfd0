"""Forward and backward of a linear layer on Hopper, each one native call: quantizer and GEMMs, with
everything between them in two buffers. A thin layer over te_mx._sm90, as backends/sm90.py.

The host is what small layers wait for: an allocation costs it 3 to 6 us, and this way takes seven
for a forward and backward where one step after the other takes seventeen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends import sm90, sm90_layout
from te_mx.backends.base import FLOAT_DTYPES, FORMATS, SCALE_RULES, typed_address

_U8, _I32 = torch.uint8, torch.int32
ALIGNMENT = 16  # of the buffers, for TMA

Codes = tuple[Tensor, Tensor, Tensor | None]


class Shape(NamedTuple):
    """y[m, n] = x[m, k] @ w[n, k]^T, and the operands that backward needs: columns of x for dw, of
    w for dx."""

    m: int
    n: int
    k: int
    x_columns: bool
    w_columns: bool


class Rooms(NamedTuple):
    """Bytes of the buffers; (codes, scales, end) of the operands in the saved one."""

    temp: int
    saved: int
    backward_temp: int
    x_col: tuple[int, int, int]
    w_col: tuple[int, int, int]


@lru_cache(maxsize=4096)
def rooms(shape: Shape) -> Rooms:
    """Where things lie, from the native code alone."""
    native = sm90.native()
    assert native is not None
    at = native.linear_offsets(native.LinearArgs(**shape._asdict()))
    return Rooms(
        at["forward_bytes"], at["saved_bytes"], at["backward_bytes"], at["x_col"], at["w_col"]
    )


@lru_cache(maxsize=4096)
def _plan(shape: Shape, words: tuple[int, int, int, int]) -> Any:
    """The native record of a layer: what does not change between calls."""
    rule, spread, forward, backward = words
    return sm90.native().LinearArgs(  # type: ignore[union-attr]
        **shape._asdict(), rule=rule, spread=spread, forward=forward, backward=backward
    )


def forget_plans() -> None:
    """For tests, which put another native module in place."""
    rooms.cache_clear()
    _plan.cache_clear()


@lru_cache(maxsize=64)
def format_words(rule: str, spread: int, forward: str, backward: str) -> tuple[int, int, int, int]:
    """What native code is told of the formats."""
    return SCALE_RULES[rule], spread, FORMATS[forward].native_id, FORMATS[backward].native_id


def linear_forward(
    x: Tensor, w_NK: Tensor, bias_N: Tensor | None, shape: Shape, words: tuple[int, int, int, int],
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """(y [..., n] of x [..., k], what backward needs as uint8 [bytes]); None for what the native
    code does not take. Nothing is empty."""
    device = x.device
    room = rooms(shape)
    x_MK = sm90.rows_of(x if x.dim() == 2 else x.reshape(-1, shape.k))
    w_NK = sm90.rows_of(w_NK)
    if bias_N is not None:
        bias_N = bias_N.contiguous()
    y = torch.empty((*x.shape[:-1], shape.n), dtype=out_dtype, device=device)
    temp = torch.empty(room.temp, dtype=_U8, device=device)
    saved = torch.empty(room.saved, dtype=_U8, device=device)
    args = _plan(shape, words).copy(
        x=_matrix(x_MK), w=_matrix(w_NK), y=y.data_ptr(), y_dtype=FLOAT_DTYPES[out_dtype],
        workspace=temp.data_ptr(), workspace_bytes=room.temp, saved=saved.data_ptr(),
    )  # fmt: skip
    if bias_N is not None:
        args.bias, args.bias_dtype = typed_address(bias_N)
    sm90.set_execution(args, device.index)
    status = sm90.native().linear_forward(args)  # type: ignore[union-attr]
    return (y, saved) if sm90.supported(status) else None


def linear_backward(
    grad: Tensor, saved: Tensor, shape: Shape, words: tuple[int, int, int, int],
    x_shape: torch.Size, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
    """(dx, dw, db) for grad [..., n], those that the shape has; dtypes are theirs, None for no db.
    None for what the native code does not take."""
    device = grad.device
    m, n, k, x_columns, w_columns = shape
    g_MN = sm90.rows_of(grad if grad.dim() == 2 else grad.reshape(m, n))
    dx = dw = db = None
    if w_columns:
        dx = torch.empty(x_shape, dtype=dtypes[0], device=device)
    if x_columns:
        dw = torch.empty((n, k), dtype=dtypes[1], device=device)
    if dtypes[2] is not None:
        db = torch.empty(n, dtype=dtypes[2], device=device)
    room = rooms(shape).backward_temp
    temp = torch.empty(room, dtype=_U8, device=device)
    args = _plan(shape, words).copy(
        g=_matrix(g_MN), saved=saved.data_ptr(), workspace=temp.data_ptr(), workspace_bytes=room
    )
    args.dx, args.dx_dtype = typed_address(dx)
    args.dw, args.dw_dtype = typed_address(dw)
    args.db, args.db_dtype = typed_address(db)
    sm90.set_execution(args, device.index)
    status = sm90.native().linear_backward(args)  # type: ignore[union-attr]
    return (dx, dw, db) if sm90.supported(status) else None


def saved_operands(saved: Tensor, shape: Shape) -> tuple[Codes | None, Codes | None]:
    """The columnwise codes and scale words of x and of w in the saved buffer, as views; None for
    what it does not hold. The third part of each, a packed form, is None."""
    room = rooms(shape)
    x = _operand(saved, room.x_col, shape.k, shape.m) if shape.x_columns else None
    w = _operand(saved, room.w_col, shape.k, shape.n) if shape.w_columns else None
    return x, w


def _operand(saved: Tensor, room: tuple[int, int, int], rows: int, k: int) -> Codes:
    (_, ld), words = sm90_layout.packed_shapes(rows, k)
    codes = saved[room[0] : room[0] + rows * ld].view(rows, ld)[:, :k]
    size = words[0] * words[1] * words[2] * 4
    return codes, saved[room[1] : room[1] + size].view(_I32).view(words), None


def _matrix(x: Tensor) -> Any:
    rows, cols = x.shape
    made = sm90.native().Matrix()  # type: ignore[union-attr]
    made.data, made.rows, made.cols, made.row_stride = x.data_ptr(), rows, cols, x.stride(0)
    made.dtype = FLOAT_DTYPES[x.dtype]
    return made
