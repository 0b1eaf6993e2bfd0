"""The grouped calls of te_mx._sm90 in plain torch, on addresses of CPU memory: see fake_sm90.py.

What the real module leaves undefined is poisoned here.
"""

from __future__ import annotations

import fake_sm90_factors
import native_words as reference
import torch
from fake_sm90 import (  # noqa: F401
    _DTYPES,
    _NAMES,
    _ORDERS,
    _RULES,
    OK,
    DecodeArgs,
    Nvfp4Args,
    Nvfp4FinishArgs,
    Nvfp4MultiplyArgs,
    Nvfp4QuantizeArgs,
    __getattr__,
    _randomly,
    activate,
    activated,
    at,
    available,
    decode,
    decode_workspace,
    dequantize,
    gemm,
    linear_backward,
    linear_forward,
    linear_offsets,
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
    pack,
    pack_frozen,
    pack_tiles,
    packed_bytes,
    prepared,
    quantize,
    quantize_two,
    read_matrix,
    read_operand,
    row_sums,
    row_sums_workspace_bytes,
    rows_first,
    sequence,
    tiles,
    unpack_frozen,
    workspace_bytes,
)
from fake_sm90_codes import unpack, unpack_two  # noqa: F401
from native_words import blocks
from torch import Tensor

from te_mx.backends.sm90.layouts import groups as layout
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.dispatch.calls import Epilogue
from te_mx.dispatch.groups import Bounds, device_bounds


def upload_ends(ends, to, stream, device=-1) -> int:
    at(to, (len(ends),), torch.int32).copy_(torch.tensor(ends))
    return OK


def bounds_of(groups) -> Bounds:
    offs = at(groups.ends, (groups.count,), torch.int32 if groups.ends_int32 else torch.int64)
    starts, ends = device_bounds(offs, groups.capacity, groups.rows)
    return Bounds(starts.tolist(), ends.tolist())


def _parts(place, shapes) -> tuple[Tensor, Tensor]:
    return at(place.codes, shapes[0]), at(place.scales, shapes[1], torch.int32)


def _poisoned(place, shapes, order: str) -> tuple[Tensor, Tensor] | None:
    if not place.codes:
        return None
    assert _ORDERS[place.layout] == order
    codes, words = _parts(place, shapes)
    return codes.fill_(0xA5), words.fill_(0x5A5A5A5A)


def quantize_grouped(args) -> int:
    if args.gather:
        rows = at(args.gather, (args.groups.rows,), torch.int32)
        rows = rows[: max(bounds_of(args.groups).ends)].long()
        matrix = args.all.x.copy(rows=int(rows.max()) + 1 if len(rows) else 1)
        return _quantize_grouped(args.all.to, args.groups, read_matrix(matrix)[rows])
    return _quantize_grouped(args.all.to, args.groups, read_matrix(args.all.x))


def activate_grouped(args, groups) -> int:
    assert not args.out and (args.to.row.codes or args.to.col.codes)
    return _quantize_grouped(args.to, groups, activated(args))


def _quantize_grouped(to, groups, values: Tensor) -> int:
    if fake_sm90_factors.is_blockwise(to):
        return fake_sm90_factors.quantize_grouped(to, groups, values, bounds_of(groups), at)
    name = _NAMES[to.element]
    cols, rows, count = values.shape[1], groups.rows, groups.count
    row_made = _poisoned(to.row, layout.shapes_rows(rows, cols, count), "sm90_rows")
    col_made = _poisoned(to.col, layout.shapes_k(rows, cols, count), "sm90_k")
    if to.col_sum:
        at(to.col_sum_ws, (layout.group_tiles(rows, count), cols), torch.float32).fill_(torch.nan)
        assert _DTYPES[to.col_sum_dtype] == torch.float32
        sums = at(to.col_sum, (count, cols), torch.float32).zero_()
    for i, (start, end) in enumerate(zip(*bounds_of(groups), strict=True)):
        if start == end:
            continue
        parts = _randomly(to, values[start:end], name, to.first + start * cols)
        if row_made:
            packed = pack_tiles(parts.row_codes, parts.row_scales, name, cols, to.spread)
            layout.put_rows(sm90_tiles.PackedOperand(*row_made), packed, start, end, i)
        if col_made:
            spread = min(to.spread, 8)  # 9 is about rows
            packed = pack_tiles(parts.col_codes, parts.col_scales, name, end - start, spread)
            packed = packed._replace(codes=packed.codes[:, : end - start])
            layout.put_k(sm90_tiles.PackedOperand(*col_made), packed, start, end, i)
        if to.col_sum:
            sums[i] = parts.col_sum
    return OK


def quantize_stacked(args, xs) -> int:
    if fake_sm90_factors.is_blockwise(args.to):
        return fake_sm90_factors.quantize_stacked(args, xs, read_matrix, at)
    to, (rows, cols) = args.to, (args.x_rows, args.x_cols)
    name = _NAMES[to.element]
    if _ORDERS[(to.row if to.row.codes else to.col).layout] != "sm90":
        return _plain_stack(args, xs, name)
    for i, address in enumerate(xs):
        parts = reference.quantize(
            read_matrix(args.x, address), name, True, "transposed", _RULES[to.rule], False
        )
        for place, shape, codes, scales in (
            (to.row, (rows, cols), *parts[:2]),
            (to.col, (cols, rows), *parts[2:4]),
        ):
            if place.codes:
                assert _ORDERS[place.layout] == "sm90"
                codes_shape, words_shape = sm90_tiles.packed_shapes(*shape)
                stack = _parts(place, ((len(xs), *codes_shape), (len(xs), *words_shape)))
                packed = pack_tiles(codes, scales, name, shape[1], to.spread)
                stack[0][i], stack[1][i] = packed.codes, packed.scales
    return OK


def _plain_stack(args, xs, name) -> int:
    to, (rows, cols), count = args.to, (args.x_rows, args.x_cols), len(xs)
    widths = reference.code_bytes(name, cols), cols
    for i, address in enumerate(xs):
        values = read_matrix(args.x, address)
        parts = reference.quantize(values, name, True, "plain", _RULES[to.rule], False)
        scales = (count, rows, blocks(cols)), (count, blocks(rows), cols)
        for place, order, shape, width, codes, made in (
            (to.row, "k_last", scales[0], widths[0], *parts[:2]),
            (to.col, "k_first", scales[1], widths[1], *parts[2:4]),
        ):
            if place.codes:
                assert _ORDERS[place.layout] == order
                at(place.codes, (count, rows, width))[i] = codes
                at(place.scales, shape)[i] = made
    return OK


def _plain_weight(first, i: int) -> reference.Operand:
    """Operand i of several behind each other."""
    width = first.k
    if _ORDERS[first.layout] == "k_last":
        width = reference.code_bytes(_NAMES[first.element], first.k)
    nbytes = first.rows * width, first.rows * blocks(first.k)
    here = first.copy(codes=first.codes + i * nbytes[0], scales=first.scales + i * nbytes[1])
    return read_operand(here)


def pack_stacked(args) -> int:
    count = args.groups_count
    codes, words = sm90_tiles.packed_shapes(args.rows, args.k)
    stack = _poisoned(args.out, ((count, *codes), (count, *words)), "sm90")
    for i, (start, end) in enumerate(zip(*bounds_of(args.groups), strict=True)):
        if end > start:
            operand = _plain_weight(args.operand, i)
            packed = tiles(*rows_first(operand), operand.fmt, args.spread)
            stack[0][i], stack[1][i] = packed.codes, packed.scales
    return OK


def columns_of_stacked(args) -> int:
    count = args.groups_count
    codes, words = sm90_tiles.packed_shapes(args.k, args.rows)
    stack = _poisoned(args.out, ((count, *codes), (count, *words)), "sm90")
    for i in range(count):
        operand = _plain_weight(args.operand, i)
        assert operand.order == "k_last"
        values = reference.values(operand, torch.bfloat16)
        rule = _RULES[args.rule]
        made = reference.quantize(values, operand.fmt, False, "transposed", rule, False)
        packed = pack_tiles(made.col_codes, made.col_scales, operand.fmt, operand.rows, args.spread)
        stack[0][i], stack[1][i] = packed.codes, packed.scales
    return OK


def _group_of_weights(o, count: int, i: int) -> reference.Operand:
    codes, words = sm90_tiles.packed_shapes(o.rows, o.k)
    stack = _parts(o, ((count, *codes), (count, *words)))
    codes = stack[0][i][:, : o.k]
    return reference.Operand(codes, stack[1][i], _NAMES[o.element], _ORDERS[o.layout])


def _tiles(part: sm90_tiles.PackedOperand, element: int) -> reference.Operand:
    """A group's own operand."""
    return reference.Operand(*part, _NAMES[element], "sm90")


def gemm_grouped(args, first_rows=()) -> int:
    """One native call, of which the tests tell two kinds apart."""
    e = args.gemm.epilogue
    assert e.ldo == args.rhs_rows
    assert not (e.gelu or e.aux or e.gelu_in or e.bias_grad or e.bias_grad_kind)
    return gemm_k(args, first_rows) if args.along_k else gemm_rows(args)


def gemm_rows(args) -> int:
    if fake_sm90_factors.is_blockwise(args.gemm.lhs):
        return fake_sm90_factors.gemm_rows(args, bounds_of(args.groups), at)
    m, n, k, count = args.lhs_rows, args.rhs_rows, args.lhs_k, args.groups_count
    assert not args.accumulate and args.groups_rows == m and args.rhs_k == k
    assert _ORDERS[args.lhs_layout] == "sm90_rows" and _ORDERS[args.rhs_layout] == "sm90"
    result = at(args.out, (m, n), _DTYPES[args.out_dtype]).zero_()
    added = at(args.bias, (count, n), _DTYPES[args.bias_dtype]) if args.bias else None
    codes, words = _parts(args.gemm.lhs, layout.shapes_rows(m, k, count))
    tokens = sm90_tiles.PackedOperand(codes[:, :k], words)
    for i, (start, end) in enumerate(zip(*bounds_of(args.groups), strict=True)):
        if end > start:
            reference.gemm(
                _group_of_weights(args.gemm.rhs, count, i),
                _tiles(layout.rows_of(tokens, start, end, i), args.lhs_element),
                Epilogue(bias=None if added is None else added[i]),
                result[start:end],
                None,
            )
    return OK


def gemm_k(args, first_rows=()) -> int:
    m, n, count = args.lhs_rows, args.rhs_rows, args.groups_count
    assert not args.bias and len(first_rows) in (0, count)
    dtype, accumulate = _DTYPES[args.out_dtype], args.accumulate
    firsts = first_rows or [i * m for i in range(count)]
    if fake_sm90_factors.is_blockwise(args.gemm.lhs):
        return fake_sm90_factors.gemm_k(args, bounds_of(args.groups), firsts, at)
    result = [at(args.out + first * n * dtype.itemsize, (m, n), dtype) for first in firsts]
    sides = []
    for side in (args.gemm.rhs, args.gemm.lhs):
        assert _ORDERS[side.layout] == "sm90_k"
        parts = _parts(side, layout.shapes_k(args.groups_rows, side.rows, count))
        sides.append((sm90_tiles.PackedOperand(*parts), side.element))
    for i, (start, end) in enumerate(zip(*bounds_of(args.groups), strict=True)):
        if end == start:
            if not accumulate:
                result[i].zero_()
            continue
        a, b = (_tiles(layout.k_of(side, start, end, i), element) for side, element in sides)
        reference.gemm(a, b, Epilogue(accumulate=accumulate), result[i], None)
    return OK
