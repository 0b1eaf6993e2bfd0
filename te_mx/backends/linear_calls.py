"""Forward and backward of a linear layer, each one native call: quantizer and GEMMs, with what only
they read in one buffer. What the native modules of CPUs and of Hopper share.

The host is what small layers wait for: on Hopper an allocation costs it 3 to 6 us, and this way
takes eight for a forward and backward where one step after the other takes seventeen."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES, format_fields
from te_mx.backends.native import words_of
from te_mx.dispatch.linear import LATER, Dtypes, Held, Into, LinearPlan, Part
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


class LinearFormats(NamedTuple):
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


def linear_formats(
    formats: Formats, scale_rule: str, spread: int, kernel: int = -1
) -> LinearFormats:
    """That of a layer."""
    x, w, g = (format_fields(words_of(f"{fmt}@rows")[0]) for fmt in formats)
    rule, epsilon = split_rule(scale_rule)
    scaling = {name: value for name, value in x.items() if name != "element"}
    scaling |= {f"w_{name}": value for name, value in w.items() if name != "element"}
    return LinearFormats(
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

    def __init__(
        self, native: Any, shape: Shape, form: LinearFormats, specs: Specs, dtypes: Dtypes,
        x_shape: torch.Size, need_db: bool = False,
    ) -> None:  # fmt: skip
        m, n, k, *_ = shape
        at = native.linear_offsets(native.LinearArgs(**shape._asdict(), **form._asdict()))
        rest = (at[name] for name in Rooms._fields[2:])
        room = Rooms(at["forward_bytes"], at["backward_bytes"], *rest)
        self.native, self.shape, self.room = native, shape, room
        self.row, self.col, self.w_row, self.w_col = specs
        self.dtypes, self.x_shape, self.y_shape = dtypes, x_shape, (*x_shape[:-1], n)
        self.need_db = need_db
        x_dtype, w_dtype, y_dtype = (FLOAT_DTYPES[one] for one in (dtypes.x, dtypes.w, dtypes.y))
        # Of matrices without gaps; what no call changes is there.
        self.forward_plan = native.LinearArgs(
            **shape._asdict(), **form._asdict(), workspace_bytes=room.temp, x_rows=m, x_cols=k,
            x_row_stride=k, w_rows=n, w_cols=k, w_row_stride=k, g_rows=m, g_cols=n, g_row_stride=n,
            x_dtype=x_dtype, w_dtype=w_dtype, y_dtype=y_dtype, g_dtype=y_dtype, dx_dtype=x_dtype,
            dw_dtype=w_dtype,
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
        `names`, 8 bits each, or -1 for what native code does not take. Raises if none starts."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, given: Held | None,
        weight: Operand | None = None, keep_row: bool = True, tag: int = -1,
    ) -> tuple[Tensor, Held]:  # fmt: skip
        """As LinearPlan.forward, nothing empty. Without keep_row x's row lies in the workspace."""
        device, room = x.device, self.room
        _, _, k, x_columns, _, w_kept = self.shape
        y = torch.empty(self.y_shape, dtype=self.dtypes[3], device=device)
        nbytes = room.temp if keep_row or given is not None else self.temp_and_row
        temp = self.acquire(nbytes, device=device)
        work = temp.data_ptr()
        args = self.forward_plan.copy(y=y.data_ptr(), workspace=work)
        x_row: Part | None = None
        x_col: Part | None = None
        w_col = None
        if given is None:
            base = work + self.row_at
            if keep_row:
                x_row = torch.empty(room.x_row[2], dtype=_U8, device=device), None
                base = x_row[0].data_ptr()
            codes, scales, _ = room.x_row
            args.x_row_codes, args.x_row_scales = base + codes, base + scales
            if x_columns:
                codes, scales, end = room.x_col
                x_col = col, _ = torch.empty(end, dtype=_U8, device=device), None
                base = col.data_ptr()
                args.x_col_codes, args.x_col_scales = base + codes, base + scales
            if not x.is_contiguous():
                x = self._matrix(x, k)
                args.x_row_stride, args.x_col_stride = x.stride()
            args.x_data = x.data_ptr()
        else:
            x_row, x_col, _ = given
            assert x_row is not None
            args.x_given = True
            args.x_row_codes, args.x_row_scales = _addresses(x_row, room.x_row)
            if x_columns:
                assert x_col is not None  # nobody reads or writes it here
                args.x_col_codes = args.x_col_scales = x_col[0].data_ptr()
        if weight is None:
            if w_kept:
                w_col = torch.empty(room.w_col[2], dtype=_U8, device=device)
                args.w_col_codes, args.w_col_scales = _addresses((w_col, None), room.w_col)
            if not w_NK.is_contiguous():
                w_NK = self._matrix(w_NK, k)
                args.w_row_stride, args.w_col_stride = w_NK.stride()
            args.w_data = w_NK.data_ptr()
        else:
            args.w_given = True
            args.w_row_codes = weight.codes.data_ptr()
            args.w_row_scales = weight.scales.data_ptr()
        if bias_N is not None:
            bias_N = bias_N.contiguous()
            args.bias, args.bias_dtype = bias_N.data_ptr(), FLOAT_DTYPES[bias_N.dtype]
        ran = self.run(self.native.linear_forward, args, temp, nbytes)
        if ran < 0:
            raise RuntimeError("te_mx internal error: a native kernel did not start")
        if tag >= 0:
            LAST_RUN[tag] = self.names[ran]
        return y, Held(x_row, x_col, w_col)

    def _matrix(self, t: Tensor, k: int) -> Tensor:
        """t [..., k] with two strides that the native code takes."""
        t = t if t.dim() == 2 else t.reshape(-1, k)
        return t if self.any_strides or t.stride(1) == 1 else t.contiguous()

    def backward(
        self, grad: Tensor, x_col: Part | None, w: Part | Tensor | None, add_to: Tensor | None,
        into: Into | None = None, tag: int = -1,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
        """As LinearPlan.backward, for grad [..., n]."""
        device, room = grad.device, self.room
        _, n, k, x_columns, w_columns, _ = self.shape
        x_dtype, w_dtype, bias_dtype, g_dtype = self.dtypes
        temp = self.acquire(room.backward_temp, device=device)
        args = self.backward_plan.copy(workspace=temp.data_ptr())
        if grad.dtype is not g_dtype:
            if grad.dtype not in FLOAT_DTYPES:
                return None
            args.g_dtype = FLOAT_DTYPES[grad.dtype]
        if not grad.is_contiguous():
            grad = self._matrix(grad, n)
            args.g_row_stride, args.g_col_stride = grad.stride()
        args.g_data = grad.data_ptr()
        dx = dw = db = None
        if w_columns:
            assert w is not None
            if isinstance(w, tuple):
                args.w_col_codes, args.w_col_scales = _addresses(w, room.w_col)
            else:
                if not w.is_contiguous():
                    w = self._matrix(w, k)
                    args.w_row_stride, args.w_col_stride = w.stride()
                args.w_data, args.w_dtype = w.data_ptr(), FLOAT_DTYPES[w.dtype]
            if add_to is None:
                dx = torch.empty(self.x_shape, dtype=x_dtype, device=device)
            else:
                dx, args.dx_accumulate, args.dx_dtype = add_to, True, FLOAT_DTYPES[add_to.dtype]
            args.dx = dx.data_ptr()
        if x_columns:
            assert x_col is not None
            codes, scales = x_col
            args.x_col_codes = base = codes.data_ptr()
            args.x_col_scales = base + room.x_col[1] if scales is None else scales.data_ptr()
            if into is None:
                dw = torch.empty((n, k), dtype=w_dtype, device=device)
                args.dw = dw.data_ptr()
            elif into is LATER:
                dw = torch.empty(room.g_kept[2], dtype=_U8, device=device)
                args.g_col_codes, args.g_col_scales = _addresses((dw, None), room.g_kept)
            else:
                dw, args.dw_accumulate = into
                assert dw is not None
                args.dw, args.dw_dtype = dw.data_ptr(), FLOAT_DTYPES[dw.dtype]
        if self.need_db:
            assert bias_dtype is not None
            db = torch.empty(n, dtype=bias_dtype, device=device)
            args.db, args.db_dtype = db.data_ptr(), FLOAT_DTYPES[bias_dtype]
        ran = self.run(self.native.linear_backward, args, temp, room.backward_temp)
        if ran < 0:
            return None
        if add_to is not None:
            _written(add_to)
        if into is not None and into.out is not None:
            _written(into.out)
        if tag >= 0:
            if dx is not None:
                LAST_RUN[tag + 1] = self.names[ran & 255]
            if dw is not None and into is not LATER:
                LAST_RUN[tag + 2] = self.names[ran >> 8]
        return dx, dw, db

    def wgrad(
        self, g_col: Tensor, x_col: Part, out: Tensor | None, dtype: torch.dtype, accumulate: bool,
        tag: int = -1,
    ) -> Tensor:  # fmt: skip
        """As LinearPlan.wgrad."""
        _, n, k, *_ = self.shape
        device, room = g_col.device, self.room
        if out is None:
            out = torch.empty((n, k), dtype=dtype, device=device)
        else:
            _written(out)
        temp, g = self.acquire(room.backward_temp, device=device), g_col.data_ptr()
        x_codes, x_scales = _addresses(x_col, room.x_col)
        args = self.backward_plan.copy(
            dw=out.data_ptr(), dw_dtype=FLOAT_DTYPES[out.dtype], dw_accumulate=accumulate,
            workspace=temp.data_ptr(), g_col_codes=g + room.g_kept[0],
            g_col_scales=g + room.g_kept[1], x_col_codes=x_codes, x_col_scales=x_scales,
        )  # fmt: skip
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
        if x_col is not None and not _lies(x_col):
            x_col = _saved(x_col, self.col, k, m, "the input")
        if w_col is not None and not _lies(w_col):
            w_col = _saved(w_col, self.w_col, k, n, "the weight")
        return x_col, w_col


def _written(out: Tensor) -> None:
    """Native code wrote behind autograd."""
    if not out.is_inference():
        increment_version(out)


def _lies(part: Part) -> bool:
    """Whether a part is a buffer as kernels read it."""
    first, scales = part
    return scales is None and first.is_contiguous() and first.data_ptr() % ALIGNMENT == 0


def _saved(part: Part, spec: str, rows: int, k: int, what: str) -> Part:
    """A part as kernels read it, whatever hooks on saved tensors made of it."""
    first, scales = part
    if scales is None:
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
