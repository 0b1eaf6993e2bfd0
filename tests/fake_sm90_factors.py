"""What te_mx._sm90 does with operands that have fp32 scales, in plain torch (fake_sm90.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import BLOCK_ROWS, FLOAT_DTYPES, FORMATS, GELUS, LAYOUTS, SCALE_RULES
from te_mx.dispatch import run
from te_mx.dispatch.calls import Epilogue, Mode, Product, Quantize
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


def quantize(args: Any, x: Tensor, at: At) -> int:
    to, (rows, cols) = args.to, x.shape
    fmt, rule = _format(to), f"{_RULES[to.rule]}:{to.amax_epsilon!r}"
    specs = [f"{fmt}@{_LAYOUTS[side.layout]}" if side.codes else "" for side in (to.row, to.col)]
    what = Quantize(x, *specs, rule, bool(to.col_sum), _DTYPES[to.col_sum_dtype])
    made = run.reference("quantize").run(what)
    for side, operand in ((to.row, made.row), (to.col, made.col)):
        if operand is None:
            continue
        width = operand.codes.shape[1]
        ld = (width + 15) // 16 * 16 if side.layout == LAYOUTS["sm90"] else width
        at(side.codes, (len(operand.codes), ld))[:, :width] = operand.codes
        at(side.scales, operand.scales.shape, torch.float32).copy_(operand.scales)
    if to.col_sum:
        at(to.col_sum_ws, (-(-rows // 128), cols), torch.float32).fill_(torch.nan)
        at(to.col_sum, (cols,), made.col_sum.dtype).copy_(made.col_sum)
    return 0


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
