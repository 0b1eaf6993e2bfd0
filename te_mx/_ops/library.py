"""The op library `te_mx` and the rule for calling an implementation without the dispatcher.

Ops are defined with torch.library.Library (schema, one implementation that picks the kernel, fake
kernel): a call costs 2.5 us where the custom_op decorator costs 10 us."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import has_torch_function
from torch.utils.flop_counter import register_flop_formula

from te_mx.torch_internals import dispatch_modes, profiling, transform_level

LIBRARY = torch.library.Library("te_mx", "FRAGMENT")

_compiling = torch.compiler.is_dynamo_compiling
_tracing = torch.jit.is_tracing
_NOTHING = (None,)  # which a mode alone would look at
_PLAIN = frozenset((Tensor, Parameter))


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any],
    sizes: Callable[[Any], tuple[int, int, int]] | None = None,
) -> Any:  # fmt: skip
    """Define te_mx::<schema> and return the callable overload, torch.ops.te_mx.<name>.default.

    `run` runs on tensors of every device and picks the kernel there, `fake` without data. sizes: of
    a product of these arguments m, n and k, for FlopCounterMode, which counts 2 m n k as of torch's
    own. Groups count all rows, whichever belong to one: shapes say no more."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # not differentiable
    torch.library.register_fake(f"te_mx::{name}", fake, lib=LIBRARY)
    made = getattr(torch.ops.te_mx, name)
    if sizes is not None:
        register_flop_formula(made)(lambda *args, **_: 2 * math.prod(sizes(args)))
    return made.default


def is_watched(modes: bool = True) -> bool:
    """Whether somebody watches the dispatcher: torch.compile, dispatch modes, transforms of
    functorch, jit tracing, the profiler; and, as modes says, function modes."""
    return (
        _compiling()
        or dispatch_modes() > 0
        or (modes and has_torch_function(_NOTHING))
        or transform_level() is not None
        or _tracing()
        or profiling()
    )


def is_direct(x: Tensor, *others: Tensor | None, modes: bool = True) -> bool:
    """Whether x, and others, may go straight to an implementation: plain CPU or CUDA tensors whose
    memory holds their values, and nobody who watches the dispatcher (modes: as of `is_watched`).

    Negative views (torch._neg_view, the imaginary part of a conjugate) do not hold their values:
    the dispatcher makes copies of them that do."""
    if is_watched(modes) or type(x) not in _PLAIN or not (x.is_cpu or x.is_cuda) or x.is_neg():
        return False
    for other in others:
        if other is not None and (type(other) not in _PLAIN or other.is_neg()):
            return False
    return True


def are_direct(x: Tensor, *others: Tensor | None) -> bool:
    """The same, and whether all are on one device."""
    if is_watched() or type(x) not in _PLAIN or not (x.is_cuda or x.is_cpu) or x.is_neg():
        return False
    device = x.device
    for other in others:
        if other is not None and (
            other.device != device or type(other) not in _PLAIN or other.is_neg()
        ):
            return False
    return True


def has_memory(x: Tensor) -> bool:
    """Whether a tensor is no shell of a transform that ended, which Function.apply takes off."""
    try:
        x.untyped_storage()
    except NotImplementedError:
        return False
    return True


def facts_of(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What says whether and how dense tensors are read, but who watches."""
    return tuple([
        None if t is None else (type(t), t.shape, t.dtype, t.device, t.requires_grad, t.is_neg())
        for t in tensors
    ])  # fmt: skip


# Function modes do not count: torch.set_default_device and `with torch.device(..)` set one, under
# which no product may have other bits.
is_unwatched = partial(is_direct, modes=False)
