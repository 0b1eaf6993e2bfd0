"""The interface of te_mx._sm90 in plain torch, on addresses of CPU memory.

With it in place of the module, the Python side of the Hopper backend runs on any machine: sizes,
orders, layouts and the places inside a workspace. tests/gpu holds the real module to the same.
Records are those of te_mx._native, which both modules have.
"""

from __future__ import annotations

import ctypes
import importlib

import fake_sm90_factors
import native_words as reference
import torch
from fake_sm90_codes import *  # noqa: F403
from fake_sm90_decode import DecodeArgs, decode, decode_workspace  # noqa: F401
from fake_sm90_factors import scaling
from fake_sm90_frozen import pack_frozen, unpack_frozen  # noqa: F401
from fake_sm90_joined import quantize_joined  # noqa: F401
from fake_sm90_norm_rows import NormRowsArgs, normalize_rows  # noqa: F401
from fake_sm90_nvfp4 import (  # noqa: F401
    Nvfp4Args,
    Nvfp4FinishArgs,
    Nvfp4MultiplyArgs,
    Nvfp4QuantizeArgs,
    nvfp4_finish,
    nvfp4_from_rows,
    nvfp4_multiplies,
    nvfp4_multiply,
    nvfp4_multiply_workspace,
    nvfp4_product,
    nvfp4_quantize,
    nvfp4_quantize_stacked,
    nvfp4_to_values,
    nvfp4_workspace,
)
from torch import Tensor

from te_mx.backends import base
from te_mx.backends.base import FLOAT_DTYPES, FORMATS, GELUS, LAYOUTS, SCALE_RULES
from te_mx.backends.reference import fused
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.layouts import SM90_NVFP4
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.dispatch.calls import Epilogue, Quantize
from te_mx.dispatch.fused import ACT_IDS, ACTIVATIONS, Activation, Norm

OK, SMALL_WORKSPACE = 0, 3
OWN_SCRATCH = 192  # bytes that every GEMM asks for, so that the way to ask is used
_WIDE = (*base.BLOCK_ROWS, *base.UPRIGHT, *base.SMALL_ROWS)
_NAMES = {number: name for name, number in FORMATS.items() if name not in _WIDE}
_DTYPES = {number: dtype for dtype, number in FLOAT_DTYPES.items()}
_RULES = {number: name for name, number in SCALE_RULES.items()}
_GELUS = {number: name for name, number in GELUS.items()}
_ORDERS = {number: name for name, number in LAYOUTS.items()}


def __getattr__(name: str):
    found = getattr(importlib.import_module("te_mx._native"), name, None)
    if not isinstance(found, type):
        raise AttributeError(name)
    return found


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
    """The memory at an address as a tensor."""
    count = 1
    for size in shape:
        count *= size
    nbytes = max(count * dtype.itemsize, 1)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def _blocks(size: int) -> int:
    return -(-size // 32)


def packed_bytes(rows: int, k: int) -> tuple[int, int]:
    (_, ld), words = sm90_tiles.packed_shapes(rows, k)
    codes = -(-rows * ld // 256) * 256
    scales = -(-words[0] * words[1] * words[2] * 4 // 256) * 256
    return codes + scales, codes


def tiles(codes: Tensor, scales: Tensor, fmt: str, spread: int):
    """Codes [rows, k], one a byte, in tiles."""
    return sm90_tiles.pack(codes, scales, reference.format_of(fmt).name, spread)


def pack_tiles(codes: Tensor, scales: Tensor, fmt: str, k: int, spread: int):
    """Plain codes that lie by rows, in tiles."""
    return tiles(reference.format_of(fmt).unpack(codes, k), scales, fmt, spread)


def _write_packed(place, codes: Tensor, scales: Tensor, fmt: str, k: int, spread: int) -> None:
    packed = pack_tiles(codes, scales, fmt, k, spread)
    at(place.codes, packed.codes.shape).copy_(packed.codes)
    at(place.scales, packed.scales.shape, torch.int32).copy_(packed.scales)


def read_operand(o) -> reference.Operand:
    """The operand that a native record says the address of."""
    order = _ORDERS[o.layout]
    if order == "sm90":
        codes, words = sm90_tiles.packed_shapes(o.rows, o.k)
        parts = at(o.codes, codes)[:, : o.k], at(o.scales, words, torch.int32)
    elif order == "k_first":
        parts = at(o.codes, (o.k, o.rows)), at(o.scales, (_blocks(o.k), o.rows))
    elif order == SM90_NVFP4.name:
        order, fmt = "k_last", reference.format_of(_NAMES[o.element])
        shapes = SM90_NVFP4.shapes(fmt, o.rows, o.k)
        parts = SM90_NVFP4.unpack(fmt, at(o.codes, shapes[0]), at(o.scales, shapes[1]), o.k)
        parts = parts[0][: o.rows], parts[1][: o.rows]
    else:
        width = reference.code_bytes(_NAMES[o.element], o.k)
        parts = at(o.codes, (o.rows, width)), at(o.scales, (o.rows, _blocks(o.k)))
    return reference.Operand(*parts, _NAMES[o.element], order, None, o.k)


def rows_first(operand: reference.Operand) -> tuple[Tensor, Tensor]:
    """Codes [rows, k], one a byte, and scales [rows, blocks] of a plain operand."""
    codes, scales, fmt, order = operand[:4]
    if order == "k_last":
        return reference.format_of(fmt).unpack(codes, operand.k), scales
    return codes.t().contiguous(), scales.t().contiguous()


def read_matrix(m, address: int | None = None) -> Tensor:
    """The matrix that a native record says the address of."""
    memory = at(address or m.data, ((m.rows - 1) * m.row_stride + m.cols,), _DTYPES[m.dtype])
    assert m.col_stride == 1
    return memory.as_strided((m.rows, m.cols), (m.row_stride, 1)).contiguous()


def available(device: int = -1) -> bool:
    return True


# ---------------------------------------------------------------------------------------- quantize
def quantize_two(first, second) -> int:
    return quantize(first) or quantize(second)


def quantize(args) -> int:
    if args.workspace:
        at(args.workspace, (args.workspace_bytes,)).fill_(0)
    return _end_in(args, read_matrix(args.x))


def _end_in(args, values: Tensor) -> int:
    if fake_sm90_factors.is_blockwise(args.to):
        return fake_sm90_factors.quantize(args, values, at)
    return _quantize(args.to, values)


def _randomly(to, values: Tensor, name: str, first: int | None = None) -> reference.QuantizedParts:
    """With the transforms and the seed of a call: what the kernels take of them. first: the number
    of the first element."""
    transforms = to.row.hadamard or to.col.hadamard
    one_read = values.dtype == torch.bfloat16 and name == "e2m1" and not to.row.hadamard
    one_way = bool(to.row.codes) != bool(to.col.codes) and not to.col_sum
    assert not transforms or one_read or one_way
    assert not to.seed or name == "e2m1"
    specs = [
        f"{reference.format_of(name).name}"
        + (f"+rht{one.hadamard}:0x{one.signs:08x}" if one.hadamard else "")
        + "@rows"
        for one in (to.row, to.col)
    ]
    rule = _RULES[to.rule] + "+sr" * bool(to.seed)
    seed = at(to.seed, (1,), torch.int64) if to.seed else None
    made = reference.quantize_house(
        Quantize(
            values,
            *specs,
            rule,
            bool(to.col_sum),
            seed=seed,
            first=to.first if first is None else first,
        )
    )
    return reference.QuantizedParts(*made.row[:2], *made.col[:2], made.col_sum)


def _quantize(to, values: Tensor) -> int:
    """What is made of values, wherever they are."""
    rows, cols = values.shape
    name = _NAMES[to.element]
    parts = _randomly(to, values, name)
    for place, codes, scales, k in ((to.row, *parts[:2], cols), (to.col, *parts[2:4], rows)):
        if not place.codes:
            continue
        order = _ORDERS[place.layout]
        if order == "sm90":
            spread = to.spread if place is to.row else min(to.spread, 8)  # 9 is about rows
            _write_packed(place, codes, scales, name, k, spread)
            continue
        if order == "k_first":
            codes, scales = reference.format_of(name).unpack(codes, k).t(), scales.t()
        at(place.codes, codes.shape).copy_(codes)
        at(place.scales, scales.shape).copy_(scales)
    if to.col_sum:
        at(to.col_sum_ws, (-(-rows // 128), cols), torch.float32).fill_(torch.nan)
        at(to.col_sum, (cols,), _DTYPES[to.col_sum_dtype]).copy_(parts.col_sum)
    return OK


def pack(args) -> int:
    operand = read_operand(args.operand)
    assert _ORDERS[args.out.layout] == "sm90"
    packed = tiles(*rows_first(operand), operand.fmt, args.spread)
    at(args.out.codes, packed.codes.shape).copy_(packed.codes)
    at(args.out.scales, packed.scales.shape, torch.int32).copy_(packed.scales)
    return OK


def dequantize(args) -> int:
    if fake_sm90_factors.is_blockwise(args.operand):
        return fake_sm90_factors.dequantize(args, at)
    operand, dtype = read_operand(args.operand), _DTYPES[args.out_dtype]
    values = reference.values(operand, dtype)
    at(args.out, values.shape, dtype).copy_(values)
    return OK


def row_sums_workspace_bytes(rows, k, k_first) -> int:
    return OWN_SCRATCH


def row_sums(args) -> int:
    at(args.workspace, (OWN_SCRATCH,)).fill_(0xFF)
    operand = read_operand(args.operand)
    assert operand.fmt != "e2m1"  # the kernels do not sum it
    sums = reference.values(operand, torch.float64).sum(0 if operand.order == "k_first" else 1)
    at(args.out, (args.rows,), torch.float32).copy_(sums)
    return OK


# -------------------------------------------------------------------------------------------- gemm
def workspace_bytes(args) -> int:
    return OWN_SCRATCH


def gemm(args) -> int:
    if args.workspace_bytes < OWN_SCRATCH:
        return SMALL_WORKSPACE
    at(args.workspace, (args.workspace_bytes,)).fill_(0xFF)
    if fake_sm90_factors.is_blockwise(args.lhs):
        return fake_sm90_factors.gemm(args, at)
    e, (m, n) = args.epilogue, (args.lhs_rows, args.rhs_rows)
    assert e.ldo == n and args.lhs_k == args.rhs_k
    assert args.kernel == -1 or (args.kernel < 4 and args.parts <= 1 and not e.gelu)
    asked = Epilogue(
        at(e.bias, (n,), _DTYPES[e.bias_dtype]) if e.bias else None,
        _GELUS.get(e.gelu),
        at(e.gelu_in, (m, n), _DTYPES[e.gelu_in_dtype]) if e.gelu_in else None,
        "result" if e.bias_grad else None,
        e.accumulate,
    )
    sums = reference.gemm(
        read_operand(args.rhs),
        read_operand(args.lhs),
        asked,
        at(e.out, (m, n), _DTYPES[e.out_dtype]),
        at(e.aux, (m, n), _DTYPES[e.aux_dtype]) if e.aux else None,
    )
    if e.bias_grad:
        at(e.bias_grad, (n,), torch.float32).copy_(sums)
    return OK


# ------------------------------------------------------------------------------------ linear layer
def linear_offsets(args) -> dict:
    m, n, k = args.m, args.n, args.k

    def room(at: int, rows: int, k: int, side: str, wanted: bool = True) -> tuple[int, int, int]:
        scales = at + packed_bytes(rows, k)[1]
        end = scales + fake_sm90_factors.scale_room(args, side, rows, k)
        return (at, scales, end) if wanted else (at, at, at)

    made = {
        "x_row": room(0, m, k, "row"), "x_col": room(0, k, m, "col"), "w_col": room(0, k, n, "w"),
        "g_kept": room(0, n, m, "col"), "w_row": room(0, n, k, "w"),
        "g_row": room(0, m, n, "row", args.w_columns),
    }  # fmt: skip
    made["g_col"] = room(made["g_row"][2], n, m, "col", args.x_columns)
    made["w_again"] = room(made["g_col"][2], k, n, "w", args.w_columns and not args.w_kept)
    sums = 4 * -(-m // 128) * n
    return made | {
        "forward_bytes": made["w_row"][2], "backward_bytes": made["w_again"][2] + sums
    }  # fmt: skip


Place = tuple[int, int]  # addresses of codes and scales


def _in(buffer: int, place: tuple[int, int, int]) -> Place:
    return buffer + place[0], buffer + place[1]


def _to(args, matrix, element: int, row: Place | None, col: Place | None, w: str = ""):
    """The call that quantizes one matrix of a layer to where it belongs; w "w_" for the weight."""
    made = __getattr__("QuantizeArgs")(
        x=matrix, element=element, rule=args.rule, spread=args.spread,
        amax_epsilon=args.amax_epsilon, **scaling(args, w),
    )  # fmt: skip
    for side, place in (("row", row), ("col", col)):
        if place:
            setattr(made, f"{side}_codes", place[0])
            setattr(made, f"{side}_scales", place[1])
            setattr(made, f"{side}_layout", LAYOUTS["sm90"])
    if not w and fake_sm90_factors.aligns(args):
        made.col_layout = base.ALIGNED["sm90"]
    return made


def _one_product(args, lhs, rhs, out, out_dtype, **more) -> None:
    """lhs, rhs: (place, rows, k, element, scaling)."""
    sides = [
        __getattr__("Operand")(
            codes=place[0], scales=place[1], rows=rows, k=k, element=element,
            layout=LAYOUTS["sm90"], **scaling,
        )
        for place, rows, k, element, scaling in (lhs, rhs)
    ]  # fmt: skip
    room = torch.empty(OWN_SCRATCH, dtype=torch.uint8)
    call = __getattr__("GemmArgs")(
        lhs=sides[0], rhs=sides[1], out=out, out_dtype=out_dtype, ldo=rhs[1],
        workspace=room.data_ptr(), workspace_bytes=OWN_SCRATCH, **more,
    )  # fmt: skip
    assert gemm(call) == OK


def linear_forward(args) -> int:
    m, n, k, fmt = args.m, args.n, args.k, args.forward
    where, temp = linear_offsets(args), args.workspace
    assert args.workspace_bytes == where["forward_bytes"]
    x_row = args.x_row_codes, args.x_row_scales
    w_row = (args.w_row_codes, args.w_row_scales) if args.w_given else _in(temp, where["w_row"])
    x_col, w_col = (args.x_col_codes, args.x_col_scales), (args.w_col_codes, args.w_col_scales)
    assert all(x_row) and all(x_col) == args.x_columns and all(w_row)
    assert all(w_col) == (args.w_kept and not args.w_given)
    if not args.w_given:
        quantize(_to(args, args.w, fmt, w_row, w_col if args.w_kept else None, "w_"))
    if not args.x_given:
        quantize(_to(args, args.x, fmt, x_row, x_col if args.x_columns else None))
    x, w = (x_row, m, k, fmt, scaling(args, "")), (w_row, n, k, fmt, scaling(args, "w_"))
    _one_product(args, x, w, args.y, args.y_dtype, bias=args.bias, bias_dtype=args.bias_dtype)
    return OK


def linear_backward(args) -> int:
    m, n, k, forward, backward = args.m, args.n, args.k, args.forward, args.backward
    later = bool(args.g_col_codes)
    assert bool(args.dx) == args.w_columns and bool(args.dw) + later == args.x_columns
    where, temp = linear_offsets(args), args.workspace
    assert args.workspace_bytes == where["backward_bytes"]
    g_row, g_col = _in(temp, where["g_row"]), _in(temp, where["g_col"])
    if later:
        g_col = args.g_col_codes, args.g_col_scales
    call = _to(
        args, args.g, backward, g_row if args.w_columns else None, g_col if args.x_columns else None
    )
    call.col_sum, call.col_sum_dtype = args.db, args.db_dtype
    call.col_sum_ws = temp + where["backward_bytes"] - 4 * -(-m // 128) * n
    quantize(call)
    if args.w_columns:
        w_col = args.w_col_codes, args.w_col_scales
        if not args.w_kept:
            w_col = _in(temp, where["w_again"])
            quantize(_to(args, args.w, forward, None, w_col, "w_"))
        w = w_col, k, n, forward, scaling(args, "w_")
        g = g_row, m, n, backward, scaling(args, "")
        _one_product(args, g, w, args.dx, args.dx_dtype, accumulate=args.dx_accumulate)
    if args.dw:
        return linear_wgrad(args.copy(g_col_codes=g_col[0], g_col_scales=g_col[1]))
    return OK


def linear_wgrad(args) -> int:
    m, n, k = args.m, args.n, args.k
    x_col, g_col = (args.x_col_codes, args.x_col_scales), (args.g_col_codes, args.g_col_scales)
    columns = {} if fake_sm90_factors.aligns(args) else scaling(args, "")
    g, x = (g_col, n, m, args.backward, columns), (x_col, k, m, args.forward, columns)
    _one_product(args, g, x, args.dw, args.dw_dtype, accumulate=args.dw_accumulate)
    return OK


# ------------------------------------------------------------------------------------- fused steps
def _vector(address: int, size: int, dtype: int = FLOAT_DTYPES[torch.float32]) -> Tensor | None:
    return at(address, (size,), _DTYPES[dtype]) if address else None


def _in_fp32(address: int, size: int, dtype: int) -> Tensor | None:
    return _vector(address, size, dtype).float() if address else None


def _count(args, words: int) -> None:
    """In memory of any values, or in a workspace that a quantizer left as zeros."""
    address = args.counters or args.workspace
    if not args.counters:
        assert args.workspace_bytes >= 4 * words and not at(address, (4 * words,)).any()
    at(address, (4 * words,)).fill_(0xFF)


def normalize(args) -> int:
    rows, cols = args.x_rows, args.x_cols
    assert args.inverse == fused.inverse(cols)
    _count(args, 1 + -(-rows // 128))
    kind = Norm("RMSNorm" if args.rms else "LayerNorm", args.eps)
    mean, rstd, z = fused.normalize(
        read_matrix(args.x), _in_fp32(args.weight, cols, args.weight_dtype),
        _in_fp32(args.bias, cols, args.weight_dtype), kind, _DTYPES[args.z_dtype],
    )  # fmt: skip
    _vector(args.rstd, rows).copy_(rstd)
    if mean is not None:
        _vector(args.mean, rows).copy_(mean)
    if args.z:
        at(args.z, (rows, cols), z.dtype).copy_(z)
    return _end_in(args, z)


def norm_partial_sums(rows) -> int:
    return -(-rows // 64)


def normalize_backward(args) -> int:
    rows, cols = args.x_rows, args.x_cols
    assert args.inverse == fused.inverse(cols) and args.rms == (args.mean == 0)
    assert (args.dz_rows, args.dz_cols) == (rows, cols)
    assert args.dz_dtype == args.x_dtype or args.x_dtype == FLOAT_DTYPES[torch.float32]
    dtype = _DTYPES[args.weight_dtype]
    for place, size in (
        (args.row_sums, rows * 2), (args.partial, norm_partial_sums(rows) * 2 * cols),
    ):  # fmt: skip
        _vector(place, size).fill_(torch.nan)
    _count(args, 1 + -(-rows // 128))
    made = fused.normalize_backward(
        read_matrix(args.dz), read_matrix(args.x), _in_fp32(args.weight, cols, args.weight_dtype),
        _vector(args.mean, rows), _vector(args.rstd, rows), _DTYPES[args.dx_dtype],
    )  # fmt: skip
    at(args.dx, (rows, cols), _DTYPES[args.dx_dtype]).copy_(made[0])
    for place, sums in zip((args.dweight, args.dbias), made[1:], strict=True):
        if place:
            at(place, (cols,), dtype).copy_(sums)
    return OK


def activate(args) -> int:
    return _end_in(args, activated(args))


def activated(args) -> Tensor:
    """The values of a call, which it writes where it is asked to."""
    base = {number: name for name, number in ACT_IDS.items()}[args.act]
    names = [name for name in ACTIVATIONS if Activation(name).base == base]
    (name,) = (name for name in names if Activation(name).gated == args.gated)
    made_by = Activation(name, args.limit, args.alpha, args.offset)
    dtype = _DTYPES[args.out_dtype]
    assert args.h_dtype == args.out_dtype
    values = read_matrix(args.h)
    if args.in_pairs:
        assert args.gated and not args.grad_data
        values = torch.cat((values[:, ::2], values[:, 1::2]), 1)
    if args.grad_data:
        assert args.grad_dtype == args.out_dtype
        grad = read_matrix(args.grad)
        result = fused.activate_backward(grad, values, made_by, dtype)
    else:
        result = fused.activate(values, made_by, dtype)
    if args.out:
        at(args.out, result.shape, dtype).copy_(result)
    return result


# --------------------------------------------------------------------------------- prepared calls
def _fill(record, places, given) -> None:
    values = [one.data_ptr() if isinstance(one, Tensor) else one or 0 for one in given]
    for field, number, offset in places:
        setattr(record, field, values[number] and values[number] + offset)


class Prepared:
    """A call of whatever stands in for the module."""

    def __init__(self, name: str, record, places, count: int) -> None:
        self.name, self.record, self.places, self.count = name, record.copy(), places, count

    def run(self, *given: int | Tensor | None) -> int:
        assert len(given) == self.count
        args = self.record.copy()
        _fill(args, self.places, given)
        return -getattr(binding.native(), self.name)(args)


prepared = Prepared


# --------------------------------------------------------------------------------------- sequences
class Sequence:
    """Calls of whatever stands in for the module, with copies of their records."""

    def __init__(self, steps, count: int) -> None:
        self.steps = [(name, [one.copy() for one in records], at) for name, records, at in steps]
        self.count = count

    def run(self, *given: int | Tensor | None) -> int:
        assert len(given) == self.count
        for _, records, places in self.steps:
            for i, *place in places:
                _fill(records[i], [place], given)
        for name, records, _ in self.steps:
            status = getattr(binding.native(), name)(*records)
            if status:
                return status
        return OK


def sequence(steps, device: int, count: int) -> Sequence:
    return Sequence(steps, count)
