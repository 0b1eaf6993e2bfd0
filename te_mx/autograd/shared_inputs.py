"""One quantized input for layers that read the same tensor: q, k and v, or gate and up, quantize it
once and keep one copy for backward.

An input is known by the very tensor object, its version and its memory, and so are views that are
all of it (a DTensor hands them out); a few of the last ones in
each thread are remembered, as long as somebody else holds them and a region lasts. In-place
operations on it, through views too, change its version. What is written through `.data`, which has
versions of its own, may be written at any later time: memory that was ever reached so is left out
(runtime/exposed.py). After a replay of a CUDA graph, which writes to tensors of its capture,
nothing of before counts (runtime/replays.py). A write that torch gives no version is not seen here
either: through NumPy, DLPack or a storage, by another library's kernel, by collectives in place.
But each weight is given an input once. One that comes back finds the tensor quantized anew: buffers
that are filled again for the next step, or that a pipeline receives in, are new to every step.

Operands are used on the stream that they were made on, and inside the CUDA graph capture that they
were made in. Compiled code needs nothing of this: there layers ask for the same op on the same
tensor, which is one op after common subexpressions are eliminated.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_mx._ops.library import is_direct
from te_mx.autograd.sibling_gradients import Siblings
from te_mx.dispatch.fused import Target
from te_mx.dispatch.linear import Held, LinearPlan
from te_mx.layouts.operand import Quantized
from te_mx.runtime import exposed, replays, streams

_PLAIN = (Tensor, torch.nn.Parameter)
_MOST = 2  # inputs that are remembered in a thread: a parallel block returns to its first one


class Entry:
    """An input and its operands: specs of the rowwise and the columnwise one ("" for none), their
    scale rule, and themselves in one of two forms. readers: addresses of the weights that had it.
    """

    __slots__ = (
        "_quantized", "address", "col", "held", "leaf", "place", "plan", "readers", "replays",
        "row", "rule", "siblings", "source", "version",
    )  # fmt: skip

    def __init__(self, x: Tensor, place: tuple[int, int], row: str, col: str, rule: str) -> None:
        self.version, self.address, self.place = x._version, x.data_ptr(), place
        self.replays = replays.count()
        self.row, self.col, self.rule = row, col, rule
        self.source: Callable[[], Tensor | None] = lambda: None  # a weak reference
        self.held: Held | None = None
        self.plan: LinearPlan | None = None
        self._quantized: Quantized | None = None
        self.leaf, self.siblings = x.is_leaf, Siblings()
        self.readers: list[int] = []

    def is_of(self, x: Tensor) -> bool:
        """Whether x is as it was."""
        return (
            self.version == x._version
            and self.address == x.data_ptr()
            and self.replays == replays.count()
            and not exposed.is_exposed(x)
            and self.place == _place(x)
        )

    def gives(self, row: str, col: str, rule: str) -> bool:
        """Whether this has what a layer asks for."""
        return row == self.row and rule == self.rule and (not col or col == self.col)

    def read_by(self, weight: Tensor) -> None:
        """Note a weight, if it has an address."""
        if type(weight) in _PLAIN:
            self.readers.append(weight.data_ptr())

    def was_read_by(self, weight: Tensor) -> bool:
        """Whether this was for a weight before."""
        return type(weight) in _PLAIN and weight.data_ptr() in self.readers

    def quantized(self) -> Quantized:
        """The operands."""
        if self._quantized is None:
            assert self.plan is not None and self.held is not None
            self._quantized = self.plan.quantized(self.held)
        return self._quantized

    def joined(self, x: Tensor, node: Any) -> Siblings:
        """The layers whose gradients of x, which this is of, add up, with a node among them."""
        if self.leaf != x.is_leaf:  # x.detach_() was called: gradients go elsewhere now
            self.leaf, self.siblings = x.is_leaf, Siblings()
        self.siblings.join(node)
        return self.siblings

    def for_one_call(self) -> Held:
        """The operands as a LinearPlan takes them."""
        if self.held is None:
            assert self._quantized is not None
            row, col, _ = self._quantized
            assert row is not None
            self.held = Held(
                (row.codes, row.scales), None if col is None else (col.codes, col.scales)
            )
        return self.held


class _Remembered(threading.local):
    def __init__(self) -> None:
        self.entries: list[Entry] = []


_here = _Remembered()
exposed.install()
replays.install()


def _place(x: Tensor) -> tuple[int, int] | None:
    """The stream and the capture that a call belongs to; None where the second is not known."""
    if not x.is_cuda:
        return 0, 0
    device = x.device
    capture = streams.capture(device)
    return None if capture is None else (streams.current(device), capture)


def entry_of(x: Tensor) -> Entry | None:
    """What is remembered of x, if it is still the same."""
    for entry in _here.entries:
        if entry.source() is x:
            if entry.is_of(x):
                return entry
            _here.entries.remove(entry)
            return None
    return None if x._base is None else _from_view(x)


def entry_for(x: Tensor, weight: Tensor, row: str, col: str, rule: str) -> Entry | None:
    """What is remembered of x for the layer of a weight that asks for this, and was not given it
    before."""
    entry = entry_of(x)
    if entry is None:
        return None
    if entry.was_read_by(weight):
        _here.entries.remove(entry)
        return None
    if not entry.gives(row, col, rule):
        return None
    entry.read_by(weight)
    return entry


def is_view_of_all(x: Tensor, source: Tensor) -> bool:
    """Whether x is another object for what `source` is: they have one version then."""
    memory = x._base
    return (
        memory is not None
        and (memory is source or memory is source._base)
        and x.data_ptr() == source.data_ptr()
        and x.shape == source.shape
        and x.stride() == source.stride()
        and x.dtype is source.dtype
        and not x.is_neg()
    )


def _from_view(x: Tensor) -> Entry | None:
    """An entry of x, from that of a tensor that x is all of."""
    for entry in _here.entries:
        source = entry.source()
        if source is not None and is_view_of_all(x, source) and entry.is_of(x):
            made = _remember(x, entry.row, entry.col, entry.rule)
            if made is not None:
                made.plan, made.held, made._quantized = entry.plan, entry.held, entry._quantized
                made.readers = entry.readers
            return made
    return None


def _remember(x: Tensor, row: str, col: str, rule: str) -> Entry | None:
    """A new entry in the place of the oldest one; None for a tensor that may change unseen."""
    if x.is_inference() or not is_direct(x) or exposed.is_exposed(x):
        return None
    place = _place(x)
    if place is None:
        return None
    entry, entries = Entry(x, place, row, col, rule), _here.entries

    # Not of the entry itself: one that holds its own callback would live as long as x.
    def gone(source: Any) -> None:
        entries[:] = [e for e in entries if e.source is not source]

    entry.source = weakref.ref(x, gone)
    entries[:] = [entry, *(e for e in entries[: _MOST - 1] if e.source() is not x)]
    return entry


def joined(x: Tensor, node: Any) -> Siblings | None:
    """The layers whose gradients of x add up, with this one among them."""
    if torch.compiler.is_compiling():
        return None
    entry = entry_of(x)
    return None if entry is None else entry.joined(x, node)


def put(x: Tensor, target: Target, made: Quantized, weight: Tensor | None = None) -> Entry | None:
    """Remember x [..., K] quantized as [M, K] to a target, for a weight if there is one yet."""
    if torch.compiler.is_compiling():
        return None
    entry = _remember(x, target.row, target.col, target.rule)
    if entry is not None:
        entry._quantized = made
        if weight is not None:
            entry.read_by(weight)
    return entry


def put_held(x: Tensor, weight: Tensor, plan: LinearPlan, rule: str, held: Held) -> None:
    """The same of operands that a plan made."""
    entry = _remember(x, plan.row, "" if held.x_col is None else plan.col, rule)
    if entry is not None:
        entry.plan, entry.held = plan, held._replace(w_col=None)
        entry.read_by(weight)


def find(x: Tensor, target: Target, weight: Tensor) -> Quantized | None:
    """x quantized to a target for the layer of a weight, if another one did that before."""
    # Who watches or traces the operators shall see that x is quantized.
    if torch.compiler.is_compiling() or not _here.entries or not is_direct(x):
        return None
    entry = entry_for(x, weight, target.row, target.col, target.rule)
    return None if entry is None else entry.quantized()


def forget() -> None:
    """Forget all inputs of this thread: a region is left."""
    if _here.entries:
        _here.entries.clear()
