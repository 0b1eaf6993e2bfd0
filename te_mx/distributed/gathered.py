"""A weight of which there are only codes and scales, as FSDP2 hands it to a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.torch_internals import wrapper_of

_aten = torch.ops.aten
# What FSDP2, nn.Parameter and DTensor do to make a parameter of it.
_SAME = {
    _aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view.default
}  # fmt: skip


class GatheredWeight(Tensor):
    """A weight [N, K] or [groups, N, K] that te_mx modules multiply with in MXFP8. Every other
    operation on it is an error: there are no values.

    Args:
        codes, scales: as `fmt` has them at rest, uint8 or what its scales are stored as.
        k: the last size.
        dtype: of the parameter, and so of its gradient.
        fmt: the name of the format.
    """

    codes: Tensor
    scales: Tensor
    fmt: str
    kept: tuple[Any, Any] | None = None  # what stands in for it under some settings, and these

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, k: int, dtype: torch.dtype, fmt: str) -> Any:
        shape = (*codes.shape[:-1], k)
        made: Any = wrapper_of(cls, shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made.fmt = codes, scales, fmt
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.shape[-1], self.dtype, self.fmt)

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["codes"], inner["scales"], *meta)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, {self.fmt})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = args[0]
        if func is _aten.cat.default and all(isinstance(part, GatheredWeight) for part in weight):
            return _joined(weight)
        if func is _aten.select.int and weight.dim() == 3 and args[1] == 0:
            codes, scales = weight.codes[args[2]], weight.scales[args[2]]
            return GatheredWeight(codes, scales, weight.shape[-1], weight.dtype, weight.fmt)
        if func in _SAME and isinstance(weight, GatheredWeight):
            return GatheredWeight(
                weight.codes, weight.scales, weight.shape[-1], weight.dtype, weight.fmt
            )
        raise NotImplementedError(
            f"{func} of a weight that fully_shard gathered as {_names(args)}: there are only its "
            "codes, which te_mx modules multiply with under te_mx.autocast; for its values use "
            "the sharded parameter (module.reshard(), then full_tensor())"
        )


def _joined(parts: list[GatheredWeight]) -> GatheredWeight:
    """One weight of the rows of several. Blocks run along k, and no part ends inside of one."""
    codes, scales = torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts])
    return GatheredWeight(codes, scales, parts[0].shape[-1], parts[0].dtype, parts[0].fmt)


def _names(args: Any) -> str:
    flat = [one for a in args for one in (a if isinstance(a, (list, tuple)) else [a])]
    return next((one.fmt for one in flat if isinstance(one, GatheredWeight)), "codes")
