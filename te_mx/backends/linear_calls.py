"""Forward and backward of a linear layer, each one native call: quantizer and GEMMs, with what only
they read in one buffer. What the native modules of CPUs and of Hopper share.

The host is what small layers wait for: on Hopper an allocation costs it 3 to 6 us, and this way
takes eight for a forward and backward where one step after the other takes seventeen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES, format_fields
from te_mx.backends.native import words_of
from te_mx.dispatch.linear import Held, Into, LinearPlan, Part, Weight
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized
from te_mx.runtime.kernel_log import LAST_RUN

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
    gradients, of w. All in the words of native code, where MX is what it takes by itself. kernel:
    of a CPU."""

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
    kernel: int = -1


Formats = tuple[str, str, str]  # of x, w and gradients


def form_of(formats: Formats, scale_rule: str, spread: int, kernel: int = -1) -> Form:
    """That of a layer."""
    x, w, g = (format_fields(words_of(f"{fmt}@rows")[0]) for fmt in formats)
    rule, epsilon = split_rule(scale_rule)
    scaling = {name: value for name, value in x.items() if name != "element"}
    scaling |= {f"w_{name}": value for name, value in w.items() if name != "element"}
    return Form(
        x["element"], g["element"], SCALE_RULES[rule], spread, epsilon, kernel=kernel, **scaling
    )


class Rooms(NamedTuple):
    """Bytes of the workspaces; places of operands, each in a buffer of its own."""

    temp: int
    backward_temp: int
    x_row: Place
    x_col: Place
    w_row: Place
    w_col: Place
    g_kept: Place


def rooms(native: Any, shape: Shape, form: Form) -> Rooms:
    """Where things lie, from the native code alone."""
    at = native.linear_offsets(native.LinearArgs(**shape._asdict(), **form._asdict()))
    return Rooms(
        at["forward_bytes"], at["backward_bytes"], *(at[name] for name in Rooms._fields[2:])
    )


class Specs(NamedTuple):
    """Of the operands of x, and of both of w."""

    row: str
    col: str
    w_row: str
    w_col: str


class Calls(LinearPlan):
    """The native calls of layers of one size, with what does not change between them."""

    any_strides = False  # whether the native code takes matrices of which no stride is 1
    pitch = 1  # bytes: rows of codes in a buffer begin at multiples of it
    names: Sequence[str]  # what te_mx.audit calls the kernels

    def __init__(self, native: Any, shape: Shape, form: Form, specs: Specs) -> None:
        (m, n, k, *_), room = shape, rooms(native, shape, form)
        self.native, self.shape, self.room = native, shape, room
        self.row, self.col, self.w_row, self.w_col = specs
        self.forward_plan = native.LinearArgs(
            **shape._asdict(), **form._asdict(), workspace_bytes=room.temp,
            x_rows=m, x_cols=k, w_rows=n, w_cols=k, g_rows=m, g_cols=n,
        )  # fmt: skip
        self.backward_plan = self.forward_plan.copy(workspace_bytes=room.backward_temp)
        # The rowwise operand of x behind the workspace, as if it were a buffer of its own.
        self.row_at = -(-room.temp // _APART) * _APART
        self.temp_and_row = self.row_at + room.x_row[2]

    def acquire(self, nbytes: int, device: torch.device) -> Tensor:
        """A workspace."""
        raise NotImplementedError

    def run(self, call: Callable[[Any], Any], args: Any, temp: Tensor, nbytes: int) -> int:
        """Run a native call with a workspace of so many bytes: the numbers of the kernels in
        `names`, 8 bits each, or -1 for what native code does not take. Raises where a kernel does
        not start."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype,
        given: Held | None, weight: Weight | None = None, keep_row: bool = True, tag: int = -1,
    ) -> tuple[Tensor, Held]:  # fmt: skip
        """As LinearPlan.forward; nothing is empty. Without keep_row the rowwise operand of x lies
        in the workspace."""
        device, shape, room = x.device, self.shape, self.room
        _, n, k, x_columns, _, w_kept = shape
        own = given is None and not keep_row
        y = torch.empty((*x.shape[:-1], n), dtype=out_dtype, device=device)
        nbytes = self.temp_and_row if own else room.temp
        temp = self.acquire(nbytes, device=device)
        work = temp.data_ptr()
        x_row: Part | None = None
        x_col: Part | None = None
        w_col = None
        if given is not None:
            x_row, x_col, _ = given
            assert x_row is not None
            row_codes, row_scales = _addresses(x_row, room.x_row)
        else:
            base = work + self.row_at
            if keep_row:
                x_row = torch.empty(room.x_row[2], dtype=_U8, device=device), None
                base = x_row[0].data_ptr()
            row_codes, row_scales = base + room.x_row[0], base + room.x_row[1]
        args = self.forward_plan.copy(
            y=y.data_ptr(), y_dtype=FLOAT_DTYPES[out_dtype], workspace=work,
            x_row_codes=row_codes, x_row_scales=row_scales,
        )  # fmt: skip
        if given is not None:
            args.x_given = True
            if x_columns:
                assert x_col is not None  # nobody reads or writes it here
                args.x_col_codes = args.x_col_scales = x_col[0].data_ptr()
        else:
            if x_columns:
                col = torch.empty(room.x_col[2], dtype=_U8, device=device)
                x_col, base = (col, None), col.data_ptr()
                args.x_col_codes, args.x_col_scales = base + room.x_col[0], base + room.x_col[1]
            args.x_row_stride = k
            if not x.is_contiguous():
                x_MK = x if x.dim() == 2 else x.reshape(-1, k)
                x = x_MK if self.any_strides or x_MK.stride(1) == 1 else x_MK.contiguous()
                args.x_row_stride, args.x_col_stride = x.stride()
            args.x_data, args.x_dtype = x.data_ptr(), FLOAT_DTYPES[x.dtype]
        if weight is None:
            if w_kept:
                w_col = torch.empty(room.w_col[2], dtype=_U8, device=device)
                args.w_col_codes, args.w_col_scales = _addresses((w_col, None), room.w_col)
            if not (self.any_strides or w_NK.stride(1) == 1):
                w_NK = w_NK.contiguous()
            args.w_row_stride, args.w_col_stride = w_NK.stride()
            args.w_data, args.w_dtype = w_NK.data_ptr(), FLOAT_DTYPES[w_NK.dtype]
        else:
            args.w_given = True
            args.w_row_codes, args.w_row_scales = _addresses(weight.row, room.w_row)
        if bias_N is not None:
            bias_N = bias_N.contiguous()
            args.bias, args.bias_dtype = bias_N.data_ptr(), FLOAT_DTYPES[bias_N.dtype]
        ran = self.run(self.native.linear_forward, args, temp, nbytes)
        if ran < 0:
            raise RuntimeError("te_mx internal error: a native kernel did not start")
        if tag >= 0:
            LAST_RUN[tag] = self.names[ran]
        return y, Held(x_row, x_col, w_col)

    def backward(
        self, grad: Tensor, x_col: Part | None, w: Part | Tensor | None, x_shape: torch.Size,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None], add_to: Tensor | None,
        into: Into | None = None, tag: int = -1,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
        """As LinearPlan.backward, for grad [..., n]; those gradients that the shape has, and db if
        it has a dtype."""
        g_dtype = FLOAT_DTYPES.get(grad.dtype)
        if g_dtype is None:
            return None
        device, room = grad.device, self.room
        m, n, k, x_columns, w_columns, _ = self.shape
        x_dtype, w_dtype, bias_dtype = dtypes
        temp = self.acquire(room.backward_temp, device=device)
        args = self.backward_plan.copy(g_row_stride=n, g_dtype=g_dtype, workspace=temp.data_ptr())
        if not grad.is_contiguous():
            g_MN = grad if grad.dim() == 2 else grad.reshape(m, n)
            grad = g_MN if self.any_strides or g_MN.stride(1) == 1 else g_MN.contiguous()
            args.g_row_stride, args.g_col_stride = grad.stride()
        args.g_data = grad.data_ptr()
        dx = dw = db = None
        if w_columns:
            assert w is not None
            if isinstance(w, tuple):
                args.w_col_codes, args.w_col_scales = _addresses(w, room.w_col)
            else:
                if not (self.any_strides or w.stride(1) == 1):
                    w = w.contiguous()
                args.w_row_stride, args.w_col_stride = w.stride()
                args.w_data, args.w_dtype = w.data_ptr(), FLOAT_DTYPES[w.dtype]
            dx = torch.empty(x_shape, dtype=x_dtype, device=device) if add_to is None else add_to
            args.dx, args.dx_dtype = dx.data_ptr(), FLOAT_DTYPES[dx.dtype]
            args.dx_accumulate = add_to is not None
        if x_columns:
            assert x_col is not None
            (codes, scales), (_, at, _) = x_col, room.x_col
            args.x_col_codes = base = codes.data_ptr()
            args.x_col_scales = base + at if scales is None else scales.data_ptr()
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
        ran = self.run(self.native.linear_backward, args, temp, room.backward_temp)
        if ran < 0:
            return None
        for out in (add_to, into.out if into else None):
            if out is not None and not out.is_inference():
                torch.autograd.graph.increment_version(out)  # native code wrote behind autograd
        if tag >= 0:
            if dx is not None:
                LAST_RUN[tag + 1] = self.names[ran & 255]
            if dw is not None and args.dw:
                LAST_RUN[tag + 2] = self.names[ran >> 8]
        return dx, dw, db

    def wgrad(
        self, g_col: Tensor, x_col: Part, out: Tensor | None, dtype: torch.dtype, accumulate: bool,
        tag: int = -1,
    ) -> Tensor:  # fmt: skip
        """As LinearPlan.wgrad."""
        _, n, k, *_ = self.shape
        device = g_col.device
        if out is None:
            out = torch.empty((n, k), dtype=dtype, device=device)
        elif not out.is_inference():
            torch.autograd.graph.increment_version(out)
        temp = self.acquire(self.room.backward_temp, device=device)
        args = self.backward_plan.copy(
            dw=out.data_ptr(), dw_dtype=FLOAT_DTYPES[out.dtype], dw_accumulate=accumulate,
            workspace=temp.data_ptr(),
        )  # fmt: skip
        args.g_col_codes, args.g_col_scales = _addresses((g_col, None), self.room.g_kept)
        args.x_col_codes, args.x_col_scales = _addresses(x_col, self.room.x_col)
        ran = self.run(self.native.linear_wgrad, args, temp, self.room.backward_temp)
        if ran < 0:
            raise RuntimeError("te_mx internal error: a native kernel did not start")
        if tag >= 0:
            LAST_RUN[tag + 2] = self.names[ran]
        return out

    def quantized(self, held: Held) -> Quantized:
        (m, _, k, *_), col = self.shape, held.x_col
        assert held.x_row is not None
        return Quantized(
            _operand(held.x_row, self.room.x_row, self.row, (m, k), self.pitch),
            None if col is None else _operand(col, self.room.x_col, self.col, (k, m), self.pitch),
        )

    def w_columns(self, w_col: Part) -> Operand:
        _, n, k, *_ = self.shape
        return _operand(w_col, self.room.w_col, self.w_col, (k, n), self.pitch)

    def as_saved(self, x_col: Part | None, w_col: Part | None) -> tuple[Part | None, Part | None]:
        m, n, k, *_ = self.shape
        if x_col is not None:
            x_col = _saved(x_col, self.col, k, m, "the input")
        if w_col is not None:
            w_col = _saved(w_col, self.w_col, k, n, "the weight")
        return x_col, w_col


def _saved(part: Part, spec: str, rows: int, k: int, what: str) -> Part:
    """A part as kernels read it, whatever hooks on saved tensors made of it."""
    first, scales = part
    if scales is None:
        if first.is_contiguous() and first.data_ptr() % ALIGNMENT == 0:
            return part
        return first.clone(memory_format=torch.contiguous_format), None
    operand = Operand(first, scales, spec, rows, k).checked(what)
    return operand.codes, operand.scales


def _addresses(held: Part, room: Place) -> tuple[int, int]:
    """Of codes and scales."""
    first, scales = held
    base = first.data_ptr()
    return (base + room[0], base + room[1]) if scales is None else (base, scales.data_ptr())


def _operand(held: Part, room: Place, spec: str, size: tuple[int, int], pitch: int) -> Operand:
    """An operand [rows, k], as views where it lies in a buffer."""
    rows, k = size
    first, scales = held
    if scales is None:
        fmt, layout = spec_of(spec)
        (codes, shape), dtype = layout.shapes(fmt, rows, k), layout.scales_dtype(fmt)
        at = room[1]
        scales = first[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        ld = -(-codes[1] // pitch) * pitch
        first = first[room[0] : room[0] + codes[0] * ld].view(codes[0], ld)[:, : codes[1]]
    return Operand(first, scales, spec, rows, k)
