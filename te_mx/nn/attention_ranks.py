"""Attention that a process group shares, as in Transformer Engine: each rank has its share of the
heads. The linear layers around it hold their part of the weights (tensor_parallel_group.py);
attention itself needs no other rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_mx.arguments import check_flag
from te_mx.nn.tensor_parallel_group import BOTH, COLUMN, ROW, Shared, check_group, shared


def shared_layers(
    owner: str, set_parallel_mode: Any, tp_group: Any, tp_size: Any, sequence_parallel: Any
) -> tuple[Shared | None, dict[str, Any], dict[str, Any]]:
    """How a module is shared, and the arguments of the linear layers before attention and behind.

    Raises TypeError or ValueError for an argument of a wrong type or value, by name.
    """
    check_flag(f"{owner}: set_parallel_mode", set_parallel_mode)
    mode = BOTH if set_parallel_mode else None
    how = shared(owner, mode, tp_group, tp_size, sequence_parallel)
    if how is None:
        return None, {}, {}
    given = {"tp_group": tp_group, "tp_size": tp_size, "sequence_parallel": sequence_parallel}
    return how, given | {"parallel_mode": COLUMN}, given | {"parallel_mode": ROW}


def heads_of_rank(owner: str, ranks: int, heads: int, groups: int) -> tuple[int, int]:
    """What a rank has of the heads of q, and of k and v. Raises ValueError unless they divide."""
    for name, value in (("num_attention_heads", heads), ("num_gqa_groups", groups)):
        if value % ranks:
            raise ValueError(f"{owner}: {name}={value} must divide by tp_size={ranks}")
    return heads // ranks, groups // ranks


class SharedHeads:
    """Mixin of the modules, beside an nn.Module."""

    tp_size: int = 1

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Share the module, and all te_mx modules in it, with the ranks of this process group.

        Raises:
            TypeError: it is no process group, and not None.
            ValueError: it has another number of ranks than the module was built for.
        """
        assert isinstance(self, nn.Module)
        label = f"te_mx.{type(self).__name__}"
        check_group(label, tp_group)
        if tp_group is not None and tp_group.size() != self.tp_size:
            raise ValueError(
                f"{label}: tp_group has {tp_group.size()} ranks, and the module was built for "
                f"{self.tp_size}; give the constructor its tp_size and set_parallel_mode=True"
            )
        for child in self.children():
            if hasattr(child, "set_tensor_parallel_group"):
                child.set_tensor_parallel_group(tp_group)  # type: ignore[operator]


def check_slopes(owner: str, ranks: int, biased: str, slopes: torch.Tensor | None) -> None:
    """Raise ValueError for ALiBi whose slopes depend on which heads a rank has."""
    if biased == "alibi" and slopes is None and ranks > 1:
        raise ValueError(
            f"{owner}: which heads a rank has, it does not know: pass alibi_slopes, those of this "
            f"rank's heads, where tp_size={ranks}"
        )
