"""What native code knows of formats, layouts and rules, and what its records say of a spec."""

from functools import lru_cache
from typing import Any

import torch

from te_mx import formats as formats_of
from te_mx.backends.base import (
    ALIGNED,
    BLOCK_ROWS,
    FLOAT_DTYPES,
    LAYOUTS,
    PLAIN,
    SCALE_RULES,
    SMALL_ROWS,
    TENSOR_SCALES,
    UPRIGHT,
    format_fields,
    pointer,
    typed_address,
)
from te_mx.dispatch.fused import Target
from te_mx.dispatch.moe import RoutedGemm
from te_mx.dispatch.problem import Problem
from te_mx.formats.scaling import Scaling, is_stochastic, split_rule
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Stack

_ORDERS = {
    "rows": "k_last", "cols": "k_first", "grouped_cols": "k_first", "sm90_factors": "sm90",
    "sm90_factors_rows": "sm90_rows", "sm90_factors_k": "sm90_k", "sm90_frozen": "sm90",
}  # fmt: skip
_SHORT = {"mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2"}
FORMATS = tuple(_SHORT)  # that native code knows
WRITERS = formats_of.get("nvfp4").scaling.rules
RULES = ("rceil", "floor", "fp32", "pow2", "even", *WRITERS)  # likewise
BLOCKWISE = tuple(f"fp8_{word}" for word in BLOCK_ROWS)  # with fp32 scales, for kernels that say so
FP4 = ("mxfp4",)  # of 4 bits, likewise
MX = FORMATS + FP4
_SHORT |= dict(zip(BLOCKWISE, BLOCK_ROWS, strict=True)) | {"mxfp4": "e2m1"}
COLUMNWISE = tuple(f"fp8_{word}" for word in UPRIGHT)  # for kernels that multiply nothing
_SHORT |= dict(zip(COLUMNWISE, UPRIGHT, strict=True))
NVFP4 = tuple(SMALL_ROWS)  # with a tensor scale, likewise
_SHORT |= dict(zip(NVFP4, NVFP4, strict=True))
_known = {"": ("e4m3", "k_last")}
# Ops that read codes as they are, whatever was transformed before these were made.
_READERS = ("gemm", "gemm_rows", "gemm_k", "dequantize", "convert")
_ANY_RULE = "rceil"  # stands in problems that quantize nothing


def _scaling(name: str) -> Scaling:
    return formats_of.get(name).scaling


def unknown(
    problem: Problem, layouts: tuple[str, ...], formats: tuple[str, ...], random: bool = False
) -> str | None:
    """Why native code that knows these layouts (names up to a colon) and formats does not run a
    problem: the scale rule, a format or a layout; None when it knows them all. random: whether it
    rounds stochastically and transforms."""
    rules = tuple(one for one in RULES if any(_scaling(name).knows(one) for name in formats))
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
        short = _SHORT[fmt.untransformed.name]
        found = _known[spec] = short.partition("_")[0] if is_aligned(spec) else short, order
    return found


def is_aligned(spec: str) -> bool:
    """Whether blocks of 1 x 128 lie as aligned tiles, which are multiplied as those of MX."""
    fmt, layout = spec_of(spec)
    return fmt.scaling.scale == "fp32" and layout.scale_dtype is torch.int32


@lru_cache(maxsize=1024)
def fields_of(spec: str, side: str = "") -> dict[str, int]:
    """What a native record says of an operand of a spec that is read, beside sizes and addresses;
    the fields of a side of a product, with its name in front."""
    fmt, order = words_of(spec)
    fields = format_fields(fmt) | {"layout": LAYOUTS[order]}
    return {f"{side}_{name}": value for name, value in fields.items()} if side else fields


def record_of(native: Any, operand: Operand | Stack) -> Any:
    """The native record of an operand, or of the first of a stack."""
    made = native.Operand(
        codes=operand.codes.data_ptr(), scales=operand.scales.data_ptr(), rows=operand.rows,
        k=operand.k, **fields_of(operand.spec),
    )  # fmt: skip
    set_tensor_scale(made, "", operand)
    return made


def set_tensor_scale(record: Any, side: str, operand: Operand | Stack) -> None:
    """Write into a record, in fields behind a prefix, the tensor scales of an operand that has
    some, and for what each is."""
    whole = operand.tensor_scale
    if whole is None:
        return
    kind = (
        ("all", "groups", "rows")[whole.dim()]
        if isinstance(operand, Operand)
        else ("all" if whole.dim() == 1 else "rows")
    )
    setattr(record, f"{side}tensor_scale", whole.data_ptr())
    setattr(record, f"{side}tensor_scales", TENSOR_SCALES[kind])


def routed_record(native: Any, p: RoutedGemm, **more: int) -> tuple[Any, object]:
    """The record of a product of routed rows, and what must live until it is enqueued."""
    ids, experts, count, block_m, a_div, _ = p.routing
    bias = None if p.bias is None else p.bias.contiguous()
    weights = None if p.weights is None else p.weights.contiguous()
    args = native.MoeGemmArgs(
        lhs=record_of(native, p.lhs), rhs=record_of(native, p.rhs), experts=p.rhs.groups,
        sorted_token_ids=pointer(ids), expert_ids=experts.data_ptr(),
        num_tokens_post_padded=pointer(count), blocks=len(experts), routed=len(p.out),
        block_m=block_m, a_div=a_div, weights=pointer(weights), out=p.out.data_ptr(),
        out_dtype=FLOAT_DTYPES[p.out.dtype], **more,
    )  # fmt: skip
    args.bias, args.bias_dtype = typed_address(bias)
    return args, (bias, weights)


@lru_cache(maxsize=1024)
def fields_to(row: str, col: str, rule: str) -> dict[str, Any]:
    """What a native record says of what a matrix is quantized to, beside sizes and addresses: the
    format, how scales follow, layouts and transforms. Of sums alone: nothing."""
    if not (row or col):
        return {}
    name, epsilon = split_rule(rule)
    fields = {"rule": SCALE_RULES[name], "amax_epsilon": epsilon}
    fields |= format_fields(_SHORT[spec_of(col or row).format.untransformed.name])
    for side, spec in (("row", row), ("col", col)):
        if spec:
            order, layout = words_of(spec)[1], spec_of(spec).layout
            fields[f"{side}_layout"] = ALIGNED[order] if is_aligned(spec) else LAYOUTS[order]
            if (turn := spec_of(spec).format.transform) is not None:
                fields[f"{side}_hadamard"], fields[f"{side}_signs"] = turn.size, turn.signs
            if words_of(spec)[0] == "nvfp4_rows":
                fields[f"{side}_tensor_scales"] = TENSOR_SCALES["rows"]
            if hasattr(layout, "spread"):
                fields["spread"] = max(layout.spread, fields.get("spread", 0))
    return fields


def one_read(row: str, col: str) -> str | None:
    """Why one read of a matrix, or of tokens in groups, does not make both; None when it does."""
    if row and words_of(row)[1] == "k_first":
        return "makes rowwise copies that lie by rows"
    if not (row and col):
        return None
    (row_fmt, row_layout), (col_fmt, col_layout) = spec_of(row), spec_of(col)
    alike = getattr(row_layout, "beside", PLAIN) == getattr(col_layout, "spread", PLAIN)
    if row_fmt.untransformed != col_fmt.untransformed or not alike:
        return "makes both directions in one format, both packed alike or both plain"
    return None


def one_read_of_weights(row: str, col: str) -> str | None:
    """The same of the weights of groups."""
    reason = one_read(row, col)
    if reason is None and col and words_of(col)[1] == "k_last":
        reason = "makes plain columns that lie as the weights do"
    return reason


def is_native(target: Target, formats: tuple[str, ...]) -> bool:
    """Whether native code makes what a target asks for as it quantizes, if it asks for codes."""
    row, col, rule = target[:3]
    known = all(spec_of(spec).format.name in formats for spec in (row, col) if spec)
    known = known and not is_stochastic(rule)
    return not target.codes or (
        known and split_rule(rule)[0] in RULES and one_read(row, col) is None
    )
