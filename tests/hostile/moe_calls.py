"""The table of te_mx.moe."""

from __future__ import annotations

import torch
from function_calls import floats
from grouped_calls import STACK, TOKENS
from judge import Call
from malformed import (
    COUNT,
    FLAG,
    OPTIONAL_DTYPE,
    OPTIONAL_WORD,
    RECIPE,
    UPPER_CASE,
    WORD,
    Kind,
    changed,
    other_than,
    values,
)  # fmt: skip
from malformed_tensors import DIMENSIONS, INDEX, INPUT, NO_TENSOR, ROWS, SHAPED, output
from torch import Tensor

import te_mx

M, TOP_K, E, BLOCK, H, F = 3, 2, 4, 4, 70, 8


def ids(d: str) -> Tensor:
    return torch.tensor([[0, 3], [3, 1], [1, 0]], dtype=torch.int64, device=d)


def lists(d: str) -> te_mx.moe.AlignedBlocks:
    return te_mx.moe.align_block_size(ids(d), BLOCK, E)


def weights(d: str, n: int, k: int) -> te_mx.MXTensor:
    return te_mx.quantize(floats(d, E, n, k))


SIZE = COUNT | values(nothing=0)
# What is longer than what is used of it is legal, and so is what is used of it.
LIST = INDEX.but("one less", "one more", "none at all")
SLOTS = INDEX.but("one less", "one more", "a matrix", "a scalar", "none at all")
MAP = INDEX.but("beyond the end", "beyond 64 bits") | changed(
    None, beyond_the_experts=lambda x: x + 10**6
)
SCORES = SHAPED.but("None", "dimension more", "dimension less")
WEIGHTS = (
    other_than() | changed(
        None, meta=lambda x: x.to("meta"), its_codes=lambda x: x.rowwise_data,
        its_values=lambda x: x.dequantize(),
        another_k=lambda x: te_mx.quantize(torch.ones(*x.shape[:-1], 71)).to(x.device),
        columns_alone=lambda x: te_mx.quantize(
            torch.ones(x.shape), rowwise=False, columnwise=True
        ).to(x.device),
        a_matrix=lambda x: te_mx.quantize(torch.ones(8, x.shape[-1])).to(x.device),
        no_experts=lambda x: te_mx.quantize(torch.ones(0, *x.shape[1:])).to(x.device),
        an_expert_less=lambda x: te_mx.quantize(torch.ones(E - 1, *x.shape[1:])).to(x.device),
        square_blocks=lambda x: te_mx.quantize(
            torch.ones(x.shape), fmt="fp8_e4m3_128x128"
        ).to(x.device),
    )
)  # fmt: skip


def gemm(d: str, a: Tensor | te_mx.MXTensor, **more: object) -> dict[str, object]:
    made = lists(d)
    return {
        "a": a, "w": weights(d, 40, H), "sorted_token_ids": made[0], "expert_ids": made[1],
        "num_tokens_post_padded": made[2], "top_k": TOP_K, "block_m": BLOCK, **more,
    }  # fmt: skip


COUNTED: Kind = INDEX.but("one less", "none at all", "beyond 64 bits", "every second") | changed(
    None, negative=lambda x: x - 10**6
)
MOE = (
    Call(
        "te_mx.moe.align_block_size", lambda d: te_mx.moe.align_block_size,
        lambda d: {"topk_ids": ids(d).flatten(), "block_m": BLOCK, "num_experts": E,
                   "expert_map": torch.tensor([1, -1, 0, -1], device=d), "pad_sorted_ids": True},
        {"topk_ids": SLOTS, "block_m": SIZE, "num_experts": SIZE, "expert_map": MAP.but("None"),
         "pad_sorted_ids": FLAG},
        says={"topk_ids": "topk_ids|expert_map", "num_experts": "num_experts|expert_map|experts"},
    ),
    Call(
        "te_mx.moe.batched_align_block_size", lambda d: te_mx.moe.batched_align_block_size,
        lambda d: {"max_tokens_per_batch": 9, "block_m": BLOCK,
                   "expert_num_tokens": torch.tensor([4, 0, 9, 1], device=d)},
        {"max_tokens_per_batch": SIZE.but("nothing"), "block_m": SIZE,
         "expert_num_tokens": INDEX.but("one less", "one more", "none at all")},
        says={"max_tokens_per_batch": "max_tokens_per_batch|experts"},
    ),
    Call(
        "te_mx.moe.pack_experts", lambda d: te_mx.moe.pack_experts,
        lambda d: {"w": weights(d, 40, H), "recipe": None, "activations": "bf16"},
        {"w": WEIGHTS.but("another k", "an expert less", "meta"), "recipe": RECIPE,
         "activations": OPTIONAL_WORD | UPPER_CASE},
    ),
    Call(
        "te_mx.moe.grouped_gemm", lambda d: te_mx.moe.grouped_gemm,
        lambda d: gemm(d, floats(d, M, H), out_dtype=torch.float32, bias=floats(d, E, 40),
                       mul_weight_by=floats(d, M, TOP_K), a_div=TOP_K, zero_unrouted=False,
                       recipe=None),
        {"a": INPUT.but("endless") | DIMENSIONS, "w": WEIGHTS.but("an expert less"),
         "sorted_token_ids": LIST.but("None"), "expert_ids": LIST,
         "num_tokens_post_padded": COUNTED, "top_k": SIZE, "block_m": SIZE,
         "out_dtype": OPTIONAL_DTYPE | values(float64=torch.float64), "mul_weight_by": SCORES,
         "a_div": SIZE.but("None"), "bias": SHAPED.but("None"), "zero_unrouted": FLAG,
         "recipe": RECIPE},
        says={"a": "a|mul_weight_by", "w": "w|weights|a|bias",
              "top_k": "top_k|a_div|mul_weight_by",
              "block_m": "block_m|expert_ids|num_tokens_post_padded",
              "a_div": "a_div|mul_weight_by", "expert_ids": "expert_ids|num_tokens_post_padded",
              "sorted_token_ids": "sorted_token_ids|num_tokens_post_padded"},
    ),
    Call(
        "te_mx.moe.grouped_gemm of MXTensors into out", lambda d: te_mx.moe.grouped_gemm,
        lambda d: gemm(d, te_mx.quantize(floats(d, M, H)), bias=floats(d, 1, E, 40)[0],
                       out=torch.ones(M * TOP_K, 40, device=d)),
        {"a": TOKENS.but("its values"), "w": STACK.but("a group more"), "out": output()},
        covers="te_mx.moe.grouped_gemm", says={"a": "a", "w": "w|weights|a|bias"},
    ),
    Call(
        "te_mx.moe.fused_experts", lambda d: te_mx.moe.fused_experts,
        lambda d: {"x": floats(d, M, H), "w13": weights(d, 2 * F, H), "w2": weights(d, 40, F),
                   "topk_weights": floats(d, M, TOP_K), "topk_ids": ids(d), "activation": "silu",
                   "interleaved": False, "expert_map": torch.tensor([3, 1, -1, 0], device=d),
                   "biases": (floats(d, E, 2 * F), floats(d, E, 40)), "recipe": None},
        {"x": INPUT.but("endless") | ROWS | DIMENSIONS, "w13": WEIGHTS, "w2": WEIGHTS,
         "topk_weights": SCORES,
         "topk_ids": INDEX.but("a matrix"), "activation": WORD, "interleaved": FLAG,
         "expert_map": MAP.but("None", "one more") | values(no_entries=lambda: torch.ones(0).int()),
         "biases": NO_TENSOR.but("None") | changed(
             None, one=lambda x: x[:1], three=lambda x: (*x, None), in_turns=lambda x: x[::-1],
             of_an_expert=lambda x: (x[0][0], x[1]), doubles=lambda x: (x[0].double(), x[1])),
         "recipe": RECIPE},
        says={"x": "x|topk_ids", "w13": "w13|w2|x", "w2": "w2|w13",
              "topk_ids": "topk_ids|topk_weights", "expert_map": "expert_map|topk_ids"},
    ),
)  # fmt: skip
