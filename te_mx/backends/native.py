"""How the native modules are told of an operand: a short format name and an order of codes."""

from __future__ import annotations

from typing import NamedTuple

from te_mx import formats as formats_of
from te_mx.backends.base import BLOCK_ROWS, PLAIN, QuantizedParts
from te_mx.backends.base import Operand as NativeOperand
from te_mx.backends.base import StackedOperand as NativeStack
from te_mx.dispatch.fused import Target
from te_mx.dispatch.problem import Problem
from te_mx.formats.scaling import Scaling, is_stochastic, split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack

_ORDERS = {
    "rows": "k_last",
    "cols": "k_first",
    "grouped_cols": "k_first",
    "sm90_factors": "sm90",
}
_SHORT = {"mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2"}
FORMATS = tuple(_SHORT)  # that native code knows
RULES = ("rceil", "floor", "fp32", "pow2")  # likewise
BLOCKWISE = tuple(f"fp8_{word}" for word in BLOCK_ROWS)  # with fp32 scales, for kernels that say so
FP4 = ("mxfp4",)  # of 4 bits, likewise
_SHORT |= dict(zip(BLOCKWISE, BLOCK_ROWS, strict=True)) | {"mxfp4": "e2m1"}
_known = {"": ("e4m3", "k_last")}
# Ops that read codes as they are, whatever was transformed before these were made.
_READERS = ("gemm", "gemm_rows", "gemm_k", "dequantize", "convert")
_ANY_RULE = "rceil"  # stands in problems that quantize nothing


def _scaling(name: str) -> Scaling:
    return formats_of.get(name).scaling


def unknown(
    problem: Problem, layouts: tuple[str, ...], formats: tuple[str, ...] = FORMATS,
    rules: tuple[str, ...] = RULES, random: bool = False,
) -> str | None:  # fmt: skip
    """Why native code that knows these layouts (names up to a colon), formats and rules does not
    run a problem: the scale rule, a format or a layout; None when it knows them all. random:
    whether it rounds stochastically and transforms."""
    rules = tuple(one for one in rules if any(_scaling(name).knows(one) for name in formats))
    rule = split_rule(problem.rule)[0]
    if rule != _ANY_RULE and rule not in rules:
        return f"knows the scale rules {', '.join(rules)}, not {problem.rule}"
    if is_stochastic(problem.rule) and not random:
        return f"rounds to nearest even, not stochastically ({problem.rule})"
    for spec in (problem.lhs, problem.rhs):
        if spec:
            fmt, layout = spec_of(spec)
            if random or problem.op in _READERS:
                fmt = fmt.untransformed
            if fmt.name not in formats:
                return f"takes {', '.join(formats)}, not {fmt.name}"
            if layout.name.partition(":")[0] not in (*layouts, "any"):
                return f"takes the layouts {', '.join(layouts)}, not {layout.name}"
    return None


def words_of(spec: str) -> tuple[str, str]:
    """(format, order) of a spec that native code takes; some of "", where sums alone are made."""
    found = _known.get(spec)
    if found is None:
        fmt, layout = spec_of(spec)
        order = _ORDERS.get(layout.name) or layout.name.partition(":")[0]
        found = _known[spec] = _SHORT[fmt.untransformed.name], order
    return found


def transform_of(spec: str) -> tuple[int, int]:
    """Size and signs of the Hadamard transform of a spec's format; zeros without one."""
    transform = spec_of(spec).format.transform
    return (0, 0) if transform is None else (transform.size, transform.signs)


def native_operand(operand: Operand) -> NativeOperand:
    fmt, order = words_of(operand.spec)
    return NativeOperand(operand.codes, operand.scales, fmt, order, operand.packed, operand.k)


def native_stack(stack: Stack) -> NativeStack:
    fmt, order = words_of(stack.spec)
    return NativeStack(stack.codes, stack.scales, fmt, order, stack.packed, stack.k)


class NativeTarget(NamedTuple):
    """A target in the words of native code."""

    fmt: str
    rowwise: bool
    columnwise: str | None
    scale_rule: str
    spread: int = PLAIN
    col_sum: bool = False


def one_read(row: str, col: str) -> str | None:
    """Why one read of a matrix, or of tokens in groups, does not make both; None when it does."""
    if row and words_of(row)[1] == "k_first":
        return "makes rowwise copies that lie by rows"
    if not (row and col):
        return None
    (row_fmt, row_layout), (col_fmt, col_layout) = spec_of(row), spec_of(col)
    spreads = [getattr(layout, "spread", PLAIN) for layout in (row_layout, col_layout)]
    if row_fmt.untransformed != col_fmt.untransformed or spreads[0] != spreads[1]:
        return "makes both directions in one format, both packed alike or both plain"
    return None


def one_read_of_weights(row: str, col: str) -> str | None:
    """The same of the weights of groups."""
    reason = one_read(row, col)
    if reason is None and col and words_of(col)[1] == "k_last":
        reason = "makes plain columns that lie as the weights do"
    return reason


def is_native(
    target: Target, formats: tuple[str, ...] = FORMATS, rules: tuple[str, ...] = RULES
) -> bool:
    """Whether native code of these formats and rules makes what a target asks for as it quantizes,
    if it asks for codes."""
    row, col, rule = target[:3]
    known = all(spec_of(spec).format.name in formats for spec in (row, col) if spec)
    return not target.codes or (known and rule in rules and one_read(row, col) is None)


def native_target(target: Target) -> NativeTarget:
    """What native code is told of a target that it knows."""
    row, col, rule, col_sum, _ = target
    if not (row or col):
        return NativeTarget("e4m3", False, None, "rceil", PLAIN, col_sum)
    fmt, order = words_of(col or row)
    spread = getattr(spec_of(col or row).layout, "spread", PLAIN)
    form = None if not col else "plain" if order == "k_first" else "transposed"
    return NativeTarget(fmt, bool(row), form, rule, spread, col_sum)


def with_operands(parts: QuantizedParts, target: Target, rows: int, cols: int) -> Quantized:
    """Tensors that native code made, as operands."""
    row, col = target.row, target.col
    return Quantized(
        Operand(parts.row_codes, parts.row_scales, row, rows, cols) if row else None,  # type: ignore[arg-type]
        Operand(parts.col_codes, parts.col_scales, col, cols, rows) if col else None,  # type: ignore[arg-type]
        parts.col_sum,
    )
