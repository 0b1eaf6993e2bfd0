"""What te_mx._sm90 does with operands that have fp32 scales, in plain torch (fake_sm90.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import (
    ALIGNED,
    BLOCK_ROWS,
    FLOAT_DTYPES,
    FORMATS,
    GELUS,
    LAYOUTS,
    SCALE_RULES,
)
from te_mx.backends.sm90.layouts import groups as sm90_groups
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.backends.sm90.layouts.factors import SM90_FACTORS
from te_mx.dispatch import run
from te_mx.dispatch.calls import Epilogue, Mode, Product, Quantize
from te_mx.formats import get
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand

At = Callable[..., Tensor]  # fake_sm90.at
_LAYOUTS = {
    LAYOUTS["sm90"]: "sm90_factors",
    LAYOUTS["k_last"]: "rows",
    LAYOUTS["k_first"]: "cols",
}
_DTYPES = {number: dtype for dtype, number in FLOAT_DTYPES.items()}
_RULES = {number: name for name, number in SCALE_RULES.items()}
_FORMS = {number: name for name, number in GELUS.items()}


def is_blockwise(of: Any) -> bool:
    return of.scale_type == 1


def _format(of: Any) -> str:
    names = [
        word for word, rows in BLOCK_ROWS.items()
        if (FORMATS[word], rows) == (of.element, of.block_rows)
    ]  # fmt: skip
    assert of.block_k == 128 and len(names) == 1
    return f"fp8_{names[0]}"


def _operand(of: Any, at: At) -> Operand:
    """The operand that a record says the address of."""
    spec = f"{_format(of)}@{_LAYOUTS[of.layout]}"
    fmt, layout = spec_of(spec)
    (height, width), scales = layout.shapes(fmt, of.rows, of.k)
    ld = (width + 15) // 16 * 16 if layout.name == "sm90_factors" else width
    codes = at(of.codes, (height, ld))[:, :width]
    return Operand(codes, at(of.scales, scales, torch.float32), spec, of.rows, of.k)


def rule_of(to: Any) -> str:
    return f"{_RULES[to.rule]}:{to.amax_epsilon!r}"


def _specs(to: Any) -> list[str]:
    """What a call makes of one matrix."""
    known = _LAYOUTS | {ALIGNED["sm90"]: f"sm90:{to.spread}"}
    return [
        f"{_format(to)}@{known[side.layout]}" if side.codes else "" for side in (to.row, to.col)
    ]


def write_operand(side: Any, operand: Operand | None, at: At, i: int = 0) -> None:
    """To the place of operand i of several behind each other."""
    if operand is None:
        return
    height, width = operand.codes.shape
    packed = operand.layout.name not in ("rows", "cols")
    ld = (width + 15) // 16 * 16 if packed else width
    at(side.codes + i * height * ld, (height, ld))[:, :width] = operand.codes
    scales = operand.scales
    at(side.scales + 4 * i * scales.numel(), scales.shape, scales.dtype).copy_(scales)


def quantize(args: Any, x: Tensor, at: At) -> int:
    to, (rows, cols) = args.to, x.shape
    what = Quantize(x, *_specs(to), rule_of(to), bool(to.col_sum), _DTYPES[to.col_sum_dtype])
    made = run.reference("quantize").run(what)
    write_operand(to.row, made.row, at)
    write_operand(to.col, made.col, at)
    if to.col_sum:
        at(to.col_sum_ws, (-(-rows // 128), cols), torch.float32).fill_(torch.nan)
        at(to.col_sum, (cols,), made.col_sum.dtype).copy_(made.col_sum)
    return 0


# ------------------------------------------------------------------------------------ linear layer
def aligns(args: Any) -> bool:
    """Whether columns of x and of the gradient of a layer are aligned."""
    return bool(args.scale_type) and _RULES[args.rule] == "pow2"


def scaling(args: Any, w: str) -> dict[str, int]:
    """That of x and the gradient, or with w = "w_" that of the weight."""
    return {name: getattr(args, w + name) for name in ("scale_type", "block_rows", "block_k")}


def scale_room(args: Any, side: str, rows: int, k: int) -> int:
    """Bytes that the scales of an operand of a layer take: "row" or "col" of x and the gradient, or
    the weight, "w"."""
    block = args.w_block_rows if side == "w" else args.block_rows
    if not args.scale_type or (side == "col" and aligns(args)):
        words = sm90_tiles.packed_shapes(rows, k)[1]
    else:
        words = SM90_FACTORS.shapes(get(f"fp8_e4m3_{block}x128"), rows, k)[1]
    return -(-4 * math.prod(words) // 256) * 256


# -------------------------------------------------------------------------------------------- gemm
def gemm(args: Any, at: At) -> int:
    lhs, rhs, e = _operand(args.lhs, at), _operand(args.rhs, at), args.epilogue
    m, n = lhs.rows, rhs.rows
    assert e.ldo == n and lhs.k == rhs.k and lhs.format.scaling.block[0] == 1 and args.parts <= 1
    assert lhs.layout.name == rhs.layout.name == "sm90_factors"
    asked = Epilogue(
        at(e.bias, (n,), _DTYPES[e.bias_dtype]) if e.bias else None,
        _FORMS.get(e.gelu),
        at(e.gelu_in, (m, n), _DTYPES[e.gelu_in_dtype]) if e.gelu_in else None,
        "result" if e.bias_grad else None,
        e.accumulate,
    )
    out = at(e.out, (m, n), _DTYPES[e.out_dtype])
    aux = at(e.aux, (m, n), _DTYPES[e.aux_dtype]) if e.aux else None
    made = run.reference("gemm").run(Product(lhs, rhs, asked, out, aux, Mode()))
    if e.bias_grad:
        at(e.bias_grad, (n,), torch.float32).copy_(made.bias_grad)
    return 0


def dequantize(args: Any, at: At) -> int:
    operand = _operand(args.operand, at)
    values = operand.values(_DTYPES[args.out_dtype])
    values = values.t() if operand.layout.k_first else values
    at(args.out, values.shape, values.dtype).copy_(values)
    return 0


# ------------------------------------------------------------------------------------------ groups
def _tokens(side: Any, groups: Any, rows: int, k: int, name: str, fmt: str, at: At) -> Operand:
    """Tokens of groups at the address that a record says."""
    spec = f"{fmt}@{name}"
    one, layout = spec_of(spec)
    (height, width), scales = layout.grouped_shapes(one, rows, k, groups.count)
    ld = (width + 15) // 16 * 16
    codes = at(side.codes, (height, ld))[:, :width]
    return Operand(codes, at(side.scales, scales, layout.scale_dtype), spec, rows, k)


def quantize_grouped(to: Any, groups: Any, x: Tensor, bounds: Any, at: At) -> int:
    rows, cols = x.shape
    known = {LAYOUTS["sm90_k"]: "sm90_factors_k", ALIGNED["sm90_k"]: f"sm90_k:{to.spread}"}
    made: dict[str, Operand] = {}
    if to.row.codes:
        assert to.row.layout == LAYOUTS["sm90_rows"]
        row = _tokens(to.row, groups, rows, cols, "sm90_factors_rows", _format(to), at)
        made["row"] = row
    if to.col.codes:
        name = known[to.col.layout]
        made["col"] = _tokens(to.col, groups, cols, rows, name, _format(to), at)
    for operand in made.values():  # what nobody writes is poison
        operand.codes.fill_(0xA5), operand.scales.view(torch.int32).fill_(0x5A5A5A5A)
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        if start == end:
            continue
        specs = [
            f"{_format(to)}@{o.layout.alone}" if o else "" for o in map(made.get, ("row", "col"))
        ]
        one = run.reference("quantize").run(Quantize(x[start:end], *specs, rule_of(to)))
        if one.row is not None:
            sm90_groups.put_rows(made["row"], one.row, start, end, i)
        if one.col is not None:
            sm90_groups.put_k(made["col"], one.col, start, end, i)
    if to.col_sum:
        parts = (sm90_groups.group_tiles(rows, groups.count), cols)
        at(to.col_sum_ws, parts, torch.float32).fill_(torch.nan)
        sums = at(to.col_sum, (groups.count, cols), torch.float32)
        for i, (start, end) in enumerate(zip(*bounds, strict=True)):
            sums[i] = x[start:end].sum(0, dtype=torch.float32)
    return 0


def quantize_stacked(args: Any, xs: list[int], read: Callable[..., Tensor], at: At) -> int:
    to = args.to
    for i, address in enumerate(xs):
        what = Quantize(read(args.x, address), *_specs(to), rule_of(to))
        made = run.reference("quantize").run(what)
        write_operand(to.row, made.row, at, i)
        write_operand(to.col, made.col, at, i)
    return 0


def _weight(of: Any, i: int, at: At) -> Operand:
    """Weight i of several behind each other."""
    fmt, layout = spec_of(f"{_format(of)}@sm90_factors")
    count = 1
    for size in layout.shapes(fmt, of.rows, of.k)[1]:
        count *= size
    ld = (of.k + 15) // 16 * 16
    here = of.copy(codes=of.codes + i * of.rows * ld, scales=of.scales + 4 * i * count)
    return _operand(here, at)


def gemm_rows(args: Any, bounds: Any, at: At) -> int:
    m, n, k, groups = args.lhs_rows, args.rhs_rows, args.lhs_k, args.groups
    assert not args.accumulate and groups.rows == m and args.rhs_k == k
    lhs, rhs, e = args.gemm.lhs, args.gemm.rhs, args.gemm.epilogue
    assert lhs.layout == LAYOUTS["sm90_rows"] and rhs.layout == LAYOUTS["sm90"]
    out = at(e.out, (m, n), _DTYPES[e.out_dtype]).zero_()
    bias = at(e.bias, (groups.count, n), _DTYPES[e.bias_dtype]) if e.bias else None
    tokens = _tokens(lhs, groups, m, k, "sm90_factors_rows", _format(lhs), at)
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        if start == end:
            continue
        part = sm90_groups.rows_of(tokens, start, end, i)
        own = Operand(*part, f"{_format(lhs)}@sm90_factors", end - start, k)
        epilogue = Epilogue(bias=None if bias is None else bias[i])
        product = Product(own, _weight(rhs, i, at), epilogue, out[start:end], None, Mode())
        run.reference("gemm").run(product)
    return 0


def gemm_k(args: Any, bounds: Any, firsts: list[int], at: At) -> int:
    m, n, groups = args.lhs_rows, args.rhs_rows, args.groups
    e, sides = args.gemm.epilogue, (args.gemm.lhs, args.gemm.rhs)
    assert all(side.layout == LAYOUTS["sm90_k"] and side.block_rows == 1 for side in sides)
    dtype = _DTYPES[e.out_dtype]
    tokens = [
        _tokens(side, groups, rows, groups.rows, "sm90_factors_k", _format(side), at)
        for side, rows in zip(sides, (m, n), strict=True)
    ]
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        out = at(e.out + firsts[i] * n * dtype.itemsize, (m, n), dtype)
        if start == end:
            if not e.accumulate:
                out.zero_()
            continue
        lhs, rhs = (
            Operand(
                *sm90_groups.k_of(one, start, end, i), f"{one.format.name}@sm90_factors", one.rows,
                end - start,
            )
            for one in tokens
        )  # fmt: skip
        run.reference("gemm").run(
            Product(lhs, rhs, Epilogue(accumulate=e.accumulate), out, None, Mode())
        )
    return 0
