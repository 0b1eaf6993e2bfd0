"""te_mx::quantize_weights, te_mx::columns_of_weights: the weights of all groups in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_mx.backends import cpu, cpu_grouped, sm90, sm90_grouped, sm90_grouped_weights
from te_mx.backends.base import PLAIN, blocks
from te_mx.backends.grouped import StackedOperand
from te_mx.ops import checks
from te_mx.ops.dequantize import dequantize_2d
from te_mx.ops.library import define, is_direct
from te_mx.ops.quantize import quantize_2d


def quantize_weights(
    weights: Sequence[Tensor] | Tensor,
    fmt: str,
    *,
    columnwise: bool,
    scale_rule: str,
    spread: int = PLAIN,
) -> tuple[StackedOperand, StackedOperand | None]:
    """Quantize the weights of all groups, each [rows, cols] or all in one tensor [G, rows, cols]:
    the operand for fprop, and the one for dgrad if `columnwise`.

    Every weight gives the bytes of quantize_2d. A spread of 0 to 8 packs for Hopper, as operands of
    order "sm90"; weights are then not empty.
    """
    if not (is_direct(weights) if isinstance(weights, Tensor) else is_direct(*weights)):
        parts = _OP_WEIGHTS(list(weights), fmt, columnwise, scale_rule, spread)
    elif weights[0].is_cpu:
        parts = _weights_on_cpu(list(weights), fmt, columnwise, scale_rule, spread)
    else:
        parts = _weights_on_cuda(weights, fmt, columnwise, scale_rule, spread)
    orders = ("sm90", "sm90") if spread >= 0 else ("k_last", "k_first")
    col = StackedOperand(parts[2], parts[3], fmt, orders[1]) if columnwise else None
    return StackedOperand(parts[0], parts[1], fmt, orders[0]), col


def _weights_on_cpu(
    weights: list[Tensor], fmt: str, columnwise: bool, rule: str, spread: int
) -> list[Tensor]:
    checks.alike(weights)
    checks.quantizable(weights[0], fmt, rule, spread=spread)
    if cpu.native() is not None and weights[0].numel() and spread < 0:
        parts = cpu_grouped.quantize_weights(weights, fmt, columnwise, rule)
        if parts is not None:
            return parts
    return _weights_loop(weights, fmt, columnwise, rule, spread)


def _weights_on_cuda(
    weights: Sequence[Tensor] | Tensor, fmt: str, columnwise: bool, rule: str, spread: int
) -> list[Tensor]:
    first = weights[0]
    if not isinstance(weights, Tensor):
        checks.alike(weights)
    checks.quantizable(first, fmt, rule, spread=spread)
    if first.numel() == 0 or sm90.problem(first.device.index) is not None:
        return _weights_loop(list(weights), fmt, columnwise, rule, spread)
    return sm90_grouped.quantize_weights(weights, fmt, columnwise, rule, spread)


def _weights_loop(
    weights: list[Tensor], fmt: str, columnwise: bool, rule: str, spread: int
) -> list[Tensor]:
    checks.alike(weights)
    form = ("plain" if spread < 0 else "transposed") if columnwise else None
    made = [
        quantize_2d(weight, fmt, rowwise=True, columnwise=form, scale_rule=rule, spread=spread)
        for weight in weights
    ]
    wanted = 4 if columnwise else 2
    stacks = [torch.stack([parts[i] for parts in made]) for i in range(wanted)]  # type: ignore[misc]
    return stacks if spread < 0 else [_padded(stack) for stack in stacks]


def _padded(stack: Tensor) -> Tensor:
    """The same with rows of codes as far apart as packed ones are."""
    if stack.dtype != torch.uint8 or stack.shape[-1] % 16 == 0:
        return stack
    return torch.nn.functional.pad(stack, (0, -stack.shape[-1] % 16))[..., : stack.shape[-1]]


def _weights_fake(
    weights: list[Tensor], fmt: str, columnwise: bool, rule: str, spread: int
) -> list[Tensor]:
    checks.alike(weights)
    first, groups, (rows, cols) = weights[0], len(weights), weights[0].shape
    if spread >= 0:
        parts: list[Tensor] = []
        for shape in ((rows, cols), (cols, rows))[: 1 + columnwise]:
            codes, words = sm90_grouped.weights_shapes(groups, *shape)
            parts += [
                first.new_empty(codes, dtype=torch.uint8)[..., : shape[1]],
                first.new_empty(words, dtype=torch.int32),
            ]
        return parts
    shapes = [(groups, rows, cols), (groups, rows, blocks(cols))]
    if columnwise:
        shapes += [(groups, rows, cols), (groups, blocks(rows), cols)]
    return [first.new_empty(shape, dtype=torch.uint8) for shape in shapes]


_OP_WEIGHTS = define(
    "quantize_weights(Tensor[] weights, str fmt, bool columnwise, str scale_rule, int spread)"
    " -> Tensor[]",
    cpu=_weights_on_cpu,
    cuda=_weights_on_cuda,
    other=_weights_loop,
    fake=_weights_fake,
)


# ----------------------------------------------------------------------------------------- one copy
def columns_of_weights(row: StackedOperand, scale_rule: str, spread: int = PLAIN) -> StackedOperand:
    """The operand for dgrad of weights of which only plain rowwise codes are left: what they decode
    to (in bf16, exact above 2^-133), quantized along the columns.

    Args:
        row: order "k_last", logical [G, rows, cols]; the result is logical [G, cols, rows].
        scale_rule, spread: as for quantize_weights.
    """
    run = _OP_COLUMNS
    if row.order != "k_last":
        raise ValueError(f"row must have order k_last, got {row.order!r}")
    row = checks.checked_stack(row, "row")
    if is_direct(row.codes, row.scales):
        run = _columns_on_cpu if row.codes.is_cpu else _columns_on_cuda
    codes, scales = run(row.codes, row.scales, row.fmt, scale_rule, spread)
    return StackedOperand(codes, scales, row.fmt, "k_first" if spread < 0 else "sm90")


def _columns_on_cuda(
    codes: Tensor, scales: Tensor, fmt: str, rule: str, spread: int
) -> tuple[Tensor, Tensor]:
    if spread < 0 or codes.numel() == 0 or sm90.problem(codes.device.index) is not None:
        return _columns_loop(codes, scales, fmt, rule, spread)
    plain = codes.contiguous(), scales.contiguous()
    return sm90_grouped_weights.columns_of_weights(*plain, fmt, rule, spread)


def _columns_loop(
    codes: Tensor, scales: Tensor, fmt: str, rule: str, spread: int
) -> tuple[Tensor, Tensor]:
    form = "plain" if spread < 0 else "transposed"
    made = []
    for code, scale in zip(codes, scales, strict=True):
        values = dequantize_2d(code, scale, fmt, "k_last", torch.bfloat16)
        q = quantize_2d(values, fmt, rowwise=False, columnwise=form, scale_rule=rule, spread=spread)
        made.append((q.col_codes, q.col_scales))
    stacks = [torch.stack(parts) for parts in zip(*made, strict=True)]
    return (stacks[0] if spread < 0 else _padded(stacks[0])), stacks[1]


_columns_on_cpu = _columns_loop


def _columns_fake(
    codes: Tensor, scales: Tensor, fmt: str, rule: str, spread: int
) -> tuple[Tensor, Tensor]:
    groups, rows, cols = codes.shape
    if spread < 0:
        return codes.new_empty(codes.shape), scales.new_empty((groups, blocks(rows), cols))
    shape, words = sm90_grouped.weights_shapes(groups, cols, rows)
    return codes.new_empty(shape)[..., :rows], codes.new_empty(words, dtype=torch.int32)


_OP_COLUMNS = define(
    "columns_of_weights(Tensor codes, Tensor scales, str fmt, str scale_rule, int spread)"
    " -> (Tensor, Tensor)",
    cpu=_columns_on_cpu,
    cuda=_columns_on_cuda,
    other=_columns_loop,
    fake=_columns_fake,
)
