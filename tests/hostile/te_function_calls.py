"""The table of te_mx.pytorch: embeddings, normalizations, experts, losses, regions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from constructor_calls import K
from judge import Call
from malformed import (
    COUNT,
    DEVICE,
    FLAG,
    FUNCTION,
    NUMBER,
    OPTIONAL_DTYPE,
    OPTIONAL_FLAG,
    RECIPE,
    UPPER_CASE,
    WORD,
    Kind,
    changed,
    other_than,
    values,
)
from malformed_tensors import COLUMNS, DIMENSIONS, LAYOUTS, META, NO_TENSOR, SCALAR, STRIDES
from te_kinds import HEADS, HINT, NOT_FLOATS, STEPS, WIDTH, B, E, S, T, call

import te_mx
import te_mx.pytorch as te
from te_mx.pytorch import utils as te_utils


# ------------------------------------------------------------------------- embeddings, norms, rest
def rotary() -> tuple[Call, ...]:
    table: dict[str, tuple[Any, Kind]] = {
        "dim": (WIDTH, COUNT | values(odd=7, zero=0)),
        "rotary_percent": (1.0, NUMBER | values(two=2.0, zero=0)),
        "seq_len_interpolation_factor": (None, NUMBER.but("None") | values(zero=0)),
        "pretrained_max_position_embeddings": (None, HINT),
        "rotary_base": (1e4, NUMBER | values(zero=0)), "interleaved": (False, FLAG),
    }  # fmt: skip
    embedding = te.RotaryPositionEmbedding(WIDTH)

    def turned(device: str) -> dict[str, Any]:
        t = torch.randn(S, B, HEADS, WIDTH).to(device)
        starts = torch.zeros(B, dtype=torch.int32, device=device)
        return {"t": t, "freqs": embedding.to(device)(S + 2), "tensor_format": "sbhd",
                "start_positions": starts, "interleaved": False, "fused": False,
                "cu_seqlens": None}  # fmt: skip

    heads = NO_TENSOR | META | LAYOUTS | SCALAR | DIMENSIONS | STRIDES | NOT_FLOATS
    angles = (
        NO_TENSOR
        | META
        | LAYOUTS
        | SCALAR
        | DIMENSIONS
        | COLUMNS
        | changed(int32=lambda x: x.int(), wider=lambda x: torch.cat((x, x), -1))
    )
    return (
        call("RotaryPositionEmbedding", te.RotaryPositionEmbedding,
             lambda d: {name: value for name, (value, _) in table.items()},
             {name: kind for name, (_, kind) in table.items()}),
        call("RotaryPositionEmbedding.forward", embedding,
             lambda d: {"max_seq_len": 3, "offset": 1},
             {"max_seq_len": COUNT, "offset": COUNT.but("huge")}),
        call("apply_rotary_pos_emb", te.apply_rotary_pos_emb, turned,
             {"t": heads, "freqs": angles, "tensor_format": WORD | UPPER_CASE | values(thd="thd"),
              "start_positions": STEPS.but("bools") | changed(bools=lambda x: x.bool()),
              "interleaved": FLAG, "fused": FLAG, "cu_seqlens": other_than("None")},
             says={"tensor_format": "tensor_format|t|start_positions"}),
    )  # fmt: skip


def norm(family: str) -> tuple[Call, ...]:
    table: dict[str, tuple[Any, Kind]] = {
        "normalized_shape": (K, COUNT.but("a list") | values(
            words=["8"], empty=[], none_at_all=None, negative_one=(-1,))),
        "eps": (1e-5, NUMBER), "sequence_parallel": (None, OPTIONAL_FLAG),
        "params_dtype": (None, OPTIONAL_DTYPE), "zero_centered_gamma": (False, FLAG),
        "hidden_size": (None, other_than("None")), "dtype": (None, OPTIONAL_DTYPE),
        "device": (None, DEVICE),
    }  # fmt: skip
    made = getattr(te, family)
    layer = made(K)

    def arguments(device: str) -> dict[str, Any]:
        return {name: value for name, (value, _) in table.items()} | {
            "device": torch.device(device), "sm_margin": 0
        }  # fmt: skip

    return (
        call(family, made, arguments, {name: kind for name, (_, kind) in table.items()}),
        Call(f"te_mx.pytorch.{family}.forward", lambda d: layer.to(d),
             lambda d: {"inp": torch.randn(3, K, device=d)},
             {"inp": NO_TENSOR | LAYOUTS | SCALAR | COLUMNS | NOT_FLOATS}),
        call(f"{family}.reset_parameters", layer.reset_parameters, lambda d: {"defer_init": False},
             {"defer_init": FLAG}),
    )  # fmt: skip


SPLITS = other_than("a list") | values(one_less=[7], one_more=[1, 2, 4])


def padding(family: str) -> tuple[Call, ...]:
    made = getattr(te, family)
    return (
        call(family, made, lambda d: {"num_gemms": 2, "align_size": 16},
             {"num_gemms": COUNT.but("huge") | values(zero=0), "align_size": HINT}),
        call(f"{family}.forward", made(2),
             lambda d: {"inp": torch.randn(7, 4, device=d), "m_splits": [3, 4]},
             {"inp": NO_TENSOR, "m_splits": SPLITS.but("a tensor")}),
    )  # fmt: skip


def _routed(device: str, *names: str) -> dict[str, Any]:
    torch.manual_seed(3)
    mask = (torch.arange(T)[:, None] + torch.arange(E)) % 2 == 0
    given = {
        "inp": torch.randn(T, 6), "routing_map": mask.int(), "probs": torch.rand(T, E),
        "tokens_per_expert": mask.sum(0), "split_sizes": torch.tensor([3, 5]),
        "sorted_index": torch.tensor([1, 0]),
    }  # fmt: skip
    return {name: given[name].to(device) for name in names}


def _unpermuted(device: str) -> dict[str, Any]:
    given = _routed(device, "inp", "routing_map", "probs")
    rows, where = te.moe_permute(given["inp"], given["routing_map"], 16)
    return {"inp": rows, "row_id_map": where, "merging_probs": given["probs"],
            "restore_shape": (T, 6), "map_type": "mask", "probs": None,
            "pad_offsets": torch.zeros(E, dtype=torch.int64, device=device)}  # fmt: skip


TOKENS = NO_TENSOR | LAYOUTS | SCALAR | DIMENSIONS | STRIDES | NOT_FLOATS.but("float8")
ROUTES = NO_TENSOR | SCALAR | DIMENSIONS | changed(
    floats=lambda x: x.float(), row_less=lambda x: x[:-1], sparse=lambda x: x.to_sparse(),
    complex64=lambda x: x.to(torch.complex64),
)  # fmt: skip
PAIRS = NO_TENSOR | LAYOUTS | SCALAR | DIMENSIONS | COLUMNS | STRIDES | NOT_FLOATS.but("float8")
COUNTS = NO_TENSOR | changed(
    floats=lambda x: x.float(), a_matrix=lambda x: x[None], one_less=lambda x: x[:-1],
    bools=lambda x: x.bool(),
)  # fmt: skip
ROWS = COUNT


def permutations() -> tuple[Call, ...]:
    chunks = {"inp": TOKENS, "split_sizes": COUNTS, "sorted_index": COUNTS}
    says = {"split_sizes": "split_sizes|sorted_index"}
    return (
        call("moe_permute", te.moe_permute,
             lambda d: {**_routed(d, "inp", "routing_map"), "num_out_tokens": 16,
                        "max_token_num": -1, "map_type": "mask"},
             {"inp": TOKENS, "routing_map": ROUTES, "num_out_tokens": ROWS,
              "max_token_num": other_than("an int"), "map_type": WORD | UPPER_CASE}),
        call("moe_permute_with_probs", te.moe_permute_with_probs,
             lambda d: {**_routed(d, "inp", "probs", "routing_map"), "num_out_tokens": 16},
             {"inp": TOKENS, "probs": PAIRS, "routing_map": ROUTES, "num_out_tokens": ROWS}),
        call("moe_permute_and_pad_with_probs", te.moe_permute_and_pad_with_probs,
             lambda d: {**_routed(d, "inp", "probs", "routing_map", "tokens_per_expert"),
                        "align_size": 8},
             {"inp": TOKENS, "probs": PAIRS, "routing_map": ROUTES, "tokens_per_expert": COUNTS,
              "align_size": COUNT | values(zero=0)}, says={"align_size": "align_size|rows"}),
        call("moe_unpermute", te.moe_unpermute, _unpermuted,
             {"inp": TOKENS, "row_id_map": ROUTES.but("row less"),
              "merging_probs": PAIRS.but("None"),
              "restore_shape": other_than("None") | values(another=(T, 7)),
              "map_type": WORD | UPPER_CASE, "probs": other_than("None"),
              "pad_offsets": COUNTS.but("None")},
             says={"row_id_map": "row_id_map|merging_probs"}),
        call("moe_sort_chunks_by_index", te.moe_sort_chunks_by_index,
             lambda d: _routed(d, "inp", "split_sizes", "sorted_index"), chunks, says=says),
        call("moe_sort_chunks_by_index_with_probs", te.moe_sort_chunks_by_index_with_probs,
             lambda d: {**_routed(d, "inp", "split_sizes", "sorted_index"),
                        "probs": torch.rand(T, device=d)},
             {**chunks, "probs": NO_TENSOR | SCALAR | COLUMNS | NOT_FLOATS.but("float8")},
             says=says),
    )  # fmt: skip


def _losses(device: str) -> dict[str, Any]:
    torch.manual_seed(4)
    return {"inp": torch.randn(2, 3, 8).to(device),
            "target": torch.zeros(2, 3, dtype=torch.int64, device=device), "label_smoothing": 0.1,
            "reduce_loss": False, "dist_process_group": None, "ignore_idx": -100,
            "is_cg_capturable": False, "overwrite_input": False}  # fmt: skip


LOSSES = call(
    "parallel_cross_entropy", te.parallel_cross_entropy, _losses,
    {"inp": NO_TENSOR | META | LAYOUTS | SCALAR | DIMENSIONS | STRIDES | NOT_FLOATS.but("float8"),
     "target": NO_TENSOR | META | changed(floats=lambda x: x.float(), int32=lambda x: x.int(),
                                          one_less=lambda x: x.flatten()[1:]),
     "label_smoothing": NUMBER | values(two=2.0), "reduce_loss": FLAG,
     "dist_process_group": other_than("None"), "ignore_idx": COUNT.but("negative", "one tensor"),
     "is_cg_capturable": FLAG, "overwrite_input": FLAG},
    says={"inp": "inp|target"},
)  # fmt: skip


def _entered(context: Callable[..., Any], **arguments: Any) -> bool:
    with context(**arguments):
        return True


def questions() -> tuple[Call, ...]:
    inits = tuple(
        call(name, functools.partial(_entered, getattr(te, name)),
             lambda d: {"enabled": True, "recipe": te_mx.get_default_recipe(),
                        "preserve_high_precision_init_val": False},
             {"enabled": FLAG, "recipe": RECIPE,
              "preserve_high_precision_init_val": FLAG})
        for name in ("quantized_model_init", "fp8_model_init")
    )  # fmt: skip
    asked = tuple(
        call(f"is_{name}_available", getattr(te, f"is_{name}_available"),
             lambda d: {"return_reason": True}, {"return_reason": FLAG})
        for name in ("fp8", "fp8_block_scaling", "nvfp4", "bf16")
    )  # fmt: skip
    inits += tuple(
        call(f"utils.{name}", getattr(te_utils, name), lambda d, given=given: given,
             {key: kind for key, kind in kinds.items() if key in given})
        for kinds in ({"sigma": NUMBER, "num_layers": COUNT.but("huge") | values(zero=0)},)
        for name, given in (
            ("init_method_normal", {"sigma": 0.1}),
            ("scaled_init_method_normal", {"sigma": 0.1, "num_layers": 2}),
        )
    )  # fmt: skip
    layer = te.Linear(K, 8)
    return (
        *inits, *asked,
        call("checkpoint", functools.partial(te.checkpoint, inp=torch.ones(2, K)),
             lambda d: {"function": layer, "use_reentrant": False},
             {"function": FUNCTION, "use_reentrant": FLAG}),
    )  # fmt: skip
