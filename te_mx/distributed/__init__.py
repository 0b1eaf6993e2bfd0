"""te_mx on several ranks: tensor parallelism over DTensors or a process group, weights that FSDP2
gathers as codes, and weight gradients with a place or a time of their own under both.
docs/distributed.md says what works with what.
"""

from __future__ import annotations

import importlib
from typing import Any

from te_mx.weights import ranks

__all__ = [
    "ModuleParallel",
    "join_halves",
    "quantized_all_gather",
    "quantized_input_gather",
    "split_halves",
]
_WHERE = {
    "ModuleParallel": "styles",
    "join_halves": "optimizer_halves",
    "split_halves": "optimizer_halves",
    "quantized_all_gather": "fsdp",
    "quantized_input_gather": "token_codes",
}


def __getattr__(name: str) -> Any:
    # torch.distributed.tensor takes seconds to import, and most who import te_mx never need it.
    if name in _WHERE:
        module = importlib.import_module(f"te_mx.distributed.{_WHERE[name]}")
        globals()[name] = getattr(module, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# What concerns other ranks imports torch.distributed.tensor, which whoever comes here has done.
def _run(module: Any, inp: Any, *args: Any) -> Any:
    from te_mx.distributed import calls

    ranks.above.run = calls.run  # an import statement in every call takes its time
    return calls.run(module, inp, *args)


def _owners(module: Any, weights: Any) -> list[Any]:
    from te_mx.distributed import fsdp

    return fsdp.owners(module, weights)


def _attach(module: Any) -> None:
    from te_mx.distributed import fsdp

    fsdp.attach(module)


def _block(block: Any, x: Any) -> tuple[Any, str]:
    from te_mx.distributed import split_block

    return split_block.run(block, x)


def _gathered(module: Any, settings: Any) -> tuple[dict[str, Any], Any]:
    from te_mx.distributed import on_codes

    found = on_codes.gathered(module, module._parameters, settings)
    return found["_gathered"], found["_ran_with"]


def _join(parts: Any) -> Any:
    from te_mx.distributed import halves

    return halves.join(parts)


def _blank(parts: Any) -> Any:
    from te_mx.distributed import halves

    return halves.blank(parts)


def _is_blank(tensor: Any) -> bool:
    from te_mx.distributed import halves

    return halves.is_blank(tensor)


def _cut(whole: Any, like: Any) -> list[Any]:
    from te_mx.distributed import halves

    return halves.cut(whole, like)


ranks.above.run = _run
ranks.above.owners = _owners
ranks.above.attach = _attach
ranks.above.block = _block
ranks.above.gathered = _gathered
ranks.above.join = _join
ranks.above.blank = _blank
ranks.above.is_blank = _is_blank
ranks.above.cut = _cut
