"""How ranks share a layer, as DTensors or with a process group, and Transformer Engine's arguments
of the latter: tp_group, tp_size, parallel_mode, sequence_parallel and set_tensor_parallel_group.
Then parameters are what this rank has; te_mx/distributed/tensor_parallel.py runs the layer."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from te_mx.runtime.arguments import check_flag, check_size, is_one_of, shown

COLUMN, ROW, BOTH, EXPERTS = "column", "row", "both", "experts"
SIZES = {COLUMN: "out_features", ROW: "in_features", BOTH: "ffn_hidden_size"}  # that ranks share
NORM = ("layer_norm_weight", "layer_norm_bias")


def cut_of(mode: str, name: str, stacked: bool = False) -> int | None:
    """The dimension of a parameter that ranks share, None for one that each of them has. stacked:
    it is that of several groups, along dimension 0."""
    row = name.startswith("fc2_") if mode == BOTH else mode == ROW
    if name in NORM or (row and name.rpartition("_")[2].startswith("bias")):
        return None
    return 0 if mode == EXPERTS else int(row) + stacked


def biases_of_sum(names: Iterable[str], modes: Sequence[str]) -> tuple[str, ...]:
    """Of the parameters of a layer the biases of a sum over the ranks: one of them adds these."""
    return tuple(n for n in names if n not in NORM and None in [cut_of(m, n) for m in modes])


class Shared(NamedTuple):
    """How a layer is shared: column (out_features), row (in_features), or both, the two layers of
    LayerNormMLP; between how many ranks; whether tokens are sharded around it."""

    mode: str
    size: int
    sequence: bool


def shared(
    owner: str, mode: Any, tp_group: Any, tp_size: Any, sequence_parallel: Any
) -> Shared | None:
    """The arguments of a constructor, None for a layer of one rank. A group counts, not the size.

    Raises:
        TypeError, ValueError: one of a wrong type or value, by name.
    """
    if not is_one_of(mode, (None, COLUMN, ROW, BOTH)):
        raise ValueError(
            f'{owner}: parallel_mode must be "column", "row" or None, got {shown(mode)}'
        )
    check_flag(f"{owner}: sequence_parallel", sequence_parallel)
    size = check_size(f"{owner}: tp_size", tp_size, 1)
    check_group(owner, tp_group)
    if tp_group is not None:
        size = tp_group.size()
    return None if mode is None or size == 1 else Shared(mode, size, sequence_parallel)


def part(owner: str, how: Shared | None, mode: str, name: str, size: int) -> int:
    """What this rank has of a size that is shared in this mode, or all of it.

    Raises ValueError where ranks would have parts of different sizes."""
    ranks = ranks_of(how, mode)
    if size % ranks:
        raise ValueError(
            f"{owner}: {name}={size} must divide by tp_size={ranks}; pad it to "
            f"{-(-size // ranks) * ranks}"
        )
    return size // ranks


def ranks_of(how: Shared | None, mode: str) -> int:
    """How many ranks share what is shared in this mode."""
    return 1 if how is None or how.mode != mode else how.size


def check_group(owner: str, tp_group: Any) -> None:
    """Raise TypeError for what is no process group, and not None."""
    distributed = torch.distributed
    if tp_group is None:
        return
    if not (distributed.is_available() and isinstance(tp_group, distributed.ProcessGroup)):
        raise TypeError(f"{owner}: tp_group must be a process group or None, got {shown(tp_group)}")


class Marked:
    """Mixin in front of an nn.Module: `_mark` sets attributes of parameters that trainers read."""

    def _mark(self) -> None:
        """Set them on the parameters that are there."""

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        """nn.Module's. fully_shard calls it for every parameter when it has put one of its own in
        the place of it, which has none of the attributes."""
        handle = super().register_load_state_dict_post_hook(hook)  # type: ignore[misc]
        self._mark()
        return handle


class TensorParallelGroup(Marked):
    """Mixin of the modules, beside an nn.Module."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    tp_size: int = 1
    sequence_parallel: bool = False
    _shared: Shared | None = None
    _tp_group: Any = None  # no copy of the module has it
    _mode: str | None = None  # counts for one rank, too: marks are Transformer Engine's

    def _share(self, mode: str | None, how: Shared | None, tp_group: Any) -> None:
        """Called by a constructor, when the parameters are there."""
        self._mode = mode
        if how is not None:
            self._shared, self.tp_size, self.sequence_parallel = how, how.size, how.sequence
            self.__dict__["_tp_group"] = tp_group
        self._mark()

    def _mark(self) -> None:
        """Transformer Engine's attributes of parameters, which trainers read: whose gradients they
        sum over the group, and what each rank has a part of. New and copied ones have none."""
        self._mark_delayed()  # type: ignore[attr-defined]
        if self._mode is None:
            return
        parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        for name, parameter in parameters.items():
            if parameter is None:
                continue
            if (dim := cut_of(self._mode, name)) is None:
                parameter.sequence_parallel = self.sequence_parallel
            else:
                parameter.tensor_model_parallel, parameter.partition_dim = True, dim
                parameter.partition_stride = 1

    def _cut_of(self, name: str) -> int | None:
        """cut_of a parameter, None where one rank has the layer."""
        return None if self._shared is None else cut_of(self._shared.mode, name)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Share the layer with the ranks of this process group, as `tp_group` of the constructor.

        Raises:
            TypeError: it is no process group, and not None.
            ValueError: it has another number of ranks than the layer was built for, or the layer
                was built without a parallel mode.
        """
        label = self._label()  # type: ignore[attr-defined]
        check_group(label, tp_group)
        size = 1 if tp_group is None else tp_group.size()
        if size not in (1, self.tp_size) or (size == 1 and tp_group is not None and self._shared):
            raise ValueError(
                f"{label}: tp_group has {size} ranks, and the layer was built for {self.tp_size}; "
                "give the constructor its tp_size and parallel mode"
            )
        self.__dict__["_tp_group"] = tp_group
        self._mark()
