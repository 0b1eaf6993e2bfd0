"""Residual streams of fused models that decode: the sum that a model takes next, x + layer(..), is
made by the product itself.

A frozen layer on few rows takes for x what a fused normalization read last in this thread, on this
stream, if that could be added to the result. The kernel writes both, the result and the sum. Where
the very next thing that anybody does with the result is to add it to that very x, the sum is there
already, of the same bits. Whatever else is done with it, be it to ask for its shape, makes it a
plain tensor for good: nobody reads or writes it in between. Nothing is given once x was changed,
which tensors count; those of torch.inference_mode do not, and do without, and so does memory that
was reached through ``.data`` (runtime/exposed.py), or that a replayed CUDA graph may have written.

Writes into x or the result that torch neither counts nor tells of are not seen: by functions of
extensions that are no operators of torch, and by legacy DLPack capsules. Collectives of a process
group are among them, so where there is one no sums are made; nor once torch.compile was called,
whose code takes the class of a tensor for what it is. A layer whose sums nobody takes stops making
them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import CompileContext

from te_mx._ops.library import is_direct
from te_mx._ops.linear import Added, Gate
from te_mx.autograd.backward import needs_gradient
from te_mx.autograd.few_rows import Ready, Weight, ready_for
from te_mx.recipes.settings import Settings
from te_mx.runtime import exposed, replays, streams

UNUSED = "_unused_sums"  # of a layer: sums in a row that nobody took; of mx_module.TRANSIENT
_MOST_UNUSED = 2
_ADDS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


class _Here(threading.local):
    x: weakref.ref[Tensor] | None = None  # what was normalized last
    place: tuple[int, int | None] = 0, 0


_here = _Here()


def normalized_here(x: Tensor) -> None:
    """Note what a normalization reads."""
    _here.x = None
    if is_direct(x) and not x.is_inference():
        _here.x, _here.place = weakref.ref(x), _place(x)


def _place(x: Tensor) -> tuple[int, int | None]:
    """The stream and the graph capture that a call belongs to."""
    return (streams.current(x.device), streams.capture(x.device)) if x.is_cuda else (0, 0)


class _Sum(NamedTuple):
    """x + y, as they were when it was made."""

    total: Tensor
    layer: Any
    x: Tensor
    states: tuple[Any, ...]

    @classmethod
    def of(cls, x: Tensor, y: Tensor, total: Tensor, layer: Any) -> _Sum:
        return cls(total, layer, x, _states(x, y))

    def is_of(self, x: Any, y: Tensor) -> bool:
        """Whether an addition now gives it, and nobody would tell it from another."""
        if x is not self.x or not is_direct(x, y) or torch.is_inference_mode_enabled():
            return False
        return not needs_gradient(x, y) and _states(x, y) == self.states


def _states(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    alike = [one for t in (x, y) for one in (t._version, t.data_ptr(), exposed.is_exposed(t))]
    return *alike, replays.count(), _place(x)


class Addend(Tensor):
    """A result with the sum of it and a residual, until it is asked for anything."""

    _sum: _Sum | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Compiled code fuses sums by itself, and holds on to the class that it found.
        if not torch.compiler.is_compiling() and CompileContext.try_get() is None:
            found = _settle((*args, *kwargs.values()))
            if func in _ADDS and len(args) == 2 and not kwargs:
                for y, made in found:
                    x = args[1] if y is args[0] else args[0]
                    if made is not None and made.is_of(x, y):
                        made.layer.__dict__[UNUSED] = 0
                        return made.total
            if found:  # plain by now
                return func(*args, **kwargs)
        if any(one is not cls for one in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _settle(given: Any) -> list[tuple[Tensor, _Sum | None]]:
    """Make plain tensors of all results in it; them, and the sums that they had."""
    found: list[tuple[Tensor, _Sum | None]] = []
    for one in given:
        if type(one) is Addend:
            # Whoever comes second, in another thread too, finds none.
            made = one.__dict__.pop("_sum", None)
            one.__class__ = Tensor  # type: ignore[assignment]
            found.append((one, made))
        elif isinstance(one, (list, tuple)):
            found += _settle(one)
        elif isinstance(one, dict):
            found += _settle(one.values())
    return found


def linear(
    layer: Any, x: Tensor, weight: Weight, bias: Tensor | None, settings: Settings | None,
    dtype: torch.dtype, tag: int,
) -> Tensor | None:  # fmt: skip
    """What a frozen layer makes of x, as few_rows.linear; perhaps with a sum."""
    found = ready_for(x, weight, bias, settings)
    return None if found is None else run(layer, found, x, bias, dtype, tag)


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
    if type(y) is not Tensor:
        return y
    layer.__dict__[UNUSED] = layer.__dict__.get(UNUSED, 0) + 1
    made = _Sum.of(residual, y, total, layer)
    y.__class__, y.__dict__["_sum"] = Addend, made
    return y


def _residual(
    layer: Any, found: Ready, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """What may be added to a result of this shape next."""
    x = None if _here.x is None else _here.x()
    if x is None or not found.kernel.adds or layer.__dict__.get(UNUSED, 0) >= _MOST_UNUSED:
        return None
    if torch.is_inference_mode_enabled() or layer.return_bias or _others():
        return None
    alike = x.shape == shape and x.dtype == dtype and x.device == found.form.codes.device
    if not alike or not x.is_contiguous() or not is_direct(x) or needs_gradient(x):
        return None
    place = _place(x)
    known = place == _here.place and place[1] is not None
    return x if known and not exposed.is_exposed(x) else None


def _others() -> bool:
    """Whether there may be somebody else who reads or writes results without asking them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    # The backends that torch.compile was called with; None is that of torch.compiler.disable.
    backends = getattr(dynamo, "cached_backends", {0: ""})
    return any(one is not None for one in list(backends.values()))
