"""Forward and backward of a linear layer on Hopper, each one native call: quantizer and GEMMs, with
what only they read in one buffer. A thin layer over te_mx._sm90, as binding.py.

The host is what small layers wait for: an allocation costs it 3 to 6 us, and this way takes eight
for a forward and backward where one step after the other takes seventeen.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES
from te_mx.backends.sm90 import binding as sm90
from te_mx.dispatch.linear import Held, Into, Part, Weight
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand

_U8 = torch.uint8
ALIGNMENT = 16  # of the buffers, for TMA
_APART = 512  # bytes: the alignment of what torch allocates

Place = tuple[int, int, int]  # codes, scales and end of an operand in a buffer


class Shape(NamedTuple):
    """y[m, n] = x[m, k] @ w[n, k]^T, and the operands that backward needs: columns of x for dw, of
    w for dx; whether those of w are kept from forward on."""

    m: int
    n: int
    k: int
    x_columns: bool
    w_columns: bool
    w_kept: bool


class Form(NamedTuple):
    """Elements of x and w, and of gradients; how scales follow, and their blocks: of x and
    gradients, of w. All in the words of native code, where MX is what it takes by itself."""

    forward: int
    backward: int
    rule: int
    spread: int
    amax_epsilon: float = 0.0
    scale_type: int = 0
    block_rows: int = 1
    block_k: int = 32
    w_scale_type: int = 0
    w_block_rows: int = 1
    w_block_k: int = 32


class Rooms(NamedTuple):
    """Bytes of the workspaces; places of operands, each in a buffer of its own."""

    temp: int
    backward_temp: int
    x_row: Place
    x_col: Place
    w_row: Place
    w_col: Place
    g_kept: Place


def rooms(shape: Shape, form: Form) -> Rooms:
    """Where things lie, from the native code alone."""
    native = sm90.native()
    assert native is not None
    at = native.linear_offsets(native.LinearArgs(**shape._asdict(), **form._asdict()))
    return Rooms(
        at["forward_bytes"], at["backward_bytes"], *(at[name] for name in Rooms._fields[2:])
    )


class Calls:
    """The native calls of layers of one size, with what does not change between them."""

    __slots__ = (
        "backward_plan", "forward_plan", "native", "room", "row_at", "shape", "temp_and_row",
    )  # fmt: skip

    def __init__(self, shape: Shape, form: Form) -> None:
        (m, n, k, *_), room = shape, rooms(shape, form)
        native: Any = sm90.native()
        self.native, self.shape, self.room = native, shape, room
        self.forward_plan = native.LinearArgs(
            **shape._asdict(), **form._asdict(), workspace_bytes=room.temp,
            x_rows=m, x_cols=k, w_rows=n, w_cols=k, g_rows=m, g_cols=n,
        )  # fmt: skip
        self.backward_plan = self.forward_plan.copy(workspace_bytes=room.backward_temp)
        # The rowwise operand of x behind the workspace, as if it were a buffer of its own.
        self.row_at = -(-room.temp // _APART) * _APART
        self.temp_and_row = self.row_at + room.x_row[2]

    def forward(
        self, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype,
        given: Held | None, weight: Weight | None = None, keep_row: bool = True,
    ) -> tuple[Tensor, Held]:  # fmt: skip
        """y [..., n] of x [..., k]; nothing is empty. given: the operands of x, if they were made
        before; weight: those of w, if they were. Without keep_row that of x lies in the workspace.
        """
        device, shape, room = x.device, self.shape, self.room
        _, n, k, x_columns, _, w_kept = shape
        own = given is None and not keep_row
        y = torch.empty((*x.shape[:-1], n), dtype=out_dtype, device=device)
        temp = torch.empty(self.temp_and_row if own else room.temp, dtype=_U8, device=device)
        work = temp.data_ptr()
        x_row: Part | None = None
        x_col: Part | None = None
        w_col = None
        if given is not None:
            x_row, x_col, _ = given
            assert x_row is not None
            row_codes, row_scales = _addresses(x_row, room.x_row)
        elif own:
            codes, scales, _ = room.x_row
            row_codes, row_scales = work + self.row_at + codes, work + self.row_at + scales
        else:
            x_row = torch.empty(room.x_row[2], dtype=_U8, device=device), None
            row_codes, row_scales = _addresses(x_row, room.x_row)
        args = self.forward_plan.copy(
            y=y.data_ptr(), y_dtype=FLOAT_DTYPES[out_dtype], workspace=work,
            x_row_codes=row_codes, x_row_scales=row_scales,
        )  # fmt: skip
        if given is not None:
            args.x_given = True
        else:
            if x_columns:
                x_col = torch.empty(room.x_col[2], dtype=_U8, device=device), None
            stride = k
            if not x.is_contiguous():
                x_MK = x if x.dim() == 2 else x.reshape(-1, k)
                x = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
                stride = x.stride(0)
            args.x_data, args.x_row_stride = x.data_ptr(), stride
            args.x_dtype = FLOAT_DTYPES[x.dtype]
        if x_columns:
            assert x_col is not None
            args.x_col_codes, args.x_col_scales = _addresses(x_col, room.x_col)
        if weight is None:
            if w_kept:
                w_col = torch.empty(room.w_col[2], dtype=_U8, device=device)
                args.w_col_codes, args.w_col_scales = _addresses((w_col, None), room.w_col)
            if w_NK.stride(1) != 1:
                w_NK = w_NK.contiguous()
            args.w_data, args.w_row_stride = w_NK.data_ptr(), w_NK.stride(0)
            args.w_dtype = FLOAT_DTYPES[w_NK.dtype]
        else:
            args.w_given = True
            args.w_row_codes, args.w_row_scales = _addresses(weight.row, room.w_row)
        if bias_N is not None:
            bias_N = bias_N.contiguous()
            args.bias, args.bias_dtype = bias_N.data_ptr(), FLOAT_DTYPES[bias_N.dtype]
        sm90.set_execution(args, device.index)
        status = self.native.linear_forward(args)
        if status and not sm90.supported(status):
            raise RuntimeError("te_mx internal error: a Hopper kernel did not start")
        return y, Held(x_row, x_col, w_col)

    def backward(
        self, grad: Tensor, x_col: Part | None, w: Part | Tensor | None, x_shape: torch.Size,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None], add_to: Tensor | None,
        into: Into | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
        """(dx, dw, db) for grad [..., n], those that the shape has; dtypes are theirs, None for no
        db. w: what was kept of it, or the weight [n, k] itself. add_to: a dx that this one is added
        to. into: as of LinearPlan.backward. None for what the native code does not take."""
        g_dtype = FLOAT_DTYPES.get(grad.dtype)
        if g_dtype is None:
            return None
        device, room = grad.device, self.room
        m, n, k, x_columns, w_columns, _ = self.shape
        x_dtype, w_dtype, bias_dtype = dtypes
        stride = n
        if not grad.is_contiguous():
            g_MN = grad if grad.dim() == 2 else grad.reshape(m, n)
            grad = g_MN if g_MN.stride(1) == 1 else g_MN.contiguous()
            stride = grad.stride(0)
        temp = torch.empty(room.backward_temp, dtype=_U8, device=device)
        args = self.backward_plan.copy(
            g_data=grad.data_ptr(), g_row_stride=stride, g_dtype=g_dtype, workspace=temp.data_ptr(),
        )  # fmt: skip
        dx = dw = db = None
        if w_columns:
            assert w is not None
            if isinstance(w, tuple):
                args.w_col_codes, args.w_col_scales = _addresses(w, room.w_col)
            else:
                if w.stride(1) != 1:
                    w = w.contiguous()
                args.w_data, args.w_row_stride = w.data_ptr(), w.stride(0)
                args.w_dtype = FLOAT_DTYPES[w.dtype]
            dx = torch.empty(x_shape, dtype=x_dtype, device=device) if add_to is None else add_to
            args.dx, args.dx_dtype = dx.data_ptr(), FLOAT_DTYPES[dx.dtype]
            args.dx_accumulate = add_to is not None
        if x_columns:
            assert x_col is not None
            args.x_col_codes, args.x_col_scales = _addresses(x_col, room.x_col)
            if into is None:
                dw = torch.empty((n, k), dtype=w_dtype, device=device)
            elif into.out is None:
                dw = torch.empty(room.g_kept[2], dtype=_U8, device=device)
                args.g_col_codes, args.g_col_scales = _addresses((dw, None), room.g_kept)
            else:
                dw, args.dw_accumulate = into.out, into.accumulate
            if into is None or into.out is not None:
                args.dw, args.dw_dtype = dw.data_ptr(), FLOAT_DTYPES[dw.dtype]
        if bias_dtype is not None:
            db = torch.empty(n, dtype=bias_dtype, device=device)
            args.db, args.db_dtype = db.data_ptr(), FLOAT_DTYPES[bias_dtype]
        sm90.set_execution(args, device.index)
        status = self.native.linear_backward(args)
        return None if status and not sm90.supported(status) else (dx, dw, db)

    def wgrad(
        self, g_col: Tensor, x_col: Part, out: Tensor | None, dtype: torch.dtype, accumulate: bool
    ) -> Tensor:
        """As LinearPlan.wgrad."""
        _, n, k, *_ = self.shape
        if out is None:
            out = torch.empty((n, k), dtype=dtype, device=g_col.device)
        args = self.backward_plan.copy(
            dw=out.data_ptr(), dw_dtype=FLOAT_DTYPES[out.dtype], dw_accumulate=accumulate
        )
        args.g_col_codes, args.g_col_scales = _addresses((g_col, None), self.room.g_kept)
        args.x_col_codes, args.x_col_scales = _addresses(x_col, self.room.x_col)
        sm90.set_execution(args, g_col.device.index)
        if not sm90.supported(self.native.linear_wgrad(args)):
            raise RuntimeError("te_mx internal error: a Hopper kernel did not start")
        return out


def _addresses(held: Part, room: Place) -> tuple[int, int]:
    """Of codes and scales."""
    first, scales = held
    base = first.data_ptr()
    return (base + room[0], base + room[1]) if scales is None else (base, scales.data_ptr())


def operand_of(held: Part, room: Place, spec: str, rows: int, k: int) -> Operand:
    """An operand [rows, k], as views where it lies in a buffer."""
    first, scales = held
    if scales is None:
        fmt, layout = spec_of(spec)
        (_, shape), ld = layout.shapes(fmt, rows, k), (k + 15) & -16
        dtype = layout.scales_dtype(fmt)
        room_of_scales = first[room[1] : room[1] + math.prod(shape) * dtype.itemsize]
        scales = room_of_scales.view(dtype).view(shape)
        first = first[room[0] : room[0] + rows * ld].view(rows, ld)[:, :k]
    return Operand(first, scales, spec, rows, k)
