"""Routed rows on the native Hopper backend; None for what the native code does not take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, format_fields, pointer, typed_address
from te_mx.backends.native import words_of
from te_mx.backends.sm90 import binding
from te_mx.dispatch.moe import Align, RoutedGemm, capacity
from te_mx.layouts.operand import Operand, Stack


def _operand(native: Any, one: Operand | Stack) -> Any:
    """The record of an operand in plain rows, or of the first of a stack."""
    return native.Operand(
        codes=one.codes.data_ptr(), scales=one.scales.data_ptr(), rows=one.rows, k=one.k,
        **format_fields(words_of(one.spec)[0]),
    )  # fmt: skip


def gemm(p: RoutedGemm) -> bool:
    """Write the routed rows of p.out; False where nothing was launched."""
    native = binding.native()
    assert native is not None
    ids, experts, count, block_m, a_div, _ = p.routing
    bias = None if p.bias is None else p.bias.contiguous()
    weights = None if p.weights is None else p.weights.contiguous()
    args = native.MoeGemmArgs(
        lhs=_operand(native, p.lhs), rhs=_operand(native, p.rhs), experts=p.rhs.groups,
        sorted_token_ids=pointer(ids), expert_ids=experts.data_ptr(),
        num_tokens_post_padded=count.data_ptr(),
        positions=len(p.out) if ids is None else len(ids), blocks=len(experts), routed=len(p.out),
        block_m=block_m, a_div=a_div, weights=pointer(weights), out=p.out.data_ptr(),
        out_dtype=FLOAT_DTYPES[p.out.dtype],
    )  # fmt: skip
    args.bias, args.bias_dtype = typed_address(bias)
    binding.set_execution(args, p.out.device.index)
    return binding.supported(native.moe_gemm(args))


def align(p: Align) -> tuple[Tensor, Tensor, Tensor] | None:
    """The lists of slots."""
    native = binding.native()
    assert native is not None
    ids, block_m, experts, local = p
    positions = capacity(len(ids), block_m, experts)
    blocks = -(-positions // block_m)
    made = [torch.empty(n, dtype=torch.int32, device=ids.device) for n in (positions, blocks, 1)]
    args = native.MoeAlignArgs(
        topk_ids=ids.data_ptr(), routed=len(ids), experts=experts, positions=positions,
        blocks=blocks, block_m=block_m, expert_map=pointer(local),
        sorted_token_ids=made[0].data_ptr(), expert_ids=made[1].data_ptr(),
        num_tokens_post_padded=made[2].data_ptr(),
    )  # fmt: skip
    binding.set_execution(args, ids.device.index)
    return (made[0], made[1], made[2]) if binding.supported(native.moe_align(args)) else None
