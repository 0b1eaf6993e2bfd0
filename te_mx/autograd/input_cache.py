"""One quantized input for the layers that read one tensor: q, k and v of an attention quantize it
once and keep one copy for backward.

Whoever knows that several layers read a tensor opens the cache for it: a fused normalization
(te_mx/fusion/fused_norm.py), whose readers convert_model(fuse=True) found. Nothing else is cached.
The tensor is known by the object, its version and its memory, and so is a view that is all of it (a
DTensor hands one out). In-place operations on it, through views too, change its version; what is
written in between without a version, as through ``.data``, is not seen: that is why only tensors
that go from one known place to others are cached, and why the cache of a thread is empty again when
its region ends.

Operands are used on the stream that they were made on, and inside the CUDA graph capture that they
were made in. Compiled code needs nothing of this: there layers ask for the same op on the same
tensor, which is one op after common subexpressions are eliminated."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from te_mx._ops.library import is_direct
from te_mx.context import region
from te_mx.dispatch.fused import Target
from te_mx.dispatch.linear import Held, LinearPlan
from te_mx.layouts.operand import Quantized
from te_mx.runtime import streams
from te_mx.torch_internals import knows_passes, pass_id, will_run

_MOST = 2  # inputs that are cached in a thread: a parallel block returns to its first one


class Entry:
    """An input and its operands, once a reader asked for them: specs of the rowwise and the
    columnwise one ("" for none), their scale rule, and themselves in one of two forms. asked: the
    columnwise ones that readers took."""

    __slots__ = (
        "_quantized", "address", "asked", "col", "held", "leaf", "place", "plan", "row", "rule",
        "siblings", "source", "version",
    )  # fmt: skip

    def __init__(self, x: Tensor, place: tuple[int, int]) -> None:
        self.version, self.address, self.place = x._version, x.data_ptr(), place
        self.row = self.col = self.rule = ""
        self.source: Callable[[], Tensor | None] = lambda: None  # a weak reference
        self.held: Held | None = None
        self.plan: LinearPlan | None = None
        self._quantized: Quantized | None = None
        self.leaf, self.siblings = x.is_leaf, Siblings()
        self.asked: set[str] = set()

    def is_of(self, x: Tensor) -> bool:
        """Whether x is as it was."""
        return (
            self.version == x._version and self.address == x.data_ptr() and self.place == _place(x)
        )

    def gives(self, row: str, col: str, rule: str) -> bool:
        """Whether this has what a layer asks for."""
        return (
            (self._quantized is not None or self.held is not None)
            and row == self.row
            and rule == self.rule
            and (not col or col == self.col)
        )

    def fill(
        self, row: str, col: str, rule: str, made: Quantized | None,
        plan: LinearPlan | None = None, held: Held | None = None,
    ) -> None:  # fmt: skip
        """Keep what was made of x now, in the place of what was before."""
        self.row, self.col, self.rule = row, col, rule
        self._quantized, self.plan, self.held = made, plan, held

    def quantized(self) -> Quantized:
        """The operands."""
        if self._quantized is None:
            assert self.plan is not None and self.held is not None
            self._quantized = self.plan.quantized(self.held)
        return self._quantized

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


class _Cached(threading.local):
    def __init__(self) -> None:
        self.entries: list[Entry] = []


_here = _Cached()


def _place(x: Tensor) -> tuple[int, int] | None:
    """The stream and the capture that a call belongs to; None where the second is not known."""
    if not x.is_cuda:
        return 0, 0
    device = x.device
    capture = streams.capture(device)
    return None if capture is None else (streams.current(device), capture)


def is_open() -> bool:
    """Whether something is cached in this thread."""
    return bool(_here.entries)


def open_for(x: Tensor) -> Entry | None:
    """Begin to cache what readers of x make of it, in the place of the oldest entry; None for a
    tensor that is not cached: of torch.inference_mode, which has no versions, or watched by a mode,
    a transform or a compiler."""
    if torch.compiler.is_compiling() or x.is_inference() or not is_direct(x):
        return None
    place = _place(x)
    if place is None:
        return None
    entry, entries = Entry(x, place), _here.entries

    # Not of the entry itself: one that holds its own callback would live as long as x.
    def gone(source: Any) -> None:
        entries[:] = [e for e in entries if e.source is not source]

    entry.source = weakref.ref(x, gone)
    entries[:] = [entry, *(e for e in entries[: _MOST - 1] if e.source() is not x)]
    return entry


def entry_of(x: Tensor) -> Entry | None:
    """The entry of x, if x is still the same."""
    for entry in _here.entries:
        if entry.source() is x:
            if entry.is_of(x):
                return entry
            _here.entries.remove(entry)
            return None
    return None if x._base is None else _from_view(x)


def entry_for(x: Tensor, row: str, col: str, rule: str) -> Entry | None:
    """The entry of x where it has this."""
    if not _here.entries:
        return None
    entry = entry_of(x)
    if entry is None or not entry.gives(row, col, rule):
        return None
    if col:
        entry.asked.add(col)
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
            made = open_for(x)
            if made is not None:
                made.asked = entry.asked
                made.fill(
                    entry.row, entry.col, entry.rule, entry._quantized, entry.plan, entry.held
                )
            return made
    return None


def siblings_of(x: Tensor, node: Any) -> "Siblings | None":
    """The layers whose gradients of x add up with this one's; None where no siblings are known."""
    if not _here.entries or torch.compiler.is_compiling():
        return None
    entry = entry_of(x)
    if entry is None:
        return None
    if entry.leaf != x.is_leaf:  # x.detach_() was called: gradients go elsewhere now
        entry.leaf, entry.siblings = x.is_leaf, Siblings()
    entry.siblings.join(node)
    return entry.siblings


def put(x: Tensor, target: Target, made: Quantized) -> None:
    """x [..., K] was quantized as [M, K] to a target, for its readers if the cache is open."""
    if _here.entries and not torch.compiler.is_compiling():
        entry = entry_of(x)
        if entry is not None:
            entry.fill(target.row, target.col, target.rule, made)


def put_held(x: Tensor, plan: LinearPlan, rule: str, held: Held) -> None:
    """The same of operands that a plan made."""
    if not _here.entries:
        return
    entry = entry_of(x)
    if entry is not None:
        col = "" if held.x_col is None else plan.col
        entry.fill(plan.row, col, rule, None, plan, held)


def find(x: Tensor, target: Target) -> Quantized | None:
    """x quantized to a target, if another reader did that before."""
    # Who watches or traces the operators shall see that x is quantized.
    if not _here.entries or torch.compiler.is_compiling() or not is_direct(x):
        return None
    entry = entry_for(x, target.row, target.col, target.rule)
    return None if entry is None else entry.quantized()


def forget() -> None:
    """Forget all inputs of this thread: a region is left."""
    if _here.entries:
        _here.entries.clear()


region.at_exit.append(forget)


# ------------------------------------------------------------------------------ dgrad accumulation
# The input gradients of layers that read one tensor add up in their GEMMs: each adds to what the
# ones before left, and the last one of a backward pass gives the sum to autograd. Without this
# each writes a gradient of its own, and autograd adds them in a pass over memory for each.
# The sum is rounded to the dtype of the input after every GEMM, as autograd's is after every
# addition, but what is added is the fp32 sum of the GEMM. Which layers take part in a backward
# pass, the engine says (`torch.autograd.grad` may leave some out). A layer whose node has a hook,
# which would see what the node gives to autograd, is left out from then on.
class Pass:
    """One backward pass: how many layers are still to come, and the sum so far."""

    __slots__ = ("__weakref__", "left", "total")

    def __init__(self, left: int) -> None:
        self.left = left
        self.total: Tensor | None = None


class Siblings:
    """The nodes of layers that read one tensor and want its gradient. Passes over one graph may run
    at the same time, in other threads or one inside the other. One that an error ended is kept,
    with what it summed up, until the graph is gone."""

    __slots__ = ("_nodes", "_passes")

    def __init__(self) -> None:
        self._nodes: list[weakref.ref[Any]] = []
        self._passes: dict[int, Pass] = {}  # by their numbers, of which no two passes have the same

    def join(self, node: Any) -> None:
        """Called in the forward of a layer."""
        _watch_hooks(type(node))
        self._nodes = [*self._alive_but(None), weakref.ref(node)]

    def leave(self, node: Any) -> None:
        """No backward pass that begins later counts on this node."""
        self._nodes = self._alive_but(node)

    def enter(self) -> Pass | None:
        """Called once in the backward of each; None for a layer that is alone in the pass."""
        task = pass_id() if knows_passes else -1
        if len(self._nodes) < 2 or task == -1 or _apart.on:
            return None
        found = self._passes.get(task)
        if found is None:
            count = sum(_runs(ref()) for ref in self._nodes)
            if count < 2:
                return None
            found = self._passes[task] = Pass(count)
        found.left -= 1
        if not found.left:
            del self._passes[task]
        return found

    def _alive_but(self, node: Any) -> list[weakref.ref[Any]]:
        return [ref for ref in self._nodes if (held := ref()) is not None and held is not node]


def _runs(node: Any) -> bool:
    return node is not None and will_run(node)


class _Apart(threading.local):
    on = False


_apart = _Apart()


@contextmanager
def apart() -> Iterator[None]:
    """Gradients that get a history of their own do not add up here."""
    before, _apart.on = _apart.on, True
    try:
        yield
    finally:
        _apart.on = before


_watched: set[type] = set()


def _watch_hooks(node_class: Any) -> None:
    """Have nodes of an autograd function of te_mx leave their siblings when they get a hook, so
    that it sees the gradient of this layer alone, and may change it."""
    if node_class in _watched:
        return
    _watched.add(node_class)
    register = node_class.register_hook

    def register_hook(self: Any, hook: Any) -> Any:
        siblings = getattr(self, "siblings", None)
        if siblings is not None and pass_id() == -1:
            siblings.leave(self)
            self.siblings = None
        return register(self, hook)

    node_class.register_hook = register_hook


def entered(siblings: Siblings | None) -> Pass | None:
    """The pass that a layer is in with others, or None. Compiled autograd adds up by itself."""
    if siblings is None or torch.compiler.is_compiling():
        return None
    return siblings.enter()


def total(among: Pass | None) -> Tensor | None:
    """The sum of the layers before."""
    return None if among is None else among.total


def passed_on(among: Pass | None, dx: Tensor | None) -> Tensor | None:
    """What a layer gives to autograd for its input, of which dx is the sum so far."""
    if among is None:
        return dx
    if not among.left:
        among.total = None
        return dx
    among.total = dx
    return None


def settled(siblings: Siblings | None) -> Tensor | None:
    """The same for a layer that gets no gradient itself."""
    among = entered(siblings)
    return passed_on(among, total(among))
