"""Every public callable of te_mx.pytorch, as `Call`s: a table beside public_calls.py."""

from __future__ import annotations

from judge import Call
from te_function_calls import LOSSES, norm, padding, permutations, questions, rotary
from te_module_calls import CONSTRUCTED, SIZES, attention, block, core_attention, grouping, linear

CALLS: tuple[Call, ...] = (
    *(linear(family) for family in SIZES), *(attention(family) for family in CONSTRUCTED),
    *(grouping(family) for family in CONSTRUCTED),
    *core_attention(), block("MultiheadAttention"), block("TransformerLayer"), *rotary(),
    *norm("LayerNorm"), *norm("RMSNorm"), *padding("Fp8Padding"), *padding("Fp8Unpadding"),
    *permutations(), LOSSES, *questions(),
)  # fmt: skip
