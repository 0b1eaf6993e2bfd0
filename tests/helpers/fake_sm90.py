"""The interface of te_mx._sm90 for training in MX formats and blockwise FP8, on addresses of CPU
memory, by the reference of te_mx.

With it in place of the module, the Python side of the Hopper backend runs on any machine: sizes,
orders, layouts and the places inside a workspace. What the real module leaves undefined is poisoned
here. tests/gpu holds the real module to the same; tests/emulated has the calls that are not here.
Records are those of te_mx._native, which both modules have.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import base
from te_mx.backends.base import FLOAT_DTYPES, GELUS, LAYOUTS, SCALE_RULES
from te_mx.backends.native import BLOCKWISE, MX, fields_of
from te_mx.backends.reference import fused
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.layouts import tiles
from te_mx.backends.sm90.layouts.groups import group_tiles
from te_mx.dispatch import calls, run
from te_mx.dispatch.fused import ACT_IDS, ACTIVATIONS, Activation, Norm
from te_mx.dispatch.groups import device_bounds
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand as Held
from te_mx.layouts.operand import Quantized

OK, UNSUPPORTED, SMALL_WORKSPACE = 0, 2, 3
OWN_SCRATCH = 192  # bytes that every GEMM asks for, so that the way to ask is used
MOST_JOINED = 4
Place = tuple[int, int]  # addresses of codes and scales
DTYPES = {number: dtype for dtype, number in FLOAT_DTYPES.items()}
_RULES = {number: name for name, number in SCALE_RULES.items()}
_GELUS = {number: name for name, number in GELUS.items()}
_SAYS = "scale_type", "block_rows", "element"  # which format a record is about
_FORMATS = {
    tuple(fields_of(f"{name}@rows").get(word, 0) for word in _SAYS): name
    for name in (*MX, *BLOCKWISE)
}
# How operands lie, by the number of their layout: of MX formats and of those with fp32 scales.
_SPREADS = {LAYOUTS[name]: name for name in ("sm90", "sm90_rows", "sm90_k")}
_WIDE = {
    LAYOUTS["sm90"]: "sm90_factors", LAYOUTS["sm90_rows"]: "sm90_factors_rows",
    LAYOUTS["sm90_k"]: "sm90_factors_k", base.ALIGNED["sm90"]: "sm90:{}",
    base.ALIGNED["sm90_k"]: "sm90_k:{}",
}  # fmt: skip
_PLAIN = {LAYOUTS["k_last"]: "rows", LAYOUTS["k_first"]: "cols"}
_MX = {number: f"{name}:{{}}" for number, name in _SPREADS.items()} | {
    LAYOUTS["standing"]: "sm90_nvfp4"
}


def __getattr__(name: str):
    found = getattr(importlib.import_module("te_mx._native"), name, None)
    if not isinstance(found, type):
        raise AttributeError(name)
    return found


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
    """The memory at an address as a tensor."""
    count = math.prod(shape)
    memory = (ctypes.c_uint8 * max(count * dtype.itemsize, 1)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def available(device: int = -1) -> bool:
    return True


# ---------------------------------------------------------------------------------------- operands
def is_blockwise(of: Any) -> bool:
    return of.scale_type == 1


def _format(of: Any) -> str:
    """The format of an operand, or of what a matrix is quantized to."""
    return _FORMATS[of.scale_type, of.block_rows if of.scale_type else 0, of.element]


def _layout(of: Any, number: int, spread: int) -> str:
    return (_PLAIN | (_WIDE if is_blockwise(of) else _MX))[number].format(spread)


def operand_at(
    place: Any, spec: str, rows: int, k: int, i: int = 0, groups: int | None = None
) -> Held:
    """Codes and scales at the addresses of a record, of operand i of several behind each other or
    of tokens in groups."""
    fmt, layout = spec_of(spec)
    sizes = (fmt, rows, k) if groups is None else (fmt, rows, k, groups)
    (height, width), scales = (layout.shapes if groups is None else layout.grouped_shapes)(*sizes)
    ld, dtype = layout.row_bytes(width) or width, layout.scales_dtype(fmt)
    codes = at(place.codes + i * height * ld, (height, ld))[:, :width]
    behind = i * math.prod(scales) * dtype.itemsize
    return Held(codes, at(place.scales + behind, scales, dtype), spec, rows, k)


def _spec(of: Any) -> str:
    return f"{_format(of)}@{_layout(of, of.layout, 8)}"


def read_operand(of: Any, i: int = 0, groups: int | None = None) -> Held:
    """The operand that a record says the address of, or number i of several."""
    return operand_at(of, _spec(of), of.rows, of.k, i, groups)


def write(place: Any, made: Held | None, i: int = 0) -> None:
    """To the place of operand i of several behind each other."""
    if made is not None:
        there = operand_at(place, made.spec, made.rows, made.k, i)
        there.codes.copy_(made.codes)
        there.scales.copy_(made.scales)


def read_matrix(m: Any, address: int | None = None) -> Tensor:
    """The matrix that a record says the address of."""
    memory = at(address or m.data, ((m.rows - 1) * m.row_stride + m.cols,), DTYPES[m.dtype])
    assert m.col_stride == 1
    return memory.as_strided((m.rows, m.cols), (m.row_stride, 1)).contiguous()


def packed_bytes(rows: int, k: int) -> tuple[int, int]:
    """Of an operand in tiles, all of it and of its codes."""
    (_, ld), words = tiles.packed_shapes(rows, k)
    codes, scales = (-(-nbytes // 256) * 256 for nbytes in (rows * ld, 4 * math.prod(words)))
    return codes + scales, codes


# ---------------------------------------------------------------------------------------- quantize
def _specs(to: Any) -> list[str]:
    """What a call makes of one matrix."""
    specs = []
    for side, spread in ((to.row, to.spread), (to.col, min(to.spread, 8))):  # 9 is about rows
        turn = f"+rht{side.hadamard}:0x{side.signs:08x}" if side.hadamard else ""
        layout = _layout(to, side.layout, spread) if side.codes else ""
        specs.append(layout and f"{_format(to)}{turn}@{layout}")
    return specs


def _rule(to: Any) -> str:
    rule = _RULES[to.rule] + "+sr" * bool(to.seed)
    return f"{rule}:{to.amax_epsilon!r}" if is_blockwise(to) else rule


def _made(to: Any, x: Tensor, specs: list[str], first: int = 0) -> Quantized:
    """Of a matrix whose rows are counted from `first` on: what the kernels take of transforms and
    stochastic rounding."""
    transforms = to.row.hadamard or to.col.hadamard
    fp4 = _format(to) == "mxfp4"
    one_read = x.dtype == torch.bfloat16 and fp4 and not to.row.hadamard
    one_way = bool(to.row.codes) != bool(to.col.codes) and not to.col_sum
    assert (not transforms or one_read or one_way) and (fp4 or not to.seed)
    seed = at(to.seed, (1,), torch.int64) if to.seed else None
    what = calls.Quantize(
        x, *specs, _rule(to), bool(to.col_sum), DTYPES[to.col_sum_dtype], seed, to.first + first
    )
    return run.reference("quantize").run(what)


def end_in(to: Any, values: Tensor) -> int:
    """Writes what a call makes of values, wherever they are."""
    made, (rows, cols) = _made(to, values, _specs(to)), values.shape
    write(to.row, made.row)
    write(to.col, made.col)
    if to.col_sum:
        at(to.col_sum_ws, (-(-rows // 128), cols), torch.float32).fill_(torch.nan)
        at(to.col_sum, (cols,), made.col_sum.dtype).copy_(made.col_sum)
    return OK


def quantize(args) -> int:
    if args.workspace:
        at(args.workspace, (args.workspace_bytes,)).fill_(0)
    return end_in(args.to, read_matrix(args.x))


def quantize_two(first, second) -> int:
    return quantize(first) or quantize(second)


def quantize_joined(args, xs, rows) -> int:
    if is_blockwise(args.to) or len(xs) > MOST_JOINED or any(count % 128 for count in rows[:-1]):
        return UNSUPPORTED
    assert sum(rows) == args.x_rows and not args.to.col_sum
    parts = [read_matrix(args.x.copy(rows=n), address) for address, n in zip(xs, rows, strict=True)]
    return end_in(args.to, torch.cat(parts))


def quantize_stacked(args, xs) -> int:
    for i, address in enumerate(xs):
        made = _made(args.to, read_matrix(args.x, address), _specs(args.to))
        write(args.to.row, made.row, i)
        write(args.to.col, made.col, i)
    return OK


def _convert(operand: Held, spread: int) -> Held:
    return run.reference("convert").run(operand, f"{operand.format.name}@sm90:{spread}")


def pack(args) -> int:
    assert args.out.layout == LAYOUTS["sm90"]
    write(args.out, _convert(read_operand(args.operand), args.spread))
    return OK


def unpack(*sides) -> int:
    """Codes of 4 bits to tiles of 8."""
    for args in sides:
        assert args.operand.k == sides[0].operand.k and _format(args.operand) == "mxfp4"
        assert args.operand.layout in (LAYOUTS["k_last"], LAYOUTS["sm90_nvfp4"])
        pack(args)
    return OK


unpack_two = unpack


def dequantize(args) -> int:
    operand = read_operand(args.operand)
    values = operand.values(DTYPES[args.out_dtype])
    values = values.t() if operand.layout.k_first else values
    at(args.out, values.shape, values.dtype).copy_(values)
    return OK


def row_sums_workspace_bytes(rows, k, k_first) -> int:
    return OWN_SCRATCH


def row_sums(args) -> int:
    at(args.workspace, (OWN_SCRATCH,)).fill_(0xFF)
    operand = read_operand(args.operand)
    assert operand.format.name != "mxfp4"  # the kernels do not sum it
    at(args.out, (args.rows,), torch.float32).copy_(operand.values(torch.float64).sum(1))
    return OK


# -------------------------------------------------------------------------------------------- gemm
def workspace_bytes(args) -> int:
    return OWN_SCRATCH


def gemm(args) -> int:
    if args.workspace_bytes < OWN_SCRATCH:
        return SMALL_WORKSPACE
    at(args.workspace, (args.workspace_bytes,)).fill_(0xFF)
    lhs, rhs, e = read_operand(args.lhs), read_operand(args.rhs), args.epilogue
    m, n = lhs.rows, rhs.rows
    assert e.ldo == n and lhs.k == rhs.k
    assert args.kernel == -1 or (args.kernel < 4 and args.parts <= 1 and not e.gelu)
    if is_blockwise(args.lhs):
        assert lhs.format.scaling.block[0] == 1 and args.parts <= 1
        assert lhs.layout.name == rhs.layout.name == "sm90_factors"
    asked = calls.Epilogue(
        at(e.bias, (n,), DTYPES[e.bias_dtype]) if e.bias else None,
        _GELUS.get(e.gelu),
        at(e.gelu_in, (m, n), DTYPES[e.gelu_in_dtype]) if e.gelu_in else None,
        "result" if e.bias_grad else None,
        e.accumulate,
    )
    aux = at(e.aux, (m, n), DTYPES[e.aux_dtype]) if e.aux else None
    made = _multiply(lhs, rhs, asked, at(e.out, (m, n), DTYPES[e.out_dtype]), aux)
    if e.bias_grad:
        at(e.bias_grad, (n,), torch.float32).copy_(made.bias_grad)
    return OK


def codes_workspace_bytes(args) -> int:
    plain = args.lhs.layout == LAYOUTS["k_last"]
    return OWN_SCRATCH + (packed_bytes(args.lhs_rows, args.lhs_k)[0] if plain else 0)


def gemm_codes(args) -> int:
    """The GEMM that reads plain codes of 4 bits."""
    plain = LAYOUTS["k_last"]
    assert (args.rhs.layout, _format(args.rhs)) == (plain, "mxfp4")
    assert args.lhs.layout == LAYOUTS["sm90"] or (args.lhs.layout, _format(args.lhs)) == (
        plain,
        "mxfp4",
    )
    assert -(-args.rhs.k // 2) % 16 == 0 and args.rhs.codes % 16 == 0
    assert args.workspace_bytes >= codes_workspace_bytes(args)
    assert args.kernel == -1 and 1 <= args.parts <= min(8, -(-args.lhs_k // 128))
    return gemm(args)


def _multiply(lhs: Held, rhs: Held, asked: calls.Epilogue, out: Tensor, aux: Tensor | None = None):
    return run.reference("gemm").run(calls.Product(lhs, rhs, asked, out, aux, calls.Mode()))


# ------------------------------------------------------------------------------------------ groups
def upload_ends(ends, to, stream, device=-1) -> int:
    at(to, (len(ends),), torch.int32).copy_(torch.tensor(ends))
    return OK


def bounds_of(groups) -> list[tuple[int, int, int]]:
    """Number, start and end of every group."""
    offs = at(groups.ends, (groups.count,), torch.int32 if groups.ends_int32 else torch.int64)
    starts, ends = device_bounds(offs, groups.capacity, groups.rows)
    return list(zip(range(groups.count), starts.tolist(), ends.tolist(), strict=True))


def _poisoned(operand: Held) -> Held:
    operand.codes.fill_(0xA5)
    operand.scales.view(torch.int32).fill_(0x5A5A5A5A)
    return operand


def quantize_grouped(args) -> int:
    matrix, groups = args.all.x, args.groups
    if not args.gather:
        return grouped_end_in(args.all.to, groups, read_matrix(matrix))
    rows = at(args.gather, (groups.rows,), torch.int32)
    rows = rows[: max(end for *_, end in bounds_of(groups))].long()
    matrix = matrix.copy(rows=int(rows.max()) + 1 if len(rows) else 1)
    return grouped_end_in(args.all.to, groups, read_matrix(matrix)[rows])


def grouped_end_in(to: Any, groups: Any, values: Tensor) -> int:
    rows, cols, sums = groups.rows, values.shape[1], None
    there: list[Held | None] = []
    for place, spec, *sizes in zip(
        (to.row, to.col), _specs(to), (rows, cols), (cols, rows), strict=True
    ):
        whole = operand_at(place, spec, *sizes, groups=groups.count) if spec else None
        there.append(whole and _poisoned(whole))
    alone = ["" if one is None else f"{one.format.name}@{one.layout.alone}" for one in there]
    if to.col_sum:
        parts = (group_tiles(rows, groups.count), cols)
        at(to.col_sum_ws, parts, torch.float32).fill_(torch.nan)
        assert DTYPES[to.col_sum_dtype] == torch.float32
        sums = at(to.col_sum, (groups.count, cols), torch.float32).zero_()
    for i, start, end in bounds_of(groups):
        if start == end:
            continue
        made = _made(to, values[start:end], alone, start)
        for into, one in zip(there, made[:2], strict=True):
            if into is not None:
                into.layout.put_group(into, one, start, end, i)
        if sums is not None:
            sums[i] = made.col_sum
    return OK


def pack_stacked(args) -> int:
    for i, start, end in bounds_of(args.groups):
        operand = read_operand(args.operand, i)
        made = _convert(operand, args.spread)
        if end == start:
            _poisoned(made)
        write(args.out, made, i)
    return OK


def columns_of_stacked(args) -> int:
    for i in range(args.groups_count):
        operand = read_operand(args.operand, i)
        assert operand.layout.name == "rows"
        spec = f"{operand.format.name}@sm90:{args.spread}"
        what = calls.Quantize(operand.values(torch.bfloat16), "", spec, _RULES[args.rule])
        write(args.out, run.reference("quantize").run(what).col, i)
    return OK


def gemm_grouped(args, first_rows=()) -> int:
    """One native call, of which the tests tell two kinds apart."""
    e = args.gemm.epilogue
    assert e.ldo == args.rhs_rows
    assert not (e.gelu or e.aux or e.gelu_in or e.bias_grad or e.bias_grad_kind)
    return gemm_k(args, first_rows) if args.along_k else gemm_rows(args)


def gemm_rows(args) -> int:
    m, n, count, rhs = args.lhs_rows, args.rhs_rows, args.groups_count, args.gemm.rhs
    assert not args.accumulate and args.groups_rows == m and args.rhs_k == args.lhs_k
    assert args.lhs_layout == LAYOUTS["sm90_rows"] and args.rhs_layout == LAYOUTS["sm90"]
    out = at(args.out, (m, n), DTYPES[args.out_dtype]).zero_()
    bias = at(args.bias, (count, n), DTYPES[args.bias_dtype]) if args.bias else None
    tokens = read_operand(args.gemm.lhs, groups=count)
    for i, start, end in bounds_of(args.groups):
        if end > start:
            asked = calls.Epilogue(None if bias is None else bias[i])
            own = tokens.group(start, end, i)
            _multiply(own, read_operand(rhs, i), asked, out[start:end])
    return OK


def gemm_k(args, first_rows=()) -> int:
    m, n, count, dtype = args.lhs_rows, args.rhs_rows, args.groups_count, DTYPES[args.out_dtype]
    sides = args.gemm.lhs, args.gemm.rhs
    assert not args.bias and len(first_rows) in (0, count)
    assert all(side.layout == LAYOUTS["sm90_k"] and side.block_rows <= 1 for side in sides)
    tokens = [read_operand(side.copy(k=args.groups_rows), groups=count) for side in sides]
    firsts = first_rows or [i * m for i in range(count)]
    for i, start, end in bounds_of(args.groups):
        out = at(args.out + firsts[i] * n * dtype.itemsize, (m, n), dtype)
        if end > start:
            both = (one.group(start, end, i) for one in tokens)
            _multiply(*both, calls.Epilogue(accumulate=args.accumulate), out)
        elif not args.accumulate:
            out.zero_()
    return OK


# ------------------------------------------------------------------------------------ linear layer
def _aligns(args) -> bool:
    """Whether columns of x and of the gradient of a layer are tiles as those of MX."""
    return bool(args.scale_type) and _RULES[args.rule] == "pow2"


def _scaling(args, side: str) -> dict[str, int]:
    """Of the weight, "w", or of "row" or "col" of x and the gradient, in the words of a record."""
    if side == "col" and _aligns(args):
        return {}
    w = "w_" if side == "w" else ""
    return {name: getattr(args, w + name) for name in ("scale_type", "block_rows", "block_k")}


def _side(args, side: str, rows: int, k: int, element: int, place: Place = (0, 0)):
    return __getattr__("Operand")(
        codes=place[0], scales=place[1], rows=rows, k=k, element=element,
        layout=LAYOUTS["sm90"], **_scaling(args, side),
    )  # fmt: skip


def linear_offsets(args) -> dict:
    m, n, k = args.m, args.n, args.k

    def room(at: int, rows: int, k: int, side: str, wanted: bool = True) -> tuple[int, int, int]:
        fmt, layout = spec_of(_spec(_side(args, side, rows, k, args.forward)))
        (_, width), words = layout.shapes(fmt, rows, k)
        scales = at + -(-rows * layout.row_bytes(width) // 256) * 256
        end = scales + -(-4 * math.prod(words) // 256) * 256
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


def _in(buffer: int, place: tuple[int, int, int]) -> Place:
    return buffer + place[0], buffer + place[1]


def _to(args, matrix, element: int, row: Place | None, col: Place | None, side: str = "row"):
    """The call that quantizes one matrix of a layer to where it belongs."""
    made = __getattr__("QuantizeArgs")(
        x=matrix, element=element, rule=args.rule, spread=args.spread,
        amax_epsilon=args.amax_epsilon, **_scaling(args, side),
    )  # fmt: skip
    for name, place in (("row", row), ("col", col)):
        if place:
            setattr(made, f"{name}_codes", place[0])
            setattr(made, f"{name}_scales", place[1])
            setattr(made, f"{name}_layout", LAYOUTS["sm90"])
    if side != "w" and _aligns(args):
        made.col_layout = base.ALIGNED["sm90"]
    return made


def _one_product(lhs, rhs, out, out_dtype, **more) -> None:
    room = torch.empty(OWN_SCRATCH, dtype=torch.uint8)
    call = __getattr__("GemmArgs")(
        lhs=lhs, rhs=rhs, out=out, out_dtype=out_dtype, ldo=rhs.rows,
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
        quantize(_to(args, args.w, fmt, w_row, w_col if args.w_kept else None, "w"))
    if not args.x_given:
        quantize(_to(args, args.x, fmt, x_row, x_col if args.x_columns else None))
    x, w = _side(args, "row", m, k, fmt, x_row), _side(args, "w", n, k, fmt, w_row)
    _one_product(x, w, args.y, args.y_dtype, bias=args.bias, bias_dtype=args.bias_dtype)
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
            quantize(_to(args, args.w, forward, None, w_col, "w"))
        g, w = _side(args, "row", m, n, backward, g_row), _side(args, "w", k, n, forward, w_col)
        _one_product(g, w, args.dx, args.dx_dtype, accumulate=args.dx_accumulate)
    if args.dw:
        return linear_wgrad(args.copy(g_col_codes=g_col[0], g_col_scales=g_col[1]))
    return OK


def linear_wgrad(args) -> int:
    m, n, k = args.m, args.n, args.k
    x_col, g_col = (args.x_col_codes, args.x_col_scales), (args.g_col_codes, args.g_col_scales)
    g = _side(args, "col", n, m, args.backward, g_col)
    x = _side(args, "col", k, m, args.forward, x_col)
    _one_product(g, x, args.dw, args.dw_dtype, accumulate=args.dw_accumulate)
    return OK


# ------------------------------------------------------------------------------------- fused steps
def _vector(address: int, size: int, dtype: int = FLOAT_DTYPES[torch.float32]) -> Tensor | None:
    return at(address, (size,), DTYPES[dtype]) if address else None


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
        _in_fp32(args.bias, cols, args.weight_dtype), kind, DTYPES[args.z_dtype],
    )  # fmt: skip
    _vector(args.rstd, rows).copy_(rstd)
    if mean is not None:
        _vector(args.mean, rows).copy_(mean)
    if args.z:
        at(args.z, (rows, cols), z.dtype).copy_(z)
    return end_in(args.to, z)


def norm_partial_sums(rows) -> int:
    return -(-rows // 64)


def normalize_backward(args) -> int:
    rows, cols = args.x_rows, args.x_cols
    assert args.inverse == fused.inverse(cols) and args.rms == (args.mean == 0)
    assert (args.dz_rows, args.dz_cols) == (rows, cols)
    assert args.dz_dtype == args.x_dtype or args.x_dtype == FLOAT_DTYPES[torch.float32]
    dtype = DTYPES[args.weight_dtype]
    for place, size in (
        (args.row_sums, rows * 2), (args.partial, norm_partial_sums(rows) * 2 * cols),
    ):  # fmt: skip
        _vector(place, size).fill_(torch.nan)
    _count(args, 1 + -(-rows // 128))
    made = fused.normalize_backward(
        read_matrix(args.dz), read_matrix(args.x), _in_fp32(args.weight, cols, args.weight_dtype),
        _vector(args.mean, rows), _vector(args.rstd, rows), DTYPES[args.dx_dtype],
    )  # fmt: skip
    at(args.dx, (rows, cols), DTYPES[args.dx_dtype]).copy_(made[0])
    for place, sums in zip((args.dweight, args.dbias), made[1:], strict=True):
        if place:
            at(place, (cols,), dtype).copy_(sums)
    return OK


def activate(args) -> int:
    return end_in(args.to, activated(args))


def activate_grouped(args, groups) -> int:
    assert not args.out and (args.to.row.codes or args.to.col.codes)
    return grouped_end_in(args.to, groups, activated(args))


def activated(args) -> Tensor:
    """The values of a call, which it writes where it is asked to."""
    act = {number: name for name, number in ACT_IDS.items()}[args.act]
    kinds = [Activation(name) for name in ACTIVATIONS]
    (name,) = (kind.name for kind in kinds if (kind.base, kind.gated) == (act, args.gated))
    made_by = Activation(name, args.limit, args.alpha, args.offset)
    dtype = DTYPES[args.out_dtype]
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
