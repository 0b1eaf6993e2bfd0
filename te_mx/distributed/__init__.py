"""te_mx on several ranks: tensor parallelism over DTensors or a process group, weights that FSDP2
gathers as codes, and weight gradients with a place or a time of their own under both.
docs/distributed.md says what works with what."""

import importlib
import sys
from typing import Any

from te_mx.weights.ranks import above

__all__ = [
    "ModuleParallel", "join_halves", "quantized_all_gather", "quantized_input_gather",
    "split_halves",
]  # fmt: skip
_WHERE = {
    "ModuleParallel": "styles",
    "join_halves": "halves",
    "split_halves": "halves",
    "quantized_all_gather": "fsdp",
    "quantized_input_gather": "tensor_parallel",
    # What the folders below call through weights/ranks.py.
    "run": "calls",
    "run_block": "split_block",
    "codes_of": "fsdp",
    "owners": "fsdp",
    "params_of": "fsdp",
    "attach": "fsdp",
    "join": "halves",
    "cut": "halves",
    "blank": "halves",
    "is_blank": "halves",
}


def __getattr__(name: str) -> Any:
    # torch.distributed.tensor takes seconds to import, and most who import te_mx never need it.
    if name in _WHERE:
        module = importlib.import_module(f"te_mx.distributed.{_WHERE[name]}")
        globals()[name] = getattr(module, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


above.distributed = sys.modules[__name__]
