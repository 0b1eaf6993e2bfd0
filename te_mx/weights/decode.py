"""Few rows on weights that stand still: a kernel for few rows reads them as they lie, or keeps
them once more in a form of its own, from the first call on that it takes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import Operand, Stack
from te_mx._ops.library import is_unwatched
from te_mx._ops.linear import frozen_kernel
from te_mx.autograd.node import needs_gradient
from te_mx.dispatch.linear import FrozenCall, FrozenKernel, Gate
from te_mx.dispatch.problem import Problem, frozen_rows
from te_mx.layouts import ROWS
from te_mx.recipes.settings import Settings
from te_mx.runtime.kernel_log import LAST_RUN
from te_mx.runtime.streams import capturing

ANY_RULE = "rceil"  # stands where nothing is quantized


class DecodeWeight(NamedTuple):
    """The form of a weight, None where the kernel does not take its numbers, and what it was made
    of: objects, and numbers that count their changes."""

    weight: Operand | Stack | None
    made_of: tuple[Any, ...]

    def is_of(self, made_of: tuple[Any, ...]) -> bool:
        return len(made_of) == len(self.made_of) and all(
            new == old if type(new) is int else new is old
            for new, old in zip(made_of, self.made_of, strict=True)
        )


def state(*tensors: Tensor) -> tuple[Any, ...]:
    """Tensors with their version counters, as `made_of`; () for those that count no changes, and in
    code that is compiled, which can neither ask nor keep a form."""
    if torch.compiler.is_compiling() or any(t.is_inference() for t in tensors):
        return ()
    return *tensors, *(t._version for t in tensors)


class DecodeWeights:
    """The forms of the weights of one module, by key, and those that CUDA graphs read."""

    __slots__ = ("in_graphs", "made")

    def __init__(self) -> None:
        self.made: dict[str, DecodeWeight] = {}
        self.in_graphs: list[Operand | Stack] = []


class Weight(NamedTuple):
    """A weight [n, k] of a module that stands still, or those of groups (0: one weight). made_of:
    as of a DecodeWeight, () where changes would not be seen; given: the copy that other kernels
    would find; row: gives the rowwise one, layout "rows"."""

    forms: DecodeWeights
    key: str
    n: int
    k: int
    made_of: tuple[Any, ...]
    given: Operand | Stack
    row: Callable[[], Operand | Stack]
    groups: int = 0


def is_few(x: Tensor, k: int, groups: int = 0, many: bool = False) -> bool:
    """Whether a kernel for few rows may be asked for x [..., k]; not in a trace of any number of
    rows, which would be one of few alone. many: as of frozen_rows."""
    size = x.numel()
    return type(size) is int and 0 < size <= frozen_rows(groups, many) * k


def has_form(weight: Weight) -> bool:
    """Whether a form of a weight as it is now is there, or that the kernel does not take it."""
    form = weight.forms.made.get(weight.key)
    return form is not None and form.is_of(weight.made_of)


class DecodeCall(NamedTuple):
    """A kernel for few rows and the weight in its form."""

    problem: Problem
    kernel: FrozenKernel
    form: Operand | Stack

    @property
    def as_is(self) -> bool:
        """Whether the rows are multiplied as they are, not quantized."""
        return False

    def target(self, device: torch.device) -> None:
        """The kernel quantizes rows by itself."""

    def run(
        self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype, tag: int = -1,
        offs: Tensor | None = None, act: str | None = None, gate: Gate | None = None,
    ) -> Tensor | None:  # fmt: skip
        """act(x [..., k] @ w^T + bias) [..., n]; None where native code does not take it. offs:
        ends of the groups of rows; rows of no group become 0. gate: the kernel's."""
        call = FrozenCall(x, self.form, bias, out_dtype, offs, act, gate)
        made = self.kernel.plan(self.problem)(call)
        if made is None:
            return None
        if tag >= 0:
            LAST_RUN[tag] = made[1]
        return made[0]


def ready(
    x: Tensor, dtype: torch.dtype, weight: Weight, settings: Settings | None
) -> DecodeCall | None:
    """What multiplies as many rows as x has, in a dtype, with a weight; None where nothing does.
    settings: how the rows are quantized; None: not at all.

    The form is made outside of graph captures: a graph uses one that a warm-up call left."""
    if not weight.made_of:
        return None
    sizes, lhs, rule, precision = (weight.groups, weight.n, weight.k), "", ANY_RULE, "adaptive"
    if settings is not None:
        lhs, rule, precision = settings.x, settings.scale_rule, settings.precision
    rows, given = x.numel() // x.shape[-1], weight.given
    rhs = f"{given.format.name}@any" if given.layout is ROWS else given.spec
    specs = f"{lhs}@any" if lhs else "", rhs
    found = frozen_kernel((rows, dtype, x.device), sizes, specs, rule, precision)
    if found is None:
        return None
    form = _form(weight, found[1], x.device)
    return None if form is None else DecodeCall(*found, form)


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None, settings: Settings | None,
    out_dtype: torch.dtype, tag: int = -1, offs: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """x [..., k] -> [..., n] on a kernel for few rows, without autograd; None where none takes it.
    Arguments are those of `ready` and `DecodeCall.run`."""
    found = ready_for(x, weight, bias, settings, offs)
    return None if found is None else found.run(x, bias, out_dtype, tag, offs)


def ready_for(
    x: Tensor, weight: Weight, bias: Tensor | None, settings: Settings | None,
    offs: Tensor | None = None,
) -> DecodeCall | None:  # fmt: skip
    """As `ready`, None where autograd or a watcher wants to see the product."""
    many = settings is None or weight.given.layout.any_rows
    if not is_few(x, weight.k, weight.groups, many) or not is_unwatched(x, bias, offs):
        return None
    if needs_gradient(x, bias):
        return None
    return ready(x, x.dtype, weight, settings)


def _form(weight: Weight, kernel: FrozenKernel, device: torch.device) -> Operand | Stack | None:
    """The weight in the form of a kernel, None where it takes none of these numbers, and in a
    capture where there is none yet."""
    forms, capture = weight.forms, capturing(device)
    form = forms.made.get(weight.key)
    if form is None or not form.is_of(weight.made_of):
        reads = kernel.reads(weight.given.layout)
        if capture and not (reads and kernel.as_it_lies):
            return None
        with torch.inference_mode(False), torch.no_grad():  # it outlives the mode
            row = weight.given if reads else weight.row()
            form = DecodeWeight(kernel.form(row), weight.made_of)
        forms.made[weight.key] = form
        if device.type == "cuda" and not capture:  # other streams, and kernels that start early,
            torch.cuda.current_stream(device).synchronize()  # need not wait
    held = form.weight
    if capture and held is not None and all(held is not old for old in forms.in_graphs):
        forms.in_graphs.append(held)
    return held
