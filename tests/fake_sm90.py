"""The interface of te_mx._sm90 in plain torch, on addresses of CPU memory.

With it in place of the module, the Python side of the Hopper backend runs on any machine: sizes,
orders, forms and the places inside a workspace. tests/gpu holds the real module to the same.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from te_mx.backends import reference, reference_fused, sm90_layout
from te_mx.backends.base import FLOAT_DTYPES, FORMATS, GELUS, Epilogue, Operand
from te_mx.backends.fused import ACT_IDS, ACTIVATIONS, Activation, Norm

OK, SMALL_WORKSPACE = 0, 3
OWN_SCRATCH = 192  # bytes that every GEMM asks for, so that the way to ask is used
_NAMES = {fmt.native_id: name for name, fmt in FORMATS.items()}
_DTYPES = {number: dtype for dtype, number in FLOAT_DTYPES.items()}
_RULES = ("rceil", "floor")
_GELUS = {number: name for name, number in GELUS.items()}


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
    (_, ld), words = sm90_layout.packed_shapes(rows, k)
    codes = -(-rows * ld // 256) * 256
    scales = -(-words[0] * words[1] * words[2] * 4 // 256) * 256
    return codes + scales, codes


def _write_packed(place, codes: Tensor, scales: Tensor, fmt: str, spread: int) -> None:
    packed = sm90_layout.pack(codes, scales, fmt, spread)
    at(place[0], packed.codes.shape).copy_(packed.codes)
    at(place[1], packed.scales.shape, torch.int32).copy_(packed.scales)


def _operand(place, fmt: int, rows: int, k: int) -> Operand:
    codes, words = sm90_layout.packed_shapes(rows, k)
    read = at(place[0], codes)[:, :k], at(place[1], words, torch.int32)
    return Operand(*read, _NAMES[fmt], "sm90")


def available(device: int = -1) -> bool:
    return True


def quantize_two(first, second, stream, device=-1) -> int:
    return quantize(first, stream, device) or quantize(second, stream, device)


def quantize(call, stream, device=-1) -> int:
    address, rows, cols, stride, dtype = call[0]
    return _quantize(call, _matrix(address, stride, dtype, rows, cols))


def _matrix(address: int, stride: int, dtype: int, rows: int, cols: int) -> Tensor:
    memory = at(address, ((rows - 1) * stride + cols,), _DTYPES[dtype])
    return memory.as_strided((rows, cols), (stride, 1)).contiguous()


def _quantize(call, values: Tensor) -> int:
    """What a call makes of values, wherever they are."""
    (_, rows, cols, _, _), fmt, rule, row, col, spread, col_sum, sum_dtype, col_sum_ws = call
    assert values.shape == (rows, cols)
    name = _NAMES[fmt]
    parts = reference.quantize(values, name, True, "transposed", _RULES[rule], bool(col_sum))
    for place, codes, scales in ((row, *parts[:2]), (col, *parts[2:4])):
        form = int(place[2])
        if not place[0]:
            continue
        if form == 1:
            _write_packed(place, codes, scales, name, spread)
            continue
        if form == 2:
            codes, scales = codes.t(), scales.t()
        at(place[0], codes.shape).copy_(codes)
        at(place[1], scales.shape).copy_(scales)
    if col_sum:
        at(col_sum_ws, (-(-rows // 128), cols), torch.float32).fill_(torch.nan)
        at(col_sum, (cols,), _DTYPES[sum_dtype]).copy_(parts.col_sum)
    return OK


def pack(
    codes, scales, rows, k, k_first, fmt, spread, out_codes, out_scales, stream, device=-1
) -> int:
    if k_first:
        c, s = at(codes, (k, rows)).t(), at(scales, (_blocks(k), rows)).t()
    else:
        c, s = at(codes, (rows, k)), at(scales, (rows, _blocks(k)))
    _write_packed((out_codes, out_scales), c.contiguous(), s.contiguous(), _NAMES[fmt], spread)
    return OK


def dequantize(
    codes, scales, rows, cols, blocks_along_rows, fmt, out_dtype, out, stream, device=-1
) -> int:
    order = "k_first" if blocks_along_rows else "k_last"
    shape = (_blocks(rows), cols) if blocks_along_rows else (rows, _blocks(cols))
    dtype = _DTYPES[out_dtype]
    values = reference.dequantize(
        at(codes, (rows, cols)), at(scales, shape), _NAMES[fmt], order, dtype
    )
    at(out, (rows, cols), dtype).copy_(values)
    return OK


def row_sums_workspace_bytes(rows, k, k_first) -> int:
    return OWN_SCRATCH


def row_sums(codes, scales, rows, k, k_first, fmt, out, workspace, stream, device=-1) -> int:
    at(workspace, (OWN_SCRATCH,)).fill_(0xFF)
    shape, order = ((k, rows), "k_first") if k_first else ((rows, k), "k_last")
    blocks = (_blocks(k), rows) if k_first else (rows, _blocks(k))
    values = reference.dequantize(
        at(codes, shape), at(scales, blocks), _NAMES[fmt], order, torch.float64
    )
    at(out, (rows,), torch.float32).copy_(values.sum(0 if k_first else 1))
    return OK


def workspace_bytes(problem, epilogue, config=-1, device=-1, parts=1) -> int:
    return OWN_SCRATCH


def gemm(problem, epilogue, workspace, nbytes, config, stream, device=-1, parts=1) -> int:
    if nbytes < OWN_SCRATCH:
        return SMALL_WORKSPACE
    at(workspace, (nbytes,)).fill_(0xFF)
    lhs, lhs_fmt, rhs, rhs_fmt, m, n, k = problem
    out, out_dtype, ldo, accumulate, bias, bias_dtype, gelu, aux, aux_dtype = epilogue[:9]
    gelu_in, gelu_in_dtype, bias_grad = epilogue[9:]
    assert ldo == n
    asked = Epilogue(
        at(bias, (n,), _DTYPES[bias_dtype]) if bias else None,
        _GELUS.get(gelu),
        at(gelu_in, (m, n), _DTYPES[gelu_in_dtype]) if gelu_in else None,
        "result" if bias_grad else None,
        accumulate,
    )
    sums = reference.gemm(
        _operand(rhs, rhs_fmt, n, k),
        _operand(lhs, lhs_fmt, m, k),
        asked,
        at(out, (m, n), _DTYPES[out_dtype]),
        at(aux, (m, n), _DTYPES[aux_dtype]) if aux else None,
    )
    if bias_grad:
        at(bias_grad, (n,), torch.float32).copy_(sums)
    return OK


# ------------------------------------------------------------------------------------ linear layer
def linear_rooms(shape):
    m, n, k, x_columns, w_columns = shape

    def room(at: int, rows: int, k: int, wanted: bool = True) -> tuple[int, int, int]:
        if not wanted:
            return at, at, at
        nbytes, scales = packed_bytes(rows, k)
        return at, at + scales, at + nbytes

    x_row = room(0, m, k)
    x_col = room(0, k, m, x_columns)
    g_row = room(0, m, n, w_columns)
    g_col = room(g_row[2], n, m, x_columns)
    sums = 4 * -(-m // 128) * n
    return x_row, room(x_row[2], n, k), x_col, room(x_col[2], k, n, w_columns), g_col[2] + sums


def _at(buffer: int, room: tuple[int, int, int], form: int = 1) -> tuple[int, int, int]:
    return buffer + room[0], buffer + room[1], form


def _one_product(out, lhs, lhs_fmt, rhs, rhs_fmt, sizes, bias=(0, 0)) -> None:
    words = (*out, sizes[1], False, *bias, 0, 0, 0, 0, 0, 0)
    room = torch.empty(OWN_SCRATCH, dtype=torch.uint8)
    problem = (lhs[:2], lhs_fmt, rhs[:2], rhs_fmt, *sizes)
    assert gemm(problem, words, room.data_ptr(), OWN_SCRATCH, -1, 0) == OK


def linear_forward(shape, words, x, w, bias, y, temp, saved, stream, device=-1) -> int:
    (m, n, k, x_columns, w_columns), (rule, spread, fmt, _) = shape, words
    rooms = linear_rooms(shape)
    x_row, w_row = (_at(temp, room) for room in rooms[:2])
    for matrix, rows, row, col, columns in (
        (w, n, w_row, rooms[3], w_columns),
        (x, m, x_row, rooms[2], x_columns),
    ):
        place = _at(saved, col) if columns else (0, 0, 0)
        what = (matrix[0], rows, k, *matrix[1:])
        quantize((what, fmt, rule, row, place, spread, 0, 0, 0), stream, device)
    _one_product(y, x_row, fmt, w_row, fmt, (m, n, k), bias)
    return OK


def linear_backward(shape, words, g, saved, dx, dw, db, temp, stream, device=-1) -> int:
    (m, n, k, x_columns, w_columns), (rule, spread, forward, backward) = shape, words
    assert bool(dx[0]) == w_columns and bool(dw[0]) == x_columns
    _, _, x_col, w_col, total = linear_rooms(shape)
    nbytes, scales = packed_bytes(m, n)
    g_row = temp, temp + scales, int(w_columns)
    start = temp + (nbytes if w_columns else 0)
    nbytes, scales = packed_bytes(n, m)
    g_col = start, start + scales, 1
    sums = temp + total - 4 * -(-m // 128) * n
    none = (0, 0, 0)
    quantize(
        ((g[0], m, n, *g[1:]), backward, rule, g_row if w_columns else none,
         g_col if x_columns else none, spread, db[0], db[1], sums), stream, device,
    )  # fmt: skip
    if w_columns:
        _one_product(dx, g_row, backward, _at(saved, w_col), forward, (m, k, n))
    if x_columns:
        _one_product(dw, g_col, backward, _at(saved, x_col), forward, (n, k, m))
    return OK


# ------------------------------------------------------------------------------------- fused steps
def _vector(address: int, size: int) -> Tensor | None:
    return at(address, (size,), torch.float32) if address else None


def norm_quantize(x, norm, weight, bias, out, quantized, stream, device=-1) -> int:
    (_, rows, cols, _, dtype), (rms, eps, scale) = quantized[0], norm
    assert scale == reference_fused.inverse(cols)
    mean_at, rstd_at, z_at, scratch = out
    at(scratch, (4 * -(-rows // 128),)).fill_(0xFF)
    kind = Norm("RMSNorm" if rms else "LayerNorm", eps)
    mean, rstd, z = reference_fused.normalize(
        _matrix(*x, rows, cols), _vector(weight, cols), _vector(bias, cols), kind, _DTYPES[dtype]
    )
    _vector(rstd_at, rows).copy_(rstd)
    if mean is not None:
        _vector(mean_at, rows).copy_(mean)
    if z_at:
        at(z_at, (rows, cols), z.dtype).copy_(z)
    return _quantize(quantized, z)


def norm_partial_sums(rows) -> int:
    return -(-rows // 64)


def norm_backward(
    dz, x, rows, cols, norm, weight, stats, dx, sums, scratch, stream, device=-1
) -> int:
    rms, scale = norm
    assert scale == reference_fused.inverse(cols) and rms == (stats[0] == 0)
    assert dz[2] == x[2] or x[2] == FLOAT_DTYPES[torch.float32]
    sizes = rows * 2, norm_partial_sums(rows) * 2 * cols, -(-rows // 128)
    for place, size in zip(scratch, sizes, strict=True):
        _vector(place, size).fill_(torch.nan)
    made = reference_fused.normalize_backward(
        _matrix(*dz, rows, cols), _matrix(*x, rows, cols), _vector(weight, cols),
        _vector(stats[0], rows), _vector(stats[1], rows), _DTYPES[dx[1]],
    )  # fmt: skip
    at(dx[0], (rows, cols), _DTYPES[dx[1]]).copy_(made[0])
    at(sums, (2, cols), torch.float32).copy_(torch.stack(made[1:]))
    return OK


def act_quantize(h, grad, cols, act, out, quantized, stream, device=-1) -> int:
    number, gated, *numbers = act
    base = {number: name for name, number in ACT_IDS.items()}[number]
    names = [name for name in ACTIVATIONS if Activation(name).base == base]
    (name,) = (name for name in names if Activation(name).gated == gated)
    made_by = Activation(name, *numbers)
    (_, rows, made, _, dtype) = quantized[0]
    values = _matrix(*h, dtype, rows, 2 * cols if gated else cols)
    if grad[0]:
        g = _matrix(*grad, dtype, rows, cols)
        result = reference_fused.activate_backward(g, values, made_by, _DTYPES[dtype])
    else:
        result = reference_fused.activate(values, made_by, _DTYPES[dtype])
    if out:
        at(out, (rows, made), _DTYPES[dtype]).copy_(result)
    return _quantize(quantized, result)
