"""Every public callable of te_mx, as `Call`s: the table of the malformed calls.

A new callable is one entry here; test_table_is_complete.py fails without it.
"""

from __future__ import annotations

from distributed_calls import DISTRIBUTED
from format_calls import FORMATS
from function_calls import GEMMS, MX_TENSOR, PREPACK, QUANTIZE
from grouped_calls import GROUPED
from inspect_calls import INSPECTED
from judge import Call
from module_calls import MODULES
from moe_calls import MOE
from other_calls import EXPLAINED, MODELS, RECIPES, WORKSPACE

CALLS: tuple[Call, ...] = (
    QUANTIZE, PREPACK, *GEMMS, *GROUPED, *MX_TENSOR, *RECIPES, *EXPLAINED, *WORKSPACE, *MODELS,
    *INSPECTED, *MODULES, *FORMATS,
    *DISTRIBUTED, *MOE,
)  # fmt: skip
