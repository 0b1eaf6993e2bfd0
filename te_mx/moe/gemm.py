"""te_mx.moe.grouped_gemm: routed rows times the weights of their experts."""

from typing import Any

import torch
from torch import Tensor

from te_mx._ops import Operand, quantize_2d
from te_mx._ops.moe import check_routed, moe_gemm
from te_mx.api.blas import check_dtype
from te_mx.api.grouped import tokens_of
from te_mx.api.groups import bias_of, check_floats, check_out, settings_of
from te_mx.api.tensor import MXTensor
from te_mx.autograd import node
from te_mx.autograd.linear_recipe import mode_of
from te_mx.dispatch.groups import INDEX_DTYPES, readable
from te_mx.dispatch.moe import RoutedGemm, Routing
from te_mx.moe.packed import PackedExperts, experts_of
from te_mx.recipes.settings import Settings
from te_mx.runtime.arguments import (
    check_flag,
    check_memory,
    check_place,
    check_size,
    check_written,
    parts_of,
    shown,
)

# --------------------------------------------------------------------------------------- arguments
# Checks of what the functions of te_mx.moe are given, before anything runs.
_FEW = 1024


def check_ids(name: str, value: Any, device: torch.device, shape: str = "a vector") -> Tensor:
    """Ids as int32. Raises unless they are int32 or int64 on a device, in one dimension, or in two
    where the shape is said to be [M, top_k]."""
    if not isinstance(value, Tensor) or value.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {shown(value)}")
    check_memory(name, value)
    dims = 1 if shape == "a vector" else 2
    if value.dim() != dims:
        raise ValueError(f"{name} must be {shape}, got {tuple(value.shape)}")
    check_place(name, value, device, "the weights")
    value = value.resolve_neg()
    if value.dtype is torch.int64:  # what int32 does not hold stays out of every range
        value = value.clamp(-(1 << 31), (1 << 31) - 1)
    return value.to(torch.int32)


def check_range(name: str, ids: Tensor, least: int, end: int, remedy: str) -> None:
    """Raise ValueError for ids out of [least, end), where the host may look at them."""
    if not readable(ids) or ids.numel() == 0:
        return
    if ids.numel() <= _FEW:  # as a list, which costs less than operators of torch
        held = ids.flatten().tolist()
        low, high = min(held), max(held)
    else:
        low, high = (int(one) for one in ids.aminmax())
    if low < least or high >= end:
        got = low if low < least else high
        raise ValueError(f"{name} must be {least} to {end - 1}, got {got}; {remedy}")


def refuse_transforms(owner: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError where forward-mode AD or a transform of torch.func follows one."""
    if node.active():
        node.refuse(f"te_mx.moe.{owner}", tensors, node.FUNCTION, grad=True)


def quantized_rows(x: Tensor, settings: Settings) -> Operand:
    """A matrix of tokens in the recipe's format of inputs."""
    made = quantize_2d(x.detach(), f"{settings.x}@rows", rule=settings.scale_rule).row
    assert made is not None
    return made


def rows_of(name: str, a: Any, k: int, device: torch.device, settings: Settings) -> Operand:
    """Tokens [M, K] as ops take them: an MXTensor as it is, a tensor quantized here."""
    if not isinstance(a, MXTensor):
        check_floats(name, a)
    if len(a.shape) != 2 or a.shape[1] != k:
        raise ValueError(f"{name} must be [M, {k}] for these weights, got {tuple(a.shape)}")
    check_place(name, a, device, "the weights")
    return tokens_of(a, name) if isinstance(a, MXTensor) else quantized_rows(a, settings)


def routing_weights(name: str, value: Any, routed: int, device: torch.device) -> Tensor:
    """Routing weights as fp32 [routed]."""
    check_floats(name, value)
    check_place(name, value, device, "the weights")
    if value.numel() != routed:
        raise ValueError(
            f"{name} must hold a number for each of {routed} routed rows, got {tuple(value.shape)}"
        )
    return value.detach().reshape(-1).to(torch.float32)


OWNER = "moe.grouped_gemm"


def grouped_gemm(
    a: Tensor | MXTensor,
    w: MXTensor | PackedExperts,
    sorted_token_ids: Tensor | None,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    *,
    top_k: int,
    block_m: int,
    out_dtype: torch.dtype | None = None,
    mul_weight_by: Tensor | None = None,
    a_div: int | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    zero_unrouted: bool = False,
    recipe: Any = None,
) -> Tensor:
    """``out[r] = (a[r // a_div] @ w[e].T + bias[e]) * mul_weight_by[r]`` for every routed row r of
    an expert e; sums and factors in fp32, rounded once.

    The first three tensors are those of `align_block_size`, or of vLLM's. A position p below
    num_tokens_post_padded holds a routed row ``sorted_token_ids[p]`` of expert
    ``expert_ids[p // block_m]``; ids of ``M * a_div`` and above are padding, blocks of expert -1
    are skipped. What lies behind num_tokens_post_padded is never used, and lengths need not be
    multiples of block_m. A routed row stands at one position at most.

    Args:
        a: [M, K], fp32, bf16 or fp16 and then quantized here, or an MXTensor.
        w: MXTensor [E, N, K], what `pack_experts` made of it, or a sequence of [N, K], which is
            stacked in every call.
        sorted_token_ids: int32 or int64; None: routed row r is a block of its own, of expert
            ``expert_ids[r]`` (for the smallest batches: expert_ids is then topk_ids, flattened).
        expert_ids: int32 or int64.
        num_tokens_post_padded: int32 or int64 [1].
        top_k: experts of a token.
        block_m: positions of a block.
        out_dtype: float32, bfloat16 (default) or float16; that of `out` where it is given.
        mul_weight_by: routing weights of all routed rows, in any shape.
        a_div: routed rows that share a row of a: top_k by default, 1 where a has a row for each.
        bias: [E, N].
        out: contiguous [M * a_div, N], written in place. It shares no memory with what is read.
        zero_unrouted: also write zeros to rows of `out` that are not routed, which otherwise stay;
            in a result made here they are zeros always.
        recipe: its input format, scale rule, precision and alignment spread count; None means the
            active recipe, or the default one outside of te_mx.autocast.

    Returns:
        [M * a_div, N]. Gradients do not flow through this function.

    Raises:
        TypeError, ValueError: what does not fit, with what was expected, before anything runs; ids
            that are out of range on the CPU. On a device these belong to nobody.
        RuntimeError: out requires grad while autograd records.
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.
    """
    settings = settings_of(recipe, forward=False)
    check_flag(f"{OWNER}: zero_unrouted", zero_unrouted)
    top_k = check_size(f"{OWNER}: top_k", top_k, 1)
    a_div = top_k if a_div is None else check_size(f"{OWNER}: a_div", a_div, 1)
    block_m = check_size(f"{OWNER}: block_m", block_m, 1)
    rhs = experts_of(w, OWNER, "w")
    device = rhs.codes.device
    if isinstance(a, Tensor):
        refuse_transforms("grouped_gemm", a, mul_weight_by, bias, out)
    lhs = rows_of(f"{OWNER}: a", a, rhs.k, device, settings)
    routed = lhs.rows * a_div
    if routed % top_k:
        raise ValueError(
            f"{OWNER}: {lhs.rows} rows of a with a_div={a_div} make {routed} routed rows, which "
            f"top_k={top_k} does not divide; a_div is top_k for one row a token, 1 for a row a slot"
        )
    ids = sorted_token_ids, expert_ids, num_tokens_post_padded
    routing = _routing(*ids, (block_m, a_div, routed, rhs.groups), device)._replace(top_k=top_k)
    weights = None
    if mul_weight_by is not None:
        weights = routing_weights(f"{OWNER}: mul_weight_by", mul_weight_by, routed, device)
    biases = bias_of(f"{OWNER}: bias", bias, rhs, "the weights")
    if out_dtype is not None:
        check_dtype(out_dtype, f"{OWNER}: out_dtype")
    check_out(OWNER, out, out_dtype, (routed, rhs.rows), rhs.codes, False, "the weights")
    if out is None:
        made = torch.zeros((routed, rhs.rows), dtype=out_dtype or torch.bfloat16, device=device)
    else:
        made = out
        read = (
            *parts_of("a", a if isinstance(a, Tensor) else lhs), *parts_of("w", rhs),
            ("sorted_token_ids", sorted_token_ids), ("expert_ids", expert_ids),
            ("num_tokens_post_padded", num_tokens_post_padded),
            ("mul_weight_by", mul_weight_by), ("bias", bias),
        )  # fmt: skip
        check_written(made, "out", read)
    with torch.no_grad():
        call = RoutedGemm(lhs, rhs, routing, biases, weights, made, mode_of(settings))
        if zero_unrouted:
            check_routed(call)  # nothing is written before an error
            made.zero_()
        moe_gemm(call)
    return made


def _routing(
    sorted_ids: Any, expert_ids: Any, count: Any, sizes: tuple[int, int, int, int],
    device: torch.device,
) -> Routing:  # fmt: skip
    """The routing of a call, checked as far as the host can see it."""
    block_m, a_div, routed, experts = sizes
    if max(block_m, routed) >= 1 << 31:
        raise ValueError(
            f"{OWNER}: block_m and the routed rows, M * a_div, are numbers of int32, got {block_m} "
            f"and {routed}"
        )
    if sorted_ids is not None:
        sorted_ids = check_ids(f"{OWNER}: sorted_token_ids", sorted_ids, device)
    expert_ids = check_ids(f"{OWNER}: expert_ids", expert_ids, device)
    count = check_ids(f"{OWNER}: num_tokens_post_padded", count, device)
    if count.shape != (1,):
        raise ValueError(
            f"{OWNER}: num_tokens_post_padded must be one number [1], got {tuple(count.shape)}"
        )
    if sorted_ids is None and expert_ids.shape[0] < routed:
        raise ValueError(
            f"{OWNER}: without sorted_token_ids expert_ids must hold the expert of each of "
            f"{routed} routed rows, got {expert_ids.shape[0]}"
        )
    if readable(count):
        used, most = int(count.item()), expert_ids.shape[0] * block_m
        most = most if sorted_ids is None else min(most, sorted_ids.shape[0])
        if not 0 <= used <= most:
            raise ValueError(
                f"{OWNER}: num_tokens_post_padded must be 0 to {most}, which sorted_token_ids and "
                f"expert_ids have room for, got {used}"
            )
        blocks = expert_ids[: -(-used // block_m)]
        check_range(f"{OWNER}: expert_ids", blocks, -1, experts, "-1 is an expert that is not here")
        if sorted_ids is not None:
            remedy = f"{routed} is the padding id for these rows of a and this a_div"
            check_range(f"{OWNER}: sorted_token_ids", sorted_ids[:used], 0, routed + 1, remedy)
    return Routing(sorted_ids, expert_ids, count, block_m, a_div)
