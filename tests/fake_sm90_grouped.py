"""The grouped calls of te_mx._sm90 in plain torch, on addresses of CPU memory: see fake_sm90.py.

What the real module leaves undefined is poisoned here.
"""

from __future__ import annotations

import torch
from fake_sm90 import _DTYPES, _NAMES, _RULES, OK, at, available  # noqa: F401
from torch import Tensor

from te_mx.backends import reference, sm90_layout
from te_mx.backends import sm90_grouped_layout as layout
from te_mx.backends.base import Epilogue, Operand, blocks
from te_mx.backends.grouped import Bounds, device_bounds


def upload_ends(ends, to, stream, device=-1) -> int:
    at(to, (len(ends),), torch.int32).copy_(torch.tensor(ends))
    return OK


def bounds_of(groups) -> Bounds:
    address, is_long, count, rows, capacity = groups
    offs = at(address, (count,), torch.int64 if is_long else torch.int32)
    starts, ends = device_bounds(offs, capacity, rows)
    return Bounds(starts.tolist(), ends.tolist())


def _parts(place, shapes) -> tuple[Tensor, Tensor]:
    return at(place[0], shapes[0]), at(place[1], shapes[1], torch.int32)


def _poisoned(place, shapes) -> tuple[Tensor, Tensor] | None:
    if not place[0]:
        return None
    codes, words = _parts(place, shapes)
    return codes.fill_(0xA5), words.fill_(0x5A5A5A5A)


def _matrix(x, address=None) -> Tensor:
    own, rows, cols, stride, dtype = x
    memory = at(address or own, ((rows - 1) * stride + cols,), _DTYPES[dtype])
    return memory.as_strided((rows, cols), (stride, 1))


def quantize_grouped(
    x, groups, fmt, rule, row, col, spread, col_sum, col_sum_ws, stream, device=-1
) -> int:
    values, name = _matrix(x), _NAMES[fmt]
    (rows, cols), count = values.shape, groups[2]
    row_made = _poisoned(row, layout.shapes_rows(rows, cols, count))
    col_made = _poisoned(col, layout.shapes_k(rows, cols, count))
    if col_sum:
        at(col_sum_ws, (layout.group_tiles(rows, count), cols), torch.float32).fill_(torch.nan)
        sums = at(col_sum, (count, cols), torch.float32).zero_()
    for i, (start, end) in enumerate(zip(*bounds_of(groups), strict=True)):
        if start == end:
            continue
        parts = reference.quantize(
            values[start:end], name, True, "transposed", _RULES[rule], bool(col_sum)
        )
        if row[0]:
            packed = sm90_layout.pack(parts.row_codes, parts.row_scales, name, spread)
            layout.put_rows(sm90_layout.PackedOperand(*row_made), packed, start, end, i)
        if col[0]:
            packed = sm90_layout.pack(parts.col_codes, parts.col_scales, name, spread)
            packed = packed._replace(codes=packed.codes[:, : end - start])
            layout.put_k(sm90_layout.PackedOperand(*col_made), packed, start, end, i)
        if col_sum:
            sums[i] = parts.col_sum
    return OK


def quantize_stacked(x, xs, fmt, rule, row, col, spread, stream, device=-1) -> int:
    _, rows, cols, _, _ = x
    name = _NAMES[fmt]
    if spread < 0:
        return _plain_stack(x, xs, name, rule, row, col)
    for i, address in enumerate(xs):
        parts = reference.quantize(
            _matrix(x, address), name, True, "transposed", _RULES[rule], False
        )
        for place, shape, codes, scales in (
            (row, (rows, cols), *parts[:2]),
            (col, (cols, rows), *parts[2:4]),
        ):
            if place[0]:
                codes_shape, words_shape = sm90_layout.packed_shapes(*shape)
                stack = _parts(place, ((len(xs), *codes_shape), (len(xs), *words_shape)))
                packed = sm90_layout.pack(codes, scales, name, spread)
                stack[0][i], stack[1][i] = packed.codes, packed.scales
    return OK


def _plain_stack(x, xs, name, rule, row, col) -> int:
    _, rows, cols, _, _ = x
    count = len(xs)
    for i, address in enumerate(xs):
        parts = reference.quantize(_matrix(x, address), name, True, "plain", _RULES[rule], False)
        scales = (count, rows, blocks(cols)), (count, blocks(rows), cols)
        for place, shape, codes, made in (
            (row, scales[0], *parts[:2]),
            (col, scales[1], *parts[2:4]),
        ):
            if place[0]:
                at(place[0], (count, rows, cols))[i] = codes
                at(place[1], shape)[i] = made
    return OK


def _plain_weights(weights, rows, k, count) -> list[Operand]:
    codes, scales, fmt, k_first = weights
    order = "k_first" if k_first else "k_last"
    shapes = ((k, rows), (blocks(k), rows)) if k_first else ((rows, k), (rows, blocks(k)))
    parts = at(codes, (count, *shapes[0])), at(scales, (count, *shapes[1]))
    return [Operand(*part, _NAMES[fmt], order) for part in zip(*parts, strict=True)]


def pack_stacked(weights, rows, k, groups, spread, out, stream, device=-1) -> int:
    count = groups[2]
    codes, words = sm90_layout.packed_shapes(rows, k)
    stack = _poisoned(out, ((count, *codes), (count, *words)))
    for i, (start, end) in enumerate(zip(*bounds_of(groups), strict=True)):
        if end > start:
            operand = _plain_weights(weights, rows, k, count)[i]
            plain = operand[:2] if operand.order == "k_last" else (t.t() for t in operand[:2])
            packed = sm90_layout.pack(*plain, operand.fmt, spread)
            stack[0][i], stack[1][i] = packed.codes, packed.scales
    return OK


def columns_of_stacked(weights, rows, k, count, rule, spread, out, stream, device=-1) -> int:
    codes, words = sm90_layout.packed_shapes(k, rows)
    stack = _poisoned(out, ((count, *codes), (count, *words)))
    for i, operand in enumerate(_plain_weights(weights, rows, k, count)):
        values = reference.dequantize(*operand[:4], torch.bfloat16)
        made = reference.quantize(values, operand.fmt, False, "transposed", _RULES[rule], False)
        packed = sm90_layout.pack(made.col_codes, made.col_scales, operand.fmt, spread)
        stack[0][i], stack[1][i] = packed.codes, packed.scales
    return OK


def _group_of_weights(place, fmt: int, count: int, i: int, rows: int, k: int) -> Operand:
    codes, words = sm90_layout.packed_shapes(rows, k)
    stack = _parts(place, ((count, *codes), (count, *words)))
    return Operand(stack[0][i][:, :k], stack[1][i], _NAMES[fmt], "sm90")


def gemm_rows(problem, epilogue, groups, config, stream, device=-1) -> int:
    lhs, lhs_fmt, rhs, rhs_fmt, m, n, k = problem
    out, out_dtype, ldo, accumulate, bias, bias_dtype = epilogue[:6]
    assert ldo == n and not accumulate and not any(epilogue[6:])
    _, _, count, rows, _ = groups
    assert rows == m
    result = at(out, (m, n), _DTYPES[out_dtype]).zero_()
    added = at(bias, (count, n), _DTYPES[bias_dtype]) if bias else None
    codes, words = _parts(lhs, layout.shapes_rows(m, k, count))
    tokens = Operand(codes[:, :k], words, _NAMES[lhs_fmt], "sm90_rows")
    for i, (start, end) in enumerate(zip(*bounds_of(groups), strict=True)):
        if end > start:
            reference.gemm(
                _group_of_weights(rhs, rhs_fmt, count, i, n, k),
                layout.rows_of(tokens, start, end, i),
                Epilogue(bias=None if added is None else added[i]),
                result[start:end],
                None,
            )
    return OK


def gemm_k(problem, epilogue, groups, config, stream, device=-1, first_rows=()) -> int:
    lhs, lhs_fmt, rhs, rhs_fmt, m, n, _ = problem
    out, out_dtype, ldo, accumulate = epilogue[:4]
    assert ldo == n and not any(epilogue[4:])
    _, _, count, rows, _ = groups
    assert len(first_rows) in (0, count)
    size = _DTYPES[out_dtype].itemsize
    firsts = first_rows or [i * m for i in range(count)]
    result = [at(out + first * n * size, (m, n), _DTYPES[out_dtype]) for first in firsts]
    sides = [
        Operand(*_parts(place, layout.shapes_k(rows, size, count)), _NAMES[fmt], "sm90_k")
        for place, fmt, size in ((rhs, rhs_fmt, n), (lhs, lhs_fmt, m))
    ]
    for i, (start, end) in enumerate(zip(*bounds_of(groups), strict=True)):
        if end == start:
            if not accumulate:
                result[i].zero_()
            continue
        a, b = (layout.k_of_packed(side, start, end, i) for side in sides)
        reference.gemm(a, b, Epilogue(accumulate=accumulate), result[i], None)
    return OK
