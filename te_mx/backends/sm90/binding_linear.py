"""Forward and backward of a linear layer on Hopper, each one native call: quantizer and GEMMs, with
everything between them in two buffers. A thin layer over te_mx._sm90, as binding.py.

The host is what small layers wait for: an allocation costs it 3 to 6 us, and this way takes seven
for a forward and backward where one step after the other takes seventeen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES
from te_mx.backends.sm90 import binding as sm90
from te_mx.layouts import sm90_tiles as sm90_layout

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


class Calls:
    """The native calls of layers of one size, with what does not change between them."""

    __slots__ = ("backward_plan", "forward_plan", "native", "room", "shape")

    def __init__(self, shape: Shape, words: tuple[int, int, int, int]) -> None:
        rule, spread, forward, backward = words
        (m, n, k, _, _), room = shape, rooms(shape)
        native: Any = sm90.native()
        self.native, self.shape, self.room = native, shape, room
        self.forward_plan = native.LinearArgs(
            **shape._asdict(), rule=rule, spread=spread, forward=forward, backward=backward,
            workspace_bytes=room.temp, x_rows=m, x_cols=k, w_rows=n, w_cols=k, g_rows=m, g_cols=n,
        )  # fmt: skip
        self.backward_plan = self.forward_plan.copy(workspace_bytes=room.backward_temp)

    def forward(
        self, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """(y [..., n] of x [..., k], what backward needs as uint8 [bytes]). Nothing is empty."""
        device, shape, room = x.device, self.shape, self.room
        x_MK = sm90.rows_of(x if x.dim() == 2 else x.reshape(-1, shape.k))
        w_NK = sm90.rows_of(w_NK)
        y = torch.empty((*x.shape[:-1], shape.n), dtype=out_dtype, device=device)
        saved = torch.empty(room.saved, dtype=_U8, device=device)
        temp = torch.empty(room.temp, dtype=_U8, device=device)
        args = self.forward_plan.copy(
            x_data=x_MK.data_ptr(), x_row_stride=x_MK.stride(0), x_dtype=FLOAT_DTYPES[x.dtype],
            w_data=w_NK.data_ptr(), w_row_stride=w_NK.stride(0), w_dtype=FLOAT_DTYPES[w_NK.dtype],
            y=y.data_ptr(), y_dtype=FLOAT_DTYPES[out_dtype], workspace=temp.data_ptr(),
            saved=saved.data_ptr(),
        )  # fmt: skip
        sm90.set_execution(args, device.index)
        if bias_N is not None:
            bias_N = bias_N.contiguous()
            args.bias, args.bias_dtype = bias_N.data_ptr(), FLOAT_DTYPES[bias_N.dtype]
        if not sm90.supported(self.native.linear_forward(args)):
            raise RuntimeError("te_mx internal error: a Hopper kernel did not start")
        return y, saved

    def backward(
        self, grad: Tensor, saved: Tensor, x_shape: torch.Size,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
        """(dx, dw, db) for grad [..., n], those that the shape has; dtypes are theirs, None for no
        db. None for what the native code does not take."""
        device, room = grad.device, self.room
        m, n, k, x_columns, w_columns = self.shape
        x_dtype, w_dtype, bias_dtype = dtypes
        g_MN = sm90.rows_of(grad if grad.dim() == 2 else grad.reshape(m, n))
        temp = torch.empty(room.backward_temp, dtype=_U8, device=device)
        args = self.backward_plan.copy(
            g_data=g_MN.data_ptr(), g_row_stride=g_MN.stride(0), g_dtype=FLOAT_DTYPES[g_MN.dtype],
            workspace=temp.data_ptr(), saved=saved.data_ptr(),
        )  # fmt: skip
        sm90.set_execution(args, device.index)
        dx = dw = db = None
        if w_columns:
            dx = torch.empty(x_shape, dtype=x_dtype, device=device)
            args.dx, args.dx_dtype = dx.data_ptr(), FLOAT_DTYPES[x_dtype]
        if x_columns:
            dw = torch.empty((n, k), dtype=w_dtype, device=device)
            args.dw, args.dw_dtype = dw.data_ptr(), FLOAT_DTYPES[w_dtype]
        if bias_dtype is not None:
            db = torch.empty(n, dtype=bias_dtype, device=device)
            args.db, args.db_dtype = db.data_ptr(), FLOAT_DTYPES[bias_dtype]
        done = sm90.supported(self.native.linear_backward(args))
        return (dx, dw, db) if done else None


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
