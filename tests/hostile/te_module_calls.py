"""The table of te_mx.pytorch's modules: linear ones, attention, the transformer layer."""

from __future__ import annotations

from typing import Any

import torch
from constructor_calls import COMMON, OWN, PARAMS, SHARED, SIZES
from judge import Call
from malformed import (
    COUNT,
    DEVICE,
    FLAG,
    NUMBER,
    OPTIONAL_DTYPE,
    OPTIONAL_FLAG,
    OPTIONAL_FUNCTION,
    OPTIONAL_WORD,
    TEXT,
    UPPER_CASE,
    WORD,
    Kind,
    changed,
    other_than,
    values,
)
from malformed_tensors import COLUMNS, DIMENSIONS, LAYOUTS, META, NO_TENSOR, SCALAR, STRIDES
from te_kinds import (
    HEADS,
    HEADS_OF,
    HIDDEN,
    HINT,
    MASK,
    NOT_FLOATS,
    OPTIONAL_COUNT,
    PASSED,
    PROBABILITY,
    STEPS,
    WIDTH,
    WINDOW,
    B,
    S,
    call,
)

import te_mx.pytorch as te
from te_mx.nn.arguments import ABSENT
from te_mx.te.modules import ORDERS


# ----------------------------------------------------------------------------------- linear modules
def linear(family: str) -> Call:
    """Its arguments are te_mx's, whose table has more; here each gets to it under its name."""
    table = {name: one for name, one in {**COMMON, **OWN[family]}.items() if name != "dtype"}
    absent = [n for n in ORDERS[family] if n in ABSENT and n not in table]
    names = [*SIZES[family], *table, *absent, "dtype"]

    def arguments(device: str) -> dict[str, Any]:
        given = {name: value for name, (value, _) in table.items()}
        given |= {name: ABSENT[name].default for name in absent} | {"dtype": None}
        return {**SIZES[family], **given, "device": torch.device(device)}

    return call(family, getattr(te, family), arguments, dict.fromkeys(names, PASSED))


# ---------------------------------------------------------------------------------------- attention
_MASKED: dict[str, tuple[Any, Kind]] = {
    "window_size": (None, WINDOW), "bottom_right_diagonal": (None, OPTIONAL_FLAG),
    "softcap": (0.0, NUMBER),
}  # fmt: skip
_SHARED: dict[str, tuple[Any, Kind]] = {
    **SHARED, **_MASKED, "attention_dropout": (0.0, PROBABILITY), "layer_number": (None, HINT),
    "num_gqa_groups": (None, OPTIONAL_COUNT | values(three=3)), "name": ("layer", TEXT),
    "softmax_type": ("vanilla", WORD | UPPER_CASE),
}  # fmt: skip
_NORMED: dict[str, tuple[Any, Kind]] = {
    "layernorm_epsilon": (1e-5, NUMBER), "zero_centered_gamma": (False, FLAG),
    "normalization": ("LayerNorm", WORD | UPPER_CASE), "bias": (True, FLAG),
    "fuse_qkv_params": (True, FLAG), "qkv_weight_interleaved": (True, FLAG),
    "rotary_pos_interleaved": (False, FLAG), "qk_norm_before_rope": (False, FLAG),
    "qk_norm_type": (None, OPTIONAL_WORD | UPPER_CASE), "qk_norm_eps": (1e-6, NUMBER),
    "init_method": (None, OPTIONAL_FUNCTION), "output_layer_init_method": (None, OPTIONAL_FUNCTION),
    "kv_channels": (None, OPTIONAL_COUNT), "fuse_wgrad_accumulation": (False, FLAG),
    "params_dtype": (None, OPTIONAL_DTYPE), "set_parallel_mode": (True, FLAG),
}  # fmt: skip
CONSTRUCTED: dict[str, dict[str, tuple[Any, Kind]]] = {
    "DotProductAttention": {
        **_SHARED, "num_attention_heads": (HEADS, COUNT | values(zero=0)),
        "kv_channels": (WIDTH, COUNT | values(zero=0, three=(1, 2, 3), words=("8", "8"))),
        "qkv_format": ("sbhd", WORD | UPPER_CASE), "attn_mask_type": ("causal", WORD | UPPER_CASE),
        "attention_type": ("self", WORD | UPPER_CASE),
        "softmax_scale": (None, NUMBER.but("None", "negative")), "return_max_logit": (False, FLAG),
        "invariant": (False, FLAG),
    },
    "MultiheadAttention": {
        **_SHARED, **_NORMED, "hidden_size": (HIDDEN, COUNT | values(odd=HIDDEN + 1)),
        "num_attention_heads": (HEADS, COUNT | values(zero=0, three=3)),
        "qkv_format": ("sbhd", WORD | UPPER_CASE), "attn_mask_type": ("causal", WORD | UPPER_CASE),
        "return_bias": (False, FLAG), "return_layernorm_output": (False, FLAG),
        "input_layernorm": (True, FLAG), "attention_type": ("self", WORD | UPPER_CASE),
    },
    "TransformerLayer": {
        **{name: (value, PASSED) for name, (value, _) in {**_SHARED, **_NORMED}.items()},
        "hidden_size": (HIDDEN, COUNT | values(odd=HIDDEN + 1)),
        "ffn_hidden_size": (48, COUNT), "hidden_dropout": (0.0, PROBABILITY),
        "num_attention_heads": (HEADS, COUNT | values(zero=0, three=3)),
        "self_attn_mask_type": ("causal", WORD | UPPER_CASE),
        "enc_dec_attn_mask_type": ("no_mask", WORD | UPPER_CASE),
        "enc_dec_bottom_right_diagonal": (None, OPTIONAL_FLAG),
        "enc_dec_window_size": (None, WINDOW),
        "apply_residual_connection_post_layernorm": (False, FLAG),
        "output_layernorm": (False, FLAG), "parallel_attention_mlp": (False, FLAG),
        "layer_type": ("decoder", WORD | UPPER_CASE),
        "drop_path_rate": (0.0, PROBABILITY.but("one")),
        "activation": ("gelu", WORD | UPPER_CASE), "activation_params": (None, PARAMS),
        "attn_input_format": ("sbhd", WORD | UPPER_CASE),
    },
}  # fmt: skip


def attention(family: str) -> Call:
    table = dict(CONSTRUCTED[family])
    if family != "DotProductAttention":
        table["device"] = ("cpu", DEVICE)

    def arguments(device: str) -> dict[str, Any]:
        given = {name: value for name, (value, _) in table.items()}
        return given | ({"device": torch.device(device)} if "device" in given else {})

    return call(
        family, getattr(te, family), arguments, {name: kind for name, (_, kind) in table.items()},
        says={"fuse_wgrad_accumulation": "fuse_wgrad_accumulation|fuse_qkv_params"},
    )  # fmt: skip


def grouping(family: str) -> Call:
    layer = getattr(te, family)(*{"DotProductAttention": (HEADS, WIDTH),
                                  "MultiheadAttention": (HIDDEN, HEADS)}.get(
                                      family, (HIDDEN, 48, HEADS)))  # fmt: skip
    return call(
        f"{family}.set_tensor_parallel_group", layer.set_tensor_parallel_group,
        lambda d: {"tp_group": None},
        {"tp_group": other_than("None") | values(ranks=lambda: [0, 1], a_size=2)},
    )  # fmt: skip


def qkv(device: str) -> dict[str, Any]:
    torch.manual_seed(2)
    names = ("query_layer", "key_layer", "value_layer")
    return {name: torch.randn(S, B, HEADS, WIDTH).to(device) for name in names}


OVERRIDES: dict[str, tuple[Any, Kind]] = {
    "window_size": (None, WINDOW), "bottom_right_diagonal": (None, OPTIONAL_FLAG),
    "softcap": (None, NUMBER.but("None")), "checkpoint_core_attention": (False, FLAG),
}  # fmt: skip
CORE: dict[str, tuple[Any, Kind]] = {
    **OVERRIDES, "core_attention_bias_type": ("no_bias", WORD | UPPER_CASE),
    "core_attention_bias": (None, other_than("None")), "alibi_slopes": (None, other_than("None")),
    "qkv_format": (None, OPTIONAL_WORD | UPPER_CASE | values(thd="thd")),
}  # fmt: skip


def core_attention() -> tuple[Call, ...]:
    def arguments(device: str) -> dict[str, Any]:
        mask = torch.zeros(B, 1, 1, S, dtype=torch.bool, device=device)
        given = {name: value for name, (value, _) in CORE.items()}
        return {**qkv(device), **given, "attn_mask_type": "padding", "attention_mask": mask}

    def packed(device: str) -> dict[str, Any]:
        steps = torch.tensor([0, 4, S * B], device=device)
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        flat = {name: x.flatten(0, 1) for name, x in qkv(device).items()}
        return flat | dict.fromkeys(names, steps)

    def biased(device: str) -> dict[str, Any]:
        return {**qkv(device), "core_attention_bias_type": "post_scale_bias",
                "core_attention_bias": torch.randn(1, HEADS, S, S).to(device)}  # fmt: skip

    def sloped(device: str) -> dict[str, Any]:
        return {**qkv(device), "core_attention_bias_type": "alibi",
                "alibi_slopes": torch.rand(HEADS).to(device)}  # fmt: skip

    layer = te.DotProductAttention(HEADS, WIDTH)
    one_by_one = te.DotProductAttention(
        HEADS, WIDTH, qkv_format="thd", attn_mask_type="padding_causal"
    )
    name = "DotProductAttention.forward"
    kinds = dict.fromkeys(qkv("cpu"), HEADS_OF) | {name: kind for name, (_, kind) in CORE.items()}
    kinds |= {"attn_mask_type": OPTIONAL_WORD | UPPER_CASE, "attention_mask": MASK}
    steps = STEPS | changed(
        negative=lambda x: x - 1,
        falling=lambda x: x.flip(0),
        beyond=lambda x: x + 100,
        one_more=lambda x: torch.cat((x, x)),
    )
    lengths = dict.fromkeys(
        ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), steps
    ) | {"cu_seqlens_q": steps | values(None_=None)}
    covers = f"te_mx.pytorch.{name}"
    float_bias = (NO_TENSOR | META | COLUMNS | LAYOUTS | NOT_FLOATS) | changed(
        five=lambda x: x[None]
    )
    words = "cu_seqlens_q|cu_seqlens_kv"
    return (
        call(name, layer, arguments, kinds, says={"attention_mask": "attention_mask|padding"}),
        call(f"{name} of packed sequences", one_by_one, packed, lengths, covers=covers,
             says=dict.fromkeys(lengths, f"{words}|cu_seqlens_q_padded|cu_seqlens_kv_padded")),
        call(f"{name} with a bias", layer, biased, {"core_attention_bias": float_bias},
             covers=covers),
        call(f"{name} with slopes", layer, sloped,
             {"alibi_slopes": (NO_TENSOR | META | SCALAR | COLUMNS | NOT_FLOATS).but("None")},
             covers=covers),
    )  # fmt: skip


def block(family: str) -> Call:
    """The forward of a module with attention inside."""
    torch.manual_seed(0)
    layer: Any
    if family == "MultiheadAttention":
        layer = te.MultiheadAttention(HIDDEN, HEADS, attention_type="cross", attention_dropout=0.0)
    else:
        layer = te.TransformerLayer(
            HIDDEN, 48, HEADS, layer_type="decoder", hidden_dropout=0.0, attention_dropout=0.0
        )
    table = {**OVERRIDES, "is_first_microbatch": (None, OPTIONAL_FLAG),
             "rotary_pos_emb": (None, other_than("None"))}  # fmt: skip
    if family == "MultiheadAttention":
        table |= {"attn_mask_type": (None, OPTIONAL_WORD | UPPER_CASE),
                  "inference_params": (None, other_than("None")),
                  "attention_mask": (None, values())}  # fmt: skip
    else:
        table |= {
            "self_attn_mask_type": (None, OPTIONAL_WORD | UPPER_CASE),
            "enc_dec_attn_mask_type": ("padding", OPTIONAL_WORD | UPPER_CASE),
            "enc_dec_window_size": (None, WINDOW), "attention_mask": (None, values()),
            "enc_dec_bottom_right_diagonal": (None, OPTIONAL_FLAG),
        }  # fmt: skip

    def arguments(device: str) -> dict[str, Any]:
        torch.manual_seed(2)
        made = {name: torch.randn(S, B, HIDDEN) for name in ("hidden_states", "encoder_output")}
        given = {name: value for name, (value, _) in table.items()}
        if family == "TransformerLayer":
            given["enc_dec_attn_mask"] = torch.zeros(B, 1, 1, S, dtype=torch.bool, device=device)
        return {name: x.to(device) for name, x in made.items()} | given

    hidden = NO_TENSOR | LAYOUTS | SCALAR | COLUMNS | DIMENSIONS | STRIDES | NOT_FLOATS
    kinds = {name: kind for name, (_, kind) in table.items()}
    kinds |= {"hidden_states": hidden, "encoder_output": hidden}
    says = {}
    if family == "TransformerLayer":
        kinds["enc_dec_attn_mask"] = MASK
        says = {
            "self_attn_mask_type": "self_attn_mask_type|attn_mask_type",
            "enc_dec_attn_mask_type": "enc_dec_attn_mask_type|attn_mask_type",
            "enc_dec_window_size": "enc_dec_window_size|window_size",
            "enc_dec_bottom_right_diagonal": "enc_dec_bottom_right_diagonal|bottom_right_diagonal",
            "enc_dec_attn_mask": "enc_dec_attn_mask|attention_mask|padding",
        }
    return Call(
        f"te_mx.pytorch.{family}.forward", lambda d: layer.to(d), arguments, kinds, says=says
    )
