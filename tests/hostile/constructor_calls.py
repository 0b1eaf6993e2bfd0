"""The table of the constructors of te_mx's modules."""

from __future__ import annotations

from typing import Any

import torch
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
    other_than,
    values,
)
from torch import nn

import te_mx

K, N = 64, 40
SIZES = {
    "Linear": {"in_features": K, "out_features": N},
    "LayerNormLinear": {"in_features": K, "out_features": N},
    "LayerNormMLP": {"hidden_size": K, "ffn_hidden_size": N},
    "GroupedLinear": {"num_gemms": 2, "in_features": K, "out_features": N},
}

SPLIT = other_than("None", "a string", "a list", "a dict") | values(
    no_names=lambda: [], of_ints=lambda: [1, 2], the_same_twice=lambda: ["a", "a"],
    another_sum=lambda: {"a": 8, "b": 8}, fractions=lambda: {"a": 19.5, "b": 20.5},
    bools=lambda: {"a": True, "b": 39}, negative=lambda: {"a": -1, "b": 41},
    no_identifier=lambda: ["a b", "c"], in_the_way=lambda: ["whole", "b"],
    of_weight=lambda: ["", "b"], Nones=lambda: {"a": None, "b": None}, unequal=lambda: ["a"] * 3,
    of_bytes=lambda: [b"a", b"b"],
)  # fmt: skip
PARAMS = other_than("None") | values(
    of_nothing_known=lambda: {"nonsense": 1.0}, a_word_in_it=lambda: {"limit": "7"},
    NaN_in_it=lambda: {"limit": float("nan")}, negative_limit=lambda: {"limit": -1.0},
    None_in_it=lambda: {"limit": None}, a_bool_in_it=lambda: {"alpha": True},
    infinite_alpha=lambda: {"alpha": float("inf")},
)  # fmt: skip
ABSENT = other_than("None") | values(a_group=lambda: object(), minus_one=-1)
COMMON: dict[str, tuple[Any, Kind]] = {
    "bias": (True, FLAG), "device": (None, DEVICE), "dtype": (None, OPTIONAL_DTYPE),
    "params_dtype": (None, OPTIONAL_DTYPE), "name": ("layer", TEXT),
    "init_method": (nn.init.zeros_, OPTIONAL_FUNCTION),
    "return_bias": (False, FLAG), "fuse_wgrad_accumulation": (False, FLAG),
    "delay_wgrad_compute": (False, FLAG),
}  # fmt: skip
SHARED: dict[str, tuple[Any, Kind]] = {
    "tp_group": (None, ABSENT), "tp_size": (1, COUNT | values(zero=0)),
    "sequence_parallel": (False, FLAG),
}  # fmt: skip
MODE: dict[str, tuple[Any, Kind]] = {"parallel_mode": ("column", OPTIONAL_WORD | UPPER_CASE)}
NORM: dict[str, tuple[Any, Kind]] = {
    "eps": (1e-5, NUMBER), "normalization": ("LayerNorm", WORD | UPPER_CASE),
    "zero_centered_gamma": (False, FLAG), "return_layernorm_output": (False, FLAG),
}  # fmt: skip
OWN: dict[str, dict[str, tuple[Any, Kind]]] = {
    "Linear": {
        **SHARED, **MODE, "save_original_input": (False, FLAG), "parameters_split": (None, SPLIT)
    },
    "LayerNormLinear": {**SHARED, **MODE, **NORM, "parameters_split": (None, SPLIT)},
    "LayerNormMLP": {
        **SHARED, "set_parallel_mode": (True, FLAG), **NORM,
        "normalization": ("LayerNorm", OPTIONAL_WORD | UPPER_CASE),
        "activation": ("clamped_swiglu", WORD | UPPER_CASE), "activation_params": (None, PARAMS),
        "output_layer_init_method": (None, OPTIONAL_FUNCTION), "checkpoint": (True, FLAG),
    },
    "GroupedLinear": {
        "tp_group": (None, ABSENT), "tp_size": (1, other_than() | values(two=2, zero=0)),
        "sequence_parallel": (False, other_than("a bool") | values(True_=True, zero=0)),
        "save_original_input": (False, FLAG), "single_grouped_weight": (False, FLAG),
        "single_grouped_bias": (None, OPTIONAL_FLAG), "use_grouped_tensor": (None, OPTIONAL_FLAG),
    },
}  # fmt: skip


def constructor(family: str) -> Call:
    table = {**COMMON, **OWN[family]}
    sizes = SIZES[family]

    def arguments(device: str) -> dict[str, Any]:
        given = {name: value for name, (value, _) in table.items()}
        return {**sizes, **given, "device": torch.device(device)}

    kinds = dict.fromkeys(sizes, COUNT) | {name: kind for name, (_, kind) in table.items()}
    if "num_gemms" in sizes:
        kinds["num_gemms"] = COUNT | values(zero=0)
    made = getattr(te_mx, family)
    return Call(f"te_mx.{family}", lambda device: made, arguments, kinds)
