"""Residual streams of fused models that decode: the sum that a model takes next, x + layer(..), is
made by the product itself.

A frozen layer on few rows takes for x what a fused normalization read last in this thread, if that
could be added to the result. The kernel writes both, the result and the sum. The result is a tensor
as any other, but for this: added to that very x, it gives the sum that is there already, of the
same bits. It does so as long as neither x nor the result was changed since, which tensors count;
those of torch.inference_mode do not, and do without. A layer whose sums nobody takes stops making
them.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from te_mx._ops.linear import Added, Gate
from te_mx.autograd.few_rows import Ready
from te_mx.runtime.streams import current

UNUSED = "_unused_sums"  # of a layer: sums in a row that nobody took; of mx_module.TRANSIENT
_MOST_UNUSED = 2
_ADDS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


class _Here(threading.local):
    read: weakref.ref[Tensor] | None = None


_here = _Here()


def normalized_here(x: Tensor) -> None:
    """Note what a normalization reads."""
    _here.read = None if type(x) is not Tensor or x.is_inference() else weakref.ref(x)


class Addend(Tensor):
    """A result with the sum of it and a residual."""

    # x, versions of both, the sum, the stream that its memory belongs to, the layer.
    _sum: tuple[Tensor, tuple[int, int], Tensor, int, Any] | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Compiled code fuses sums by itself.
        if func in _ADDS and len(args) == 2 and not kwargs and not torch.compiler.is_compiling():
            for one, other in (args, args[::-1]):
                total = one._take(other) if type(one) is Addend else None
                if total is not None:
                    return total
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _take(self, other: Any) -> Tensor | None:
        """The sum with another tensor, if that is the one that was thought of."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._sum is None or other is not self._sum[0]:
                return None
            x, versions, total, on, layer = self._sum
            self._sum = None  # whoever adds again gets a sum of its own
            if versions != (x._version, self._version) or on != current(x.device):
                return None
            if torch.is_inference_mode_enabled() or (torch.is_grad_enabled() and x.requires_grad):
                return None
            layer.__dict__[UNUSED] = 0
            return total


def run(
    layer: Any, found: Ready, x: Tensor, bias: Tensor | None, dtype: torch.dtype, tag: int,
    gate: Gate | None = None,
) -> Tensor | None:  # fmt: skip
    """What a frozen layer makes of x, as Ready.run; perhaps with a sum."""
    residual = _residual(layer, found, (*x.shape[:-1], found.form.rows), dtype)
    if residual is None:
        return found.run(x, bias, dtype, tag, gate=gate)
    total = torch.empty_like(residual)
    y: Any = found.run(x, bias, dtype, tag, gate=gate, added=Added(residual, total))
    if y is None:
        return None
    layer.__dict__[UNUSED] = layer.__dict__.get(UNUSED, 0) + 1
    made = y.as_subclass(Addend)
    made._sum = residual, (residual._version, made._version), total, current(x.device), layer
    return made


def _residual(
    layer: Any, found: Ready, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """What may be added to a result of this shape next."""
    x = None if _here.read is None else _here.read()
    if x is None or not found.kernel.adds or layer.__dict__.get(UNUSED, 0) >= _MOST_UNUSED:
        return None
    if torch.is_inference_mode_enabled() or layer.return_bias:
        return None
    alike = x.shape == shape and x.dtype == dtype and x.device == found.form.codes.device
    if not alike or not x.is_contiguous() or (torch.is_grad_enabled() and x.requires_grad):
        return None
    return x
