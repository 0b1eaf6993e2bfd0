"""te_mx::moe_align: slots sorted by expert and cut into blocks; dispatch/moe.py has the words."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx._ops import checks
from te_mx._ops.library import define, is_direct
from te_mx.dispatch import run
from te_mx.dispatch.moe import Align, capacity
from te_mx.dispatch.problem import Problem, place_of

_I32 = torch.int32
Aligned = tuple[Tensor, Tensor, Tensor]


def moe_align(p: Align) -> Aligned:
    """(sorted_token_ids, expert_ids, num_tokens_post_padded), int32."""
    return _run(*p) if is_direct(p.topk_ids, p.expert_map) else MOE_ALIGN(*p)


def _check(topk_ids: Tensor, block_m: int, experts: int, expert_map: Tensor | None) -> None:
    checks.one_device(topk_ids.device, ("expert_map",), (expert_map,))
    for name, ids in (("topk_ids", topk_ids), ("expert_map", expert_map)):
        if ids is not None and (ids.dtype != _I32 or ids.dim() != 1):
            raise ValueError(f"te_mx: {name} must be a vector of int32, got {ids.dtype}")
    if block_m < 1 or experts < 1 or (expert_map is not None and len(expert_map) != experts):
        raise ValueError(
            f"te_mx: blocks need a size and experts a number, of expert_map too, got {block_m} and "
            f"{experts}"
        )


def _run(topk_ids: Tensor, block_m: int, experts: int, expert_map: Tensor | None) -> Aligned:
    _check(topk_ids, block_m, experts, expert_map)
    ids = topk_ids.contiguous()
    local = None if expert_map is None else expert_map.contiguous()
    problem = Problem("moe_align", place_of(ids.device), m=len(ids), n=experts, k=block_m)
    return run.run(problem, Align(ids, block_m, experts, local))


def _fake(topk_ids: Tensor, block_m: int, experts: int, expert_map: Tensor | None) -> Aligned:
    _check(topk_ids, block_m, experts, expert_map)
    size = capacity(topk_ids.shape[0], block_m, experts)
    made = (topk_ids.new_empty(n, dtype=_I32) for n in (size, -(-size // block_m), 1))
    return tuple(made)  # type: ignore[return-value]


MOE_ALIGN = define(
    "moe_align(Tensor topk_ids, int block_m, int experts, Tensor? expert_map) -> "
    "(Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
