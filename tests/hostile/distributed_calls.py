"""The table of te_mx.distributed, as far as one process calls it."""

from __future__ import annotations

from judge import Call
from malformed import FLAG, MODULE, OPTIONAL_WORD, other_than, values
from module_calls import module
from torch.distributed.tensor import Replicate

import te_mx

PLACEMENT = other_than("None") | values(its_name="Replicate", in_a_list=lambda: [Replicate()])
STATE = other_than("a dict")
DISTRIBUTED = (
    Call(
        "te_mx.distributed.ModuleParallel", lambda d: te_mx.distributed.ModuleParallel,
        lambda d: {"mode": "column", "input_layouts": Replicate(), "output_layouts": Replicate(),
                   "use_local_output": True},
        {"mode": OPTIONAL_WORD, "input_layouts": PLACEMENT, "output_layouts": PLACEMENT,
         "use_local_output": FLAG},
    ),
    Call(
        "te_mx.distributed.join_halves", lambda d: te_mx.distributed.join_halves,
        lambda d: {"state": {"state": {}, "param_groups": []}},
        {"state": STATE | values(one_half=lambda: {"state.fc1_gate_weight.exp_avg": 0})},
        says={"state": "state|belong together"},
    ),
    Call(
        "te_mx.distributed.split_halves", lambda d: te_mx.distributed.split_halves,
        lambda d: {"model": module("LayerNormMLP", d), "state": {"state": {}, "param_groups": []}},
        {"model": MODULE, "state": STATE},
    ),
    *(
        Call(
            f"te_mx.{family}.set_tensor_parallel_group",
            lambda d, family=family: module(family, d).set_tensor_parallel_group,
            lambda d: {"tp_group": None},
            {"tp_group": other_than("None") | values(ranks=lambda: [0, 1], a_size=2)},
        )
        for family in te_mx.nn.__all__
    ),
)  # fmt: skip
