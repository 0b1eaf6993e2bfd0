"""Checks of the arguments of the attention modules; each raises before anything is computed, and
names the module and the argument.

Arguments of Transformer Engine's attention modules that te_mx does not have, as nn/arguments.py has
those of the linear ones: accepted at their defaults, refused by name when set."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_mx.nn.arguments import ABSENT, Absent, refuse_given
from te_mx.runtime.arguments import (
    check_number,
    check_place,
    check_size,
    check_word,
    is_dense,
    shown,
)
from te_mx.te.attention_masks import Padding, Rule

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


refuse = partial(refuse_given, absent=ATTENTION, unused=UNUSED)
FORMATS = ("sbhd", "bshd", "thd")
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
_DIMS = {"sbhd": "[s, b, heads, width]", "bshd": "[b, s, heads, width]",
         "thd": "[tokens, heads, width]"}  # fmt: skip
_LARGEST = 1 << 31


# --------------------------------------------------------------------------------- of constructors
def probability(name: str, value: Any, certain: bool = False) -> float:
    """Raise TypeError or ValueError unless a value is a number of 0 or more and less than 1, or 1
    where that is allowed too (`certain`)."""
    value = check_number(name, value)
    if not (0.0 <= value < 1.0 or (certain and value == 1.0)):
        most = "at most 1" if certain else "less than 1"
        raise ValueError(f"{name} must be 0 or more and {most}, got {value}")
    return value


def heads(owner: str, of_q: Any, of_k: Any, ranks: int = 1) -> tuple[int, int]:
    """Heads of q, and of k and v, that each of the ranks has. Raises TypeError or ValueError unless
    the second divide the first, and the ranks both."""
    of_q = _small(f"{owner}: num_attention_heads", of_q)
    of_k = of_q if of_k is None else _small(f"{owner}: num_gqa_groups", of_k)
    if of_q % of_k:
        raise ValueError(
            f"{owner}: num_gqa_groups must divide num_attention_heads={of_q}, got {of_k}"
        )
    for name, value in (("num_attention_heads", of_q), ("num_gqa_groups", of_k)):
        if value % ranks:
            raise ValueError(f"{owner}: {name}={value} must divide by tp_size={ranks}")
    return of_q // ranks, of_k // ranks


def _small(name: str, value: Any) -> int:
    made = check_size(name, value, 1)
    if made >= _LARGEST:
        raise ValueError(f"{name} must be less than 2^31, got {made}")
    return made


def widths(owner: str, kv_channels: Any) -> tuple[int, int]:
    """Widths of a head of q and k, and of v."""
    name = f"{owner}: kv_channels"
    pair = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an int or two of them, got {shown(kv_channels)}")
    return _small(name, pair[0]), _small(name, pair[1])


# ---------------------------------------------------------------------------------------- of calls
def tensor(
    owner: str, name: str, value: Any, device: torch.device | None = None,
    of: str = "query_layer",
) -> None:  # fmt: skip
    """Raise TypeError unless a value is a dense tensor, ValueError unless it is on the device, that
    of another tensor."""
    if not isinstance(value, Tensor) or not is_dense(value):
        raise TypeError(f"{owner}: {name} must be a dense tensor, got {shown(value)}")
    if device is not None:
        check_place(f"{owner}: {name}", value, device, of)


def is_float(value: Tensor) -> bool:
    """Whether torch computes with a dtype as with real numbers: not so 8-bit floats."""
    return value.is_floating_point() and value.element_size() > 1


def hidden(owner: str, name: str, value: Any, dims: int, size: int) -> None:
    """Check the input of a module: a dense tensor [.., size] of a float dtype."""
    tensor(owner, name, value)
    if not is_float(value):
        raise TypeError(f"{owner}: {name} must be of a float dtype, got {value.dtype}")
    if value.dim() != dims or value.shape[-1] != size:
        raise ValueError(
            f"{owner}: {name} must have {dims} dimensions and a last one of {size}, got shape "
            f"{tuple(value.shape)}"
        )


def angles(owner: str, name: str, value: Any) -> None:
    """Check what apply_rotary_pos_emb takes for angles."""
    tensor(owner, name, value)
    d = value.shape[-1] if value.dim() else 0
    if value.dim() != 4 or value.shape[2] != 1 or d == 0 or d % 2 or not is_float(value):
        raise ValueError(
            f"{owner}: {name} must be [s2, 1 or b, 1, d] with an even d and of a float dtype, got "
            f"{shown(value)}"
        )


def operands(owner: str, module: Any, layout: str, q: Any, k: Any, v: Any) -> None:
    """Check q, k and v against the module and each other."""
    dims = 3 if layout == "thd" else 4
    of_k, of_v = module.kv_channels
    wanted = (
        ("query_layer", q, (module.num_attention_heads, of_k)),
        ("key_layer", k, (module.num_gqa_groups, of_k)),
        ("value_layer", v, (module.num_gqa_groups, of_v)),
    )
    for name, value, last in wanted:
        tensor(owner, name, value)
        if value.dim() != dims or tuple(value.shape[-2:]) != last:
            raise ValueError(
                f"{owner}: {name} must be {_DIMS[layout]} with heads={last[0]} and width={last[1]} "
                f"for qkv_format={layout!r}, got shape {tuple(value.shape)}"
            )
        if not is_float(value) or value.dtype != q.dtype:
            raise TypeError(
                f"{owner}: {name} must be of a float dtype, the same for all three, got "
                f"{value.dtype} beside query_layer {q.dtype}"
            )
        tensor(owner, name, value, q.device)
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(
            f"{owner}: value_layer must have the tokens of key_layer, got shapes "
            f"{tuple(v.shape)} and {tuple(k.shape)}"
        )
    batch = 1 if layout == "sbhd" else 0
    if layout != "thd" and k.shape[batch] != q.shape[batch]:
        raise ValueError(
            f"{owner}: key_layer must have the batch of query_layer, {q.shape[batch]}, got "
            f"{k.shape[batch]}"
        )


def bias(owner: str, kind: str, value: Any, slopes: Any, module: Any, device: torch.device) -> None:
    """Check core_attention_bias and alibi_slopes against core_attention_bias_type."""
    check_word(f"{owner}: core_attention_bias_type", kind, BIAS_TYPES)
    heads, ranks = module.num_attention_heads, module.tp_size
    takes_bias = kind in ("pre_scale_bias", "post_scale_bias")
    if takes_bias != (value is not None):
        said = "None" if value is None else "a bias"
        raise ValueError(
            f"{owner}: core_attention_bias={said} does not go with core_attention_bias_type="
            f"{kind!r}; pre_scale_bias and post_scale_bias need one, the others none"
        )
    if slopes is not None and kind != "alibi":
        raise ValueError(
            f"{owner}: alibi_slopes go with core_attention_bias_type='alibi', not {kind!r}"
        )
    if value is not None:
        tensor(owner, "core_attention_bias", value, device)
        if not is_float(value) or value.dim() > 4:
            raise TypeError(
                f"{owner}: core_attention_bias must be of a float dtype and of at most 4 "
                f"dimensions, got {shown(value)}"
            )
    if slopes is not None:
        tensor(owner, "alibi_slopes", slopes, device)
        if not is_float(slopes) or slopes.dim() not in (1, 2) or slopes.shape[-1] != heads:
            raise ValueError(
                f"{owner}: alibi_slopes must be [{heads}] or [b, {heads}] of a float dtype, got "
                f"{shown(slopes)}"
            )
    elif kind == "alibi" and ranks > 1:
        raise ValueError(
            f"{owner}: which heads a rank has, it does not know: pass alibi_slopes, those of this "
            f"rank's heads, where tp_size={ranks}"
        )


def fits(owner: str, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor can be broadcast to the shape of the scores."""
    given = tuple(value.shape)
    padded = (1,) * (len(shape) - len(given)) + given
    if len(given) > len(shape) or any(a not in (1, b) for a, b in zip(padded, shape, strict=True)):
        raise ValueError(
            f"{owner}: {name} must be broadcastable to [b, heads, queries, keys] = {shape}, got "
            f"shape {given}"
        )


# ---------------------------------------------------------------------------------------- of masks
def _mask(owner: str, value: Any, device: torch.device) -> None:
    tensor(owner, "attention_mask", value, device)
    if value.dtype != torch.bool:
        raise TypeError(
            f"{owner}: attention_mask must be of dtype bool, True where hidden, got {value.dtype}"
        )


def arbitrary(owner: str, mask: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The mask of attn_mask_type="arbitrary"."""
    if mask is None:
        raise ValueError(f"{owner}: attn_mask_type='arbitrary' needs an attention_mask, got None")
    _mask(owner, mask, device)
    fits(owner, "attention_mask", mask, shape)
    return mask


def padding(
    owner: str, mask: Any, batch: int, queries: int, keys: int, device: torch.device
) -> Padding:
    """Tokens that are no padding, of one mask or of those for q and for k."""
    pair = mask if isinstance(mask, tuple | list) else (mask, mask)
    if len(pair) != 2:
        raise ValueError(f"{owner}: attention_mask must be one mask or two, got {len(pair)}")
    made = []
    for one, size in zip(pair, (queries, keys), strict=True):
        _mask(owner, one, device)
        if one.shape != (batch, 1, 1, size):
            raise ValueError(
                f"{owner}: attention_mask for padding must be [b, 1, 1, s] = "
                f"{(batch, 1, 1, size)}, got shape {tuple(one.shape)}; give two where q and k have "
                "different lengths"
            )
        made.append(one.view(batch, size).logical_not())
    return Padding(*made)


# -------------------------------------------------------------------------------------- of lengths
def lengths(owner: str, **given: Any) -> dict[str, Tensor]:
    """Those of cu_seqlens that were given: tensors of ints [sequences + 1]."""
    made = {}
    for name, value in given.items():
        if value is None:
            continue
        tensor(owner, name, value)
        ints = value.dtype in (torch.int32, torch.int64) and not value.is_meta
        if not ints or value.dim() != 1 or not len(value):
            raise TypeError(
                f"{owner}: {name} must be int32 or int64 [sequences + 1], got {shown(value)}"
            )
        made[name] = value
    return made


def sequences(owner: str, given: dict[str, Tensor], batch: int, device: torch.device) -> None:
    """Check lengths that stand in for a padding mask."""
    if "cu_seqlens_q" not in given:
        raise ValueError(
            f"{owner}: padding needs an attention_mask or cu_seqlens_q, got neither; pass one, or "
            "attn_mask_type='no_mask' or 'causal' where there is no padding"
        )
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if name not in given:
            continue
        tensor(owner, name, given[name], device)
        if len(given[name]) != batch + 1:
            raise ValueError(
                f"{owner}: {name} must be [b + 1] = [{batch + 1}], got [{len(given[name])}]"
            )


def packed(owner: str, rule: Rule, given: dict[str, Tensor]) -> None:
    """Check a call with qkv_format="thd"."""
    if not rule.padded:
        raise ValueError(
            f"{owner}: qkv_format='thd' needs an attn_mask_type with padding, got {rule.kind!r}"
        )
    if "cu_seqlens_q" not in given:
        raise ValueError(f"{owner}: qkv_format='thd' needs cu_seqlens_q, got None")


def packed_bias(
    owner: str, value: Tensor | None, slopes: Tensor | None, heads: int,
    of_q: Sequence[tuple[int, int]], of_k: Sequence[tuple[int, int]],
) -> None:  # fmt: skip
    """Raise ValueError unless q and k have as many sequences, and bias and slopes reach each."""
    batch = len(of_q)
    if len(of_k) != batch:
        raise ValueError(
            f"{owner}: cu_seqlens_kv must have as many sequences as cu_seqlens_q, {batch}, got "
            f"{len(of_k)}"
        )
    if slopes is not None and slopes.dim() == 2 and len(slopes) not in (1, batch):
        raise ValueError(
            f"{owner}: alibi_slopes must be [{heads}] or [{batch}, {heads}], got "
            f"{list(slopes.shape)}"
        )
    if value is None:
        return
    queries, keys = (max((b - a for a, b in of), default=0) for of in (of_q, of_k))
    b, h, s, t = (1,) * (4 - value.dim()) + tuple(value.shape)
    fit = b in (1, batch) and h in (1, heads) and (s == 1 or s >= queries)
    if not fit or (t != 1 and t < keys):
        raise ValueError(
            f"{owner}: core_attention_bias must be broadcastable to [sequences, heads, queries, "
            f"keys] = {(batch, heads, queries, keys)} of the longest sequences, or longer, got "
            f"shape {tuple(value.shape)}"
        )


def places(owner: str, given: dict[str, Tensor], side: str, tokens: int) -> list[tuple[int, int]]:
    """(first, behind the last) token of each sequence; the host reads them.

    Raises:
        ValueError: sequences that lie in each other or beyond the tokens.
    """
    name = f"cu_seqlens_{side}"
    name = name if name in given else "cu_seqlens_q"
    steps = given[name].tolist()
    padded = f"{name}_padded"
    starts = given[padded].tolist() if padded in given else steps
    if steps[0] != 0:
        raise ValueError(f"{owner}: {name} must start with 0, got {steps[0]}")
    if len(starts) != len(steps):
        raise ValueError(f"{owner}: {padded} must be [{len(steps)}] as {name}, got [{len(starts)}]")
    found, done = [], 0
    for i, start in enumerate(starts[:-1]):
        stop = start + steps[i + 1] - steps[i]
        if not done <= start <= stop <= tokens:
            raise ValueError(
                f"{owner}: {padded if padded in given else name} puts sequence {i} at {start} to "
                f"{stop}, which does not follow the one before or goes beyond {tokens} tokens"
            )
        found.append((start, stop))
        done = stop
    return found
