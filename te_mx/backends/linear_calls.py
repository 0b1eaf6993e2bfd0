"""Forward and backward of a linear layer, each one native call: quantizer and GEMMs, with what only
they read in one buffer. What the native modules of CPUs and of Hopper share.

The host is what small layers wait for: on Hopper an allocation costs it 3 to 6 us, and this way
takes eight for a forward and backward where one step after the other takes seventeen. Made is
what a call needs by `new_empty` of numbers: torch.empty of a tuple takes twice as long."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, SCALE_RULES, format_fields
from te_mx.backends.native import words_of
from te_mx.dispatch.linear import LATER, Dtypes, Held, Into, LinearPlan, Part
from te_mx.formats.scaling import split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized
from te_mx.runtime import workspace
from te_mx.runtime.kernel_log import LAST_RUN, note_written

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


# What runs differ in: arguments, with the fields that each fills. Codes and scales of an operand
# lie behind the address of a buffer.
_FORWARD = (
    "y, x_data, x_row_stride, x_col_stride, x_row_codes, x_row_scales, x_col_codes x_col_scales, "
    "x_given, w_data, w_row_stride, w_col_stride, w_row_codes, w_row_scales, w_given, "
    "w_col_codes w_col_scales, bias, bias_dtype"
)
_WGRAD = "x_col_codes, x_col_scales, dw, dw_dtype, dw_accumulate"
_BACKWARD = (
    "g_data, g_row_stride, g_col_stride, g_dtype, w_data, w_row_stride, w_col_stride, w_dtype, "
    f"w_col_codes, w_col_scales, dx, dx_dtype, dx_accumulate, {_WGRAD}, "
    "g_col_codes g_col_scales, db"
)
_NOTHING = None, 0
_NO_WEIGHT = None, 0, 0, 0, None, None
_NO_GRADIENT = None, 0, False


class Calls(LinearPlan):
    """The native calls of layers of one size, with what does not change between them."""

    any_strides = False  # whether the native code takes matrices of which no stride is 1
    pitch = 1  # bytes: rows of codes in a buffer begin at multiples of it
    names: Sequence[str]  # what te_mx.audit calls the kernels
    start: str  # the fields of `started`
    pooled = False  # whether workspaces are given back
    wgrad_temp = 0  # bytes of the workspace of `wgrad`

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
        plan = native.LinearArgs(
            **shape._asdict(), **form._asdict(), workspace_bytes=room.temp, x_rows=m, x_cols=k,
            w_rows=n, w_cols=k, g_rows=m, g_cols=n, x_dtype=x_dtype, w_dtype=w_dtype,
            y_dtype=y_dtype,
        )  # fmt: skip
        if dtypes.bias is not None:
            plan.db_dtype = FLOAT_DTYPES[dtypes.bias]
        self.record = plan
        self.forward_call = self._prepared("linear_forward", plan, _FORWARD)
        plan = plan.copy(workspace_bytes=room.backward_temp)
        self.backward_call = self._prepared("linear_backward", plan, _BACKWARD)
        of_wgrad = f"g_col_codes g_col_scales, {_WGRAD}"
        self.wgrad_call = self._prepared("linear_wgrad", plan, of_wgrad)
        self.ids = x_dtype, w_dtype, y_dtype  # as native code takes them
        # The rowwise operand of x behind the workspace, as if it were a buffer of its own.
        self.row_at = -(-room.temp // _APART) * _APART
        self.temp_and_row = self.row_at + room.x_row[2]

    def _prepared(self, call: str, plan: Any, arguments: str) -> Callable[..., int]:
        """A call with these arguments behind those of `started`."""
        each = f"{self.start}, {arguments}".split(", ")
        fields = [
            (name, i, self._offset(name)) for i, names in enumerate(each) for name in names.split()
        ]
        run: Callable[..., int] = self.native.prepared(call, plan, fields, len(each)).run
        return run

    def _offset(self, name: str) -> int:
        """Of an operand in its buffer; that of w, by rows, has none outside of the workspace."""
        of, _, part = name.rpartition("_")
        at = {"g_col": self.room.g_kept} | self.room._asdict()
        return at[of][part == "scales"] if part in ("codes", "scales") and of != "w_row" else 0

    def started(self, nbytes: int, beside: Tensor) -> tuple[Any, ...]:
        """A workspace on the device of a tensor, and where a call runs."""
        raise NotImplementedError

    def supported(self, status: int) -> bool:
        """Whether a call ran; raises where a kernel does not start."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, given: Held | None,
        weight: Operand | None = None, keep_row: bool = True, tag: int = -1,
    ) -> tuple[Tensor, Part | None, Part | None, Tensor | None]:  # fmt: skip
        """As LinearPlan.forward, nothing empty. Without keep_row x's row lies in the workspace."""
        room = self.room
        _, _, k, x_columns, _, w_kept = self.shape
        y = x.new_empty(*self.y_shape, dtype=self.dtypes[3])
        nbytes = room.temp if keep_row or given is not None else self.temp_and_row
        start = self.started(nbytes, x)
        x_row = x_col = w_col = None
        of_x: Any
        if given is not None:
            x_row, x_col = given
            col = x_col[0] if x_columns and x_col is not None else None  # nobody reads it here
            of_x = None, k, 1, *_base(x_row, room.x_row), col, True
        else:
            row: Any = start[0].data_ptr() + self.row_at
            if keep_row:
                row = start[0].new_empty(room.x_row[2])
                x_row = row, None
            if x_columns:
                x_col = start[0].new_empty(room.x_col[2]), None
            at = (x, k, 1) if x.is_contiguous() else self._matrix(x, k)
            of_x = *at, row, row, x_col and x_col[0], False
        if weight is not None:
            of_w: Any = None, k, 1, weight.codes, weight.scales, True
        else:
            if w_kept:
                w_col = start[0].new_empty(room.w_col[2])
            at = (w_NK, k, 1) if w_NK.is_contiguous() else self._matrix(w_NK, k)
            of_w = *at, None, None, False
        bias = _NOTHING if bias_N is None else (bias_N.contiguous(), FLOAT_DTYPES[bias_N.dtype])
        ran = self.forward_call(*start, y, *of_x, *of_w, w_col, *bias)
        if self.pooled:
            workspace.release(start[0], nbytes)
        if ran < 0:
            raise self._not_run(ran)
        if tag >= 0:
            LAST_RUN[tag] = self.names[ran]
        return y, x_row, x_col, w_col

    def _not_run(self, ran: int) -> RuntimeError:
        self.supported(-ran)
        return RuntimeError("te_mx internal error: a native kernel did not start")

    def _matrix(self, t: Tensor, k: int) -> tuple[Any, ...]:
        """t [..., k] with two strides that the native code takes, and these."""
        t = t if t.dim() == 2 else t.reshape(-1, k)
        t = t if self.any_strides or t.stride(1) == 1 else t.contiguous()
        return t, *t.stride()

    def backward(
        self, grad: Tensor, x_col: Part | None, w: Part | Tensor | None, add_to: Tensor | None,
        into: Into | None = None, tag: int = -1,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
        """As LinearPlan.backward, for grad [..., n]."""
        room, make = self.room, grad.new_empty
        _, n, k, x_columns, w_columns, _ = self.shape
        dx_dtype, w_dtype, g_dtype = self.ids
        if grad.dtype is not self.dtypes[3]:
            if grad.dtype not in FLOAT_DTYPES:
                return None
            g_dtype = FLOAT_DTYPES[grad.dtype]
        dx, dw, db, g_col = add_to, None, None, None
        of_w: Any = _NO_WEIGHT
        of_x: Any = _NOTHING
        to_dw: Any = _NO_GRADIENT
        if w_columns:
            if isinstance(w, tuple):
                of_w = None, k, 1, 0, *_base(w, room.w_col)
            else:
                assert w is not None
                at = (w, k, 1) if w.is_contiguous() else self._matrix(w, k)
                of_w = *at, FLOAT_DTYPES[w.dtype], None, None
            if add_to is None:
                dx = make(*self.x_shape, dtype=self.dtypes[0])
            else:
                dx_dtype = FLOAT_DTYPES[add_to.dtype]
        if x_columns:
            assert x_col is not None
            of_x = x_col[:1] * 2 if x_col[1] is None else _base(x_col, room.x_col)
            if into is None:
                dw = make(n, k, dtype=self.dtypes[1])
                to_dw = dw, w_dtype, False
            elif into is LATER:
                dw = g_col = make(room.g_kept[2], dtype=_U8)
            else:
                dw, add = into
                assert dw is not None
                to_dw = dw, FLOAT_DTYPES[dw.dtype], add
        if self.need_db:
            db = make(n, dtype=self.dtypes[2])
        start = self.started(room.backward_temp, grad)
        of_g = (grad, n, 1) if grad.is_contiguous() else self._matrix(grad, n)
        ran = self.backward_call(
            *start, *of_g, g_dtype, *of_w, dx, dx_dtype, add_to is not None, *of_x, *to_dw, g_col,
            db,
        )  # fmt: skip
        if self.pooled:
            workspace.release(start[0], room.backward_temp)
        if ran < 0:
            self.supported(-ran)
            return None
        if add_to is not None:
            note_written(add_to)
        if into is not None and into.out is not None:
            note_written(into.out)
        if tag >= 0:
            if dx is not None:
                LAST_RUN[tag + 1] = self.names[ran & 255]
            if to_dw is not _NO_GRADIENT:
                LAST_RUN[tag + 2] = self.names[ran >> 8]
        return dx, dw, db

    def wgrad(
        self, g_col: Tensor, x_col: Part, out: Tensor | None, dtype: torch.dtype, accumulate: bool,
        tag: int = -1,
    ) -> Tensor:  # fmt: skip
        """As LinearPlan.wgrad."""
        _, n, k, *_ = self.shape
        nbytes = self.wgrad_temp
        if out is None:
            out = g_col.new_empty(n, k, dtype=dtype)
        else:
            note_written(out)
        start = self.started(nbytes, g_col)
        ran = self.wgrad_call(
            *start, g_col, *_base(x_col, self.room.x_col), out,
            FLOAT_DTYPES[out.dtype], accumulate,
        )  # fmt: skip
        if self.pooled:
            workspace.release(start[0], nbytes)
        if ran < 0:
            raise self._not_run(ran)
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


def _lies(part: Part) -> bool:
    """Whether a part is a buffer as kernels read it."""
    first, scales = part
    return scales is None and first.data_ptr() % ALIGNMENT == 0 and first.is_contiguous()


def _saved(part: Part, spec: str, rows: int, k: int, what: str) -> Part:
    """A part as kernels read it, whatever hooks on saved tensors made of it."""
    first, scales = part
    if scales is None:
        return first.clone(memory_format=torch.contiguous_format), None
    operand = Operand(first, scales, spec, rows, k).checked(what)
    return operand.codes, operand.scales


def _base(held: Any, room: Place) -> tuple[Any, Any]:
    """What codes and scales lie behind, as in a buffer."""
    first, scales = held
    if scales is None:
        return first, first
    return first.data_ptr() - room[0], scales.data_ptr() - room[1]


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
