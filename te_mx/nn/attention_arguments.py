"""Arguments of Transformer Engine's attention modules that te_mx does not have, as te_arguments.py
has those of the linear ones: accepted at their defaults, refused by name when set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from te_mx.arguments import shown
from te_mx.nn.te_arguments import ABSENT, Absent

_CONTEXT = "te_mx has no context parallelism"
_FP8 = "attention runs in the dtype of its inputs"
_PACKED = "pass query_layer, key_layer and value_layer"
_SCORES = "scores go to torch's scaled_dot_product_attention; pass core_attention_bias instead"
_POLICIES = "sequences of one call have one mask type"

ATTENTION: dict[str, Absent] = {
    "get_rng_state_tracker": ABSENT["get_rng_state_tracker"],
    "cp_group": Absent(None, _CONTEXT),
    "cp_global_ranks": Absent(None, _CONTEXT),
    "cp_stream": Absent(None, _CONTEXT),
    "cp_size": Absent(1, _CONTEXT),
    "cp_rank": Absent(0, _CONTEXT),
    "ub_tp_comm_overlap": ABSENT["ub_overlap_ag"],
    "inference_params": Absent(None, "te_mx has no cache of keys and values; keep them yourself"),
    "fp8_output": Absent(False, _FP8),
    "bf16_backward": Absent(False, _FP8),
    "num_splits": Absent(1, "torch chooses how its attention kernels split their work"),
    "score_mod": Absent(None, _SCORES),
    "score_mod_bprop": Absent(None, _SCORES),
    "score_mod_tensors": Absent(None, _SCORES),
    "score_mod_bprop_tensors": Absent(None, _SCORES),
    "qkv_layer": Absent(None, _PACKED),
    "kv_layer": Absent(None, _PACKED),
    "qkv_interleave_dim": Absent(-3, _PACKED),
    "thd_attention_policies": Absent(None, _POLICIES),
    "thd_attention_policy_dispatch": Absent("auto", _POLICIES),
}  # fmt: skip

# Hints and names, of no effect in Transformer Engine either without what is absent here.
UNUSED = {
    "cp_comm_type", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad",
    "ub_bulk_wgrad", "seq_length", "micro_batch_size", "fast_zero_fill", "pad_between_seqs",
    "max_seqlen_q", "max_seqlen_kv",
}  # fmt: skip

_HINTS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad",
          "seq_length", "micro_batch_size")  # fmt: skip
_FORWARD = (
    "max_seqlen_q", "max_seqlen_kv", "fast_zero_fill", "inference_params", "pad_between_seqs",
    "thd_attention_policies", "thd_attention_policy_dispatch",
)  # fmt: skip

# Which of them each call takes beside the arguments of its signature.
CONSTRUCTORS: dict[str, frozenset[str]] = {
    "DotProductAttention": frozenset(
        ["get_rng_state_tracker", "cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"]
    ),
    "MultiheadAttention": frozenset(["get_rng_state_tracker", *_HINTS]),
    "TransformerLayer": frozenset(["get_rng_state_tracker", *_HINTS, "ub_tp_comm_overlap"]),
}
FORWARDS: dict[str, frozenset[str]] = {
    "DotProductAttention": frozenset(
        [
            *_FORWARD, "fp8_output", "bf16_backward", "num_splits", "score_mod", "score_mod_bprop",
            "score_mod_tensors", "score_mod_bprop_tensors", "qkv_layer", "kv_layer",
            "qkv_interleave_dim",
        ]
    ),
    "RotaryPositionEmbedding": frozenset(["cp_size", "cp_rank"]),
}  # fmt: skip


def refuse(owner: str, given: Mapping[str, Any], taken: Collection[str]) -> None:
    """Check arguments that are not in a signature.

    Raises:
        TypeError: a name that Transformer Engine's call does not take either.
        NotImplementedError: an argument of Transformer Engine that is set, by name.
    """
    for name, value in given.items():
        if name not in taken:
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}")
        if name in UNUSED:
            continue
        default, reason = ATTENTION[name]
        if value is default or (type(value) is type(default) and value == default):
            continue
        raise NotImplementedError(
            f"{owner}: {name}={shown(value)} is not supported: {reason}; leave it at {default!r}"
        )
