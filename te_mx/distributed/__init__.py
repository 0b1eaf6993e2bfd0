"""te_mx on several ranks: tensor parallelism over DTensors or a process group, weights that FSDP2
gathers as codes, and weight gradients with a place or a time of their own under both.
docs/distributed.md says what works with what.
"""

from __future__ import annotations

import importlib
from typing import Any

from te_mx.nn import several_ranks

__all__ = ["ModuleParallel"]
_WHERE = {"ModuleParallel": "styles"}


def __getattr__(name: str) -> Any:
    # torch.distributed.tensor takes seconds to import, and most who import te_mx never need it.
    if name in _WHERE:
        module = importlib.import_module(f"te_mx.distributed.{_WHERE[name]}")
        globals()[name] = getattr(module, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _run(module: Any, inp: Any, *args: Any) -> Any:
    from te_mx.distributed import tensor_parallel  # whoever comes here has DTensor imported

    return tensor_parallel.run(module, inp, *args)


several_ranks.above.run = _run
