"""Few rows on a weight that stands still: the weight is kept once more, in the form of a kernel for
few rows, from the first call on that this kernel takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.dispatch.problem import STREAM_ROWS as MOST
from te_mx.ops import Operand
from te_mx.ops.library import is_direct
from te_mx.ops.linear import frozen_kernel
from te_mx.recipes.settings import Settings
from te_mx.runtime.ran import LAST_RUN
from te_mx.runtime.streams import capturing

_ANY_RULE = "rceil"  # stands where nothing is quantized


class Form(NamedTuple):
    """The form of a weight, None where the kernel does not take its numbers, and what it was made
    of: objects, and numbers that count their changes."""

    weight: Operand | None
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


class Forms:
    """The forms of the weights of one module, by key, and those that CUDA graphs read."""

    __slots__ = ("in_graphs", "made")

    def __init__(self) -> None:
        self.made: dict[str, Form] = {}
        self.in_graphs: list[Operand] = []


class Weight(NamedTuple):
    """A weight [n, k] of a module that stands still, in format fmt. row: gives its rowwise copy,
    layout "rows"; made_of: as of a Form, () where changes of it would not be seen."""

    forms: Forms
    key: str
    n: int
    k: int
    fmt: str
    made_of: tuple[Any, ...]
    row: Callable[[], Operand]


def linear(
    x: Tensor, weight: Weight, bias_N: Tensor | None, settings: Settings | None,
    out_dtype: torch.dtype, tag: int = -1,
) -> Tensor | None:  # fmt: skip
    """x [..., k] -> [..., n] on a kernel for few rows, without autograd; None where none takes it.
    settings: how x is quantized; None: not at all.

    The form is made outside of graph captures: a graph uses one that a warm-up call left.
    """
    k, rows = weight.k, x.numel()
    if not 0 < rows <= MOST * k or not weight.made_of or not is_direct(x, bias_N):
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, bias_N)):
        return None
    if settings is None:
        found = frozen_kernel(x, weight.n, k, ("", weight.fmt), _ANY_RULE)
    else:
        found = frozen_kernel(x, weight.n, k, (settings.x, weight.fmt), settings.scale_rule)
    if found is None:
        return None
    problem, kernel = found
    forms, capture = weight.forms, capturing(x.device)
    form = forms.made.get(weight.key)
    if form is None or not form.is_of(weight.made_of):
        if capture:
            return None
        with torch.inference_mode(False), torch.no_grad():  # it outlives the mode
            form = Form(kernel.form(weight.row()), weight.made_of)
        forms.made[weight.key] = form
        if x.is_cuda:  # other streams, and kernels that start early, need not wait for it
            torch.cuda.current_stream(x.device).synchronize()
    if form.weight is None:
        return None
    if capture and all(form.weight is not old for old in forms.in_graphs):
        forms.in_graphs.append(form.weight)
    made = kernel.multiply(problem, x, form.weight, bias_N, out_dtype)
    if made is None:
        return None
    if tag >= 0:
        LAST_RUN[tag] = made[1]
    return made[0]
