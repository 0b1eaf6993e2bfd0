"""te_mx.moe.fused_experts: a whole mixture of gated MLPs on quantized weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import Operand, Stack
from te_mx._ops.fused import act_quantize_2d
from te_mx._ops.moe import experts_in_one, moe_align, moe_gemm, summed_slots
from te_mx.api.groups import bias_of, check_floats, settings_of
from te_mx.api.tensor import MXTensor
from te_mx.autograd.linear_recipe import mode_of
from te_mx.autograd.routing import put_back, route, rows_of
from te_mx.dispatch.calls import Groups
from te_mx.dispatch.fused import Activation, ActStep, Target
from te_mx.dispatch.groups import known_to_host
from te_mx.dispatch.moe import Align, Experts, RoutedGemm, Routing, in_halves
from te_mx.dispatch.problem import ENCODED, INVARIANT
from te_mx.moe.alignment import check_map
from te_mx.moe.gemm import (
    check_ids,
    check_range,
    quantized_rows,
    refuse_transforms,
    routing_weights,
)
from te_mx.moe.packed import PackedExperts, experts_of, is_weight_only
from te_mx.recipes.settings import Settings
from te_mx.runtime.arguments import check_flag, check_one_of, check_place, shown
from te_mx.weights import weight_only

OWNER = "fused_experts"
# f(gate) * up, with f; swigluoai is gpt-oss's: limits of 7, slope 1.702, up + 1.
ACTIVATIONS = {
    "silu": Activation("swiglu"), "gelu_tanh": Activation("geglu"), "relu": Activation("reglu"),
    "relu2": Activation("sreglu"), "quick_gelu": Activation("qgeglu"), "sigmoid": Activation("glu"),
    "swigluoai": Activation("clamped_swiglu"),
}  # fmt: skip
_MOST_BLOCK = 64


@torch.no_grad()
def fused_experts(
    x: Tensor,
    w13: MXTensor | PackedExperts,
    w2: MXTensor | PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    *,
    interleaved: bool = False,
    expert_map: Tensor | None = None,
    biases: Sequence[Tensor | None] | None = None,
    recipe: Any = None,
) -> Tensor:
    """``y[t] = sum over j of topk_weights[t, j] * mlp_e(x[t])`` with ``e = topk_ids[t, j]`` and
    ``mlp_e(x) = (f(gate) * up) @ w2[e].T``, ``gate, up = x @ w13[e].T``.

    x is quantized once, or not at all (`pack_experts`, activations). The products with w13 are fp32
    sums, rounded to the dtype of x; f(gate) * up is fp32, rounded to that dtype and, if at all,
    quantized in the same step; the products with w2 stay fp32, times topk_weights, and are added up
    in fp32 in the order of j. No host waits.

    Args:
        x: [M, H], fp32, bf16 or fp16.
        w13: MXTensor [E, 2 F, H]: gate rows, then up rows of every expert, or in turns.
        w2: MXTensor [E, H2, F]. Or what `pack_experts` made of these.
        topk_weights: [M, top_k], used as they are.
        topk_ids: int32 or int64 [M, top_k], -1 for a slot that counts nothing.
        activation: f: one of ACTIVATIONS.
        interleaved: rows of w13 are gate, up, gate, up, .. as gpt-oss has them.
        expert_map: [experts of all ranks], the number of each here or -1, which then adds nothing.
        biases: of w13 [E, 2 F] and of w2 [E, H2], either may be None.
        recipe: as of `grouped_gemm`.

    Returns:
        [M, H2] in the dtype of x. Gradients do not flow through this function.

    Raises:
        TypeError, ValueError: what does not fit, with what was expected, before anything runs; ids
            that are out of range on the CPU. On a device these count nothing.
        NotImplementedError: forward-mode AD or a transform of torch.func follows a tensor.
    """
    settings = settings_of(recipe, forward=False)
    check_flag(f"{OWNER}: interleaved", interleaved)
    check_one_of(f"{OWNER}: activation", activation, ACTIVATIONS)
    as_is = is_weight_only(w13)
    if as_is and settings.precision in (INVARIANT, ENCODED):
        raise ValueError(
            f"{OWNER}: precision {settings.precision!r} quantizes tokens, w13 is packed with "
            "activations='bf16' for tokens as they are"
        )
    first, second = experts_of(w13, OWNER, "w13", as_is), experts_of(w2, OWNER, "w2", as_is)
    _check_weights(x, first, second)
    ids, local = _ids(topk_ids, expert_map, first, x.shape[0])
    if local is None:
        check_range(f"{OWNER}: topk_ids", ids, -1, first.groups, "w13 has so many experts")
    routed, top_k = ids.numel(), ids.shape[1]
    scores = routing_weights(f"{OWNER}: topk_weights", topk_weights, routed, ids.device)
    bias = _biases(biases, first, second)
    refuse_transforms(OWNER, x, topk_weights, *bias)
    if routed == 0:
        return x.new_zeros((x.shape[0], second.rows))
    mode, act = mode_of(settings), ACTIVATIONS[activation]
    what = Experts(
        x.detach(), first, second, ids, scores, local, bias, act, interleaved,
        "" if as_is else settings.x, settings.scale_rule, mode,
    )  # fmt: skip
    made = experts_in_one(what)
    if made is not None:
        return made
    if as_is:
        return _of_values(what)
    routing = _routing(ids, local, first.groups)
    h = x.new_empty((routed, first.rows))
    moe_gemm(RoutedGemm(quantized_rows(x, settings), first, routing, bias[0], None, h, mode))
    middle = _activated(h, act, interleaved, settings)
    # NOTE: of slots of no expert here, of which nothing is written.
    experts = routing.expert_ids if routing.sorted_token_ids is None else ids.reshape(-1)
    left_out = not known_to_host(ids) and (routing.sorted_token_ids is None or local is None)
    y = (scores.new_empty if left_out else scores.new_zeros)((routed, second.rows))
    routing = routing._replace(a_div=1)
    moe_gemm(RoutedGemm(middle, second, routing, bias[1], scores, y, mode, follows=True))
    return summed_slots(y, top_k, x.dtype, (experts, first.groups) if left_out else None)


def _of_values(what: Experts) -> Tensor:
    """By steps, of tokens as they are."""
    x, first, second, ids = what[:4]
    if what.expert_map is not None:
        ids = _local(ids.reshape(-1), what.expert_map).view(ids.shape)
    to = route(ids, first.groups)
    groups, rows = Groups(to.offs), rows_of(x, to.order, to.top_k)
    h = in_halves(weight_only.grouped(rows, groups, first, what.biases[0], x.dtype), what.in_pairs)
    step = ActStep(h, None, what.act, h.dtype, True, Target("", "", what.rule))
    out = act_quantize_2d(step).out
    assert out is not None
    y = weight_only.grouped(out, groups, second, what.biases[1], torch.float32)
    return put_back(y, to, what.weights.view(ids.shape)).to(x.dtype)


def _activated(h: Tensor, act: Activation, interleaved: bool, settings: Settings) -> Operand:
    """f(gate) * up of h [routed, 2 F], quantized."""
    h = in_halves(h, interleaved)
    target = Target(f"{settings.x}@rows", "", settings.scale_rule)
    made = act_quantize_2d(ActStep(h, None, act, h.dtype, False, target)).quantized.row
    assert made is not None
    return made


def _routing(ids: Tensor, expert_map: Tensor | None, experts: int) -> Routing:
    """The routing of slots [M, top_k]: each a block of its own where experts hardly share any, and
    where the host groups them anyhow."""
    flat = ids.reshape(-1)
    routed, top_k = flat.shape[0], ids.shape[1]
    total = experts if expert_map is None else len(expert_map)
    if known_to_host(ids) or 4 * routed <= total:
        if expert_map is not None:
            flat = _local(flat, expert_map)
        return Routing(None, flat, None, 1, top_k, top_k)
    block = 8
    while block < _MOST_BLOCK and block * total < 2 * routed:
        block *= 2
    sorted_ids, expert_ids, count = moe_align(Align(flat, block, total, expert_map))
    return Routing(sorted_ids, expert_ids, count, block, top_k, top_k)


def _local(ids: Tensor, expert_map: Tensor) -> Tensor:
    """The numbers here of these experts, -1 for those that are elsewhere."""
    known = (ids >= 0) & (ids < len(expert_map))
    return torch.where(known, expert_map[torch.where(known, ids, 0)], -1)


def _check_weights(x: Any, first: Stack, second: Stack) -> None:
    """Raise unless x, w13 and w2 belong together."""
    check_floats(f"{OWNER}: x", x)
    if x.dim() != 2 or x.shape[1] != first.k:
        raise ValueError(f"{OWNER}: x must be [M, {first.k}] as w13 says, got {tuple(x.shape)}")
    check_place(f"{OWNER}: x", x, first.codes.device, "w13")
    check_place(f"{OWNER}: w2", second.codes, first.codes.device, "w13")
    experts, width = first.groups, 2 * second.k
    if second.groups != experts or first.rows != width:
        raise ValueError(
            f"{OWNER}: w13 must be [E, 2 F, H] and w2 [E, H2, F], got [{experts}, {first.rows}, "
            f"{first.k}] and [{second.groups}, {second.rows}, {second.k}]"
        )


def _ids(topk_ids: Any, expert_map: Any, first: Stack, tokens: int) -> tuple[Tensor, Tensor | None]:
    """topk_ids [M, top_k] and the expert map, int32."""
    ids = check_ids(f"{OWNER}: topk_ids", topk_ids, first.codes.device, "[M, top_k]")
    if ids.shape[0] != tokens or ids.shape[1] == 0:
        raise ValueError(
            f"{OWNER}: topk_ids must be [{tokens}, top_k] for x, got {tuple(ids.shape)}"
        )
    if expert_map is None:
        return ids, None
    if not isinstance(expert_map, Tensor) or expert_map.dim() != 1 or len(expert_map) == 0:
        raise TypeError(f"{OWNER}: expert_map must be a vector of ids, got {shown(expert_map)}")
    local = check_map(expert_map, len(expert_map), ids, OWNER)
    assert local is not None
    check_range(f"{OWNER}: expert_map", local, -1, first.groups, "w13 has so many experts")
    check_range(f"{OWNER}: topk_ids", ids, -1, len(local), "expert_map has so many experts")
    return ids, local


def _biases(biases: Any, first: Stack, second: Stack) -> tuple[Tensor | None, Tensor | None]:
    """The biases of both products, or None for each."""
    if biases is None:
        return None, None
    if isinstance(biases, str | Tensor) or not isinstance(biases, Sequence) or len(biases) != 2:
        raise TypeError(
            f"{OWNER}: biases must be a pair of tensors or None, for w13 and w2, got "
            f"{shown(biases)}"
        )
    names = f"{OWNER}: biases[0]", f"{OWNER}: biases[1]"
    of = "the weights"
    return bias_of(names[0], biases[0], first, of), bias_of(names[1], biases[1], second, of)
