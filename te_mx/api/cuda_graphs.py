"""te_mx.make_graphed_callables: torch's, for models with te_mx layers.

A CUDA graph replays kernels on addresses. Whatever Python decided while it was captured (recipes,
places of weight gradients) it decided for all replays, so here is kept what was decided, and a call
that would decide otherwise is refused."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from te_mx.context.region import active_region, autocast
from te_mx.nn.base import MXModule
from te_mx.recipe import resolve_recipe
from te_mx.recipes.settings import ByName
from te_mx.runtime.arguments import check_flag, check_size, shown

_NAME = "make_graphed_callables"
_OFF, _OUTSIDE = "te_mx off", "no te_mx.autocast region"


def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    *,
    recipe: Any = None,
) -> Any:
    """Capture forward and backward of modules or functions in CUDA graphs, and return what replays
    them: ``torch.cuda.make_graphed_callables``, where the first five arguments are explained, for
    models with te_mx layers. Small layers, which wait for the host, gain most.

    What was captured is what runs. So a call raises where the layers would run with another recipe
    than while they were captured, because of the region around it or of what `convert_model` bound
    since; of a function, where the region is another one. As torch's, modules are graphed in place.
    In another mode (train, eval) than while captured, a module runs without its graph, as ever.

    Weight gradients: a main_grad (fuse_wgrad_accumulation) is added to in every backward pass, or
    written where its parameter had overwrite_main_grad, and must stay where it is. Its values are
    the same after the capture as before. A ``.grad`` is the parameter's own memory, not the
    graph's, so that micro-batches add up. Results, and gradients of inputs, are the graph's memory:
    the next call overwrites them.

    The returned callables take ``is_first_microbatch`` besides the sampled arguments: True sets the
    main_grads of the callable to 0 before the call; False and None change nothing, because a graph
    quantizes weights in every call.

    Args:
        callables: a module or function, or a tuple of them, in the order in which they run.
        sample_args: a tuple of CUDA tensors for one callable, a tuple of such tuples for several.
            Other arguments: bind them first, e.g. with functools.partial.
        num_warmup_iters: 1 or more; DistributedDataParallel needs 11.
        allow_unused_input: taken as True where a module has fuse_wgrad_accumulation, whose
            weights get no gradient from autograd.
        pool: of memory, of another graph.
        recipe: capture inside ``te_mx.autocast(recipe=recipe)``; calls outside of regions run it
            too. None captures what is active, or bound, around this call.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value; a module has
            delay_wgrad_compute, whose backward_dw runs outside of graphs; or was graphed before.
        RuntimeError: there is no CUDA device; and what torch's function raises. Of a later call:
            it would run otherwise than what was captured.
    """
    several = isinstance(callables, tuple)
    functions = callables if several else (callables,)
    _check(functions, sample_args, several)
    num_warmup_iters = check_size("num_warmup_iters", num_warmup_iters, 1)
    check_flag("allow_unused_input", allow_unused_input)
    if pool is not None and not (isinstance(pool, tuple) and all(type(n) is int for n in pool)):
        raise TypeError(f"pool must be a handle such as graph.pool() returns, got {shown(pool)}")
    region: AbstractContextManager[Any] = nullcontext()
    if recipe is not None:
        region = autocast(recipe=resolve_recipe(recipe))
    if not torch.cuda.is_available():
        raise RuntimeError(f"{_NAME}: needs a CUDA device, and torch finds none")
    with region:
        captured = [_Captured(function, recipe is not None) for function in functions]
    places = [place for one in captured for place in one.places]
    unused = allow_unused_input or bool(places)
    before = [(place.main_grad, place.main_grad.clone()) for place in places]
    marks = [place.parameter for place in places if place.marked]
    marked = [parameter.grad_added_to_main_grad for parameter in marks]
    args = sample_args if several else (sample_args,)
    capture: Any = torch.cuda.make_graphed_callables  # of tuples, which its annotations do not say
    try:
        with region, _no_collection():
            made = capture(functions, args, num_warmup_iters, unused, pool)
    finally:  # warm-up runs on gradients without meaning
        with torch.no_grad():
            for main_grad, values in before:
                main_grad.copy_(values)
        for parameter, mark in zip(marks, marked, strict=True):
            parameter.grad_added_to_main_grad = mark
    replayed = tuple(_checked(*pair) for pair in zip(made, captured, strict=True))
    return replayed if several else replayed[0]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python collects cycles before, and none inside. Somebody's graph that is destroyed while
    another one is captured spoils the capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check(functions: tuple[Any, ...], sample_args: Any, several: bool) -> None:
    for function in functions:
        if not callable(function) or isinstance(function, type):
            raise TypeError(
                f"callables must be a module or function or a tuple of them, got {shown(function)}"
            )
        if isinstance(function, nn.Module) and hasattr(function.forward, _GRAPHED):
            raise ValueError(f"callables: a {type(function).__name__} was graphed before")
        for module in _mx_modules(function):
            if module.delay_wgrad_compute:
                raise ValueError(
                    f"{_NAME}: {module._label()} has delay_wgrad_compute=True, and what is left "
                    "for backward_dw is in no graph; build it without"
                )
    if not isinstance(sample_args, tuple) or (several and len(sample_args) != len(functions)):
        expected = f"a tuple of {len(functions)} tuples" if several else "a tuple"
        raise TypeError(f"sample_args must be {expected} of tensors, got {shown(sample_args)}")
    for args in sample_args if several else (sample_args,):
        if not isinstance(args, tuple):
            raise TypeError(f"sample_args must be a tuple of tuples, got {shown(args)} in it")
        for leaf in _leaves(args):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"sample_args must hold tensors only, got {shown(leaf)}; bind other arguments "
                    "first, e.g. with functools.partial"
                )


def _leaves(tree: Any) -> Iterator[Any]:
    """What is in nested tuples, lists and dicts."""
    if not isinstance(tree, tuple | list | dict):
        yield tree
        return
    for part in tree.values() if isinstance(tree, dict) else tree:
        yield from _leaves(part)


def _mx_modules(function: Any) -> list[MXModule]:
    modules = function.modules() if isinstance(function, nn.Module) else ()
    return [module for module in modules if isinstance(module, MXModule)]


class _Place(NamedTuple):
    """Where the graph puts the gradient of a parameter: its main_grad, as it was captured."""

    parameter: Any
    main_grad: Tensor
    overwrite: bool
    marked: bool  # has grad_added_to_main_grad, which a replay must set

    def moved(self) -> bool:
        main_grad = getattr(self.parameter, "main_grad", None)
        return (
            not isinstance(main_grad, Tensor)
            or main_grad.data_ptr() != self.main_grad.data_ptr()
            or getattr(self.parameter, "overwrite_main_grad", False) != self.overwrite
        )


class _Captured:
    """What Python decided for the replays of one callable.

    settings: of its te_mx modules, or of the region of a function. own: whether they belong to the
    graph, so that calls outside of regions run them."""

    def __init__(self, function: Any, own: bool) -> None:
        self.label = type(function).__name__ if isinstance(function, nn.Module) else shown(function)
        self.module = function if isinstance(function, nn.Module) else None
        self.training = self.module is not None and self.module.training
        self.modules = _mx_modules(function)
        self.settings, self.own = _settings_now(self.modules), own
        self.parameters = list(self.module.parameters()) if self.module is not None else []
        self.addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.places = _places(self.modules)

    def check(self) -> None:
        """Raise RuntimeError where a call would not do what was captured."""
        region = active_region()
        outside = region is None or region.outside
        now = _settings_now(self.modules)
        if now != self.settings and not (self.own and outside):
            there, here = next(
                pair for pair in zip(self.settings, now, strict=True) if pair[0] != pair[1]
            )
            raise RuntimeError(
                f"{_NAME}: {self.label} was captured with {_said(there)}, and this call would run "
                f"with {_said(here)}, but a CUDA graph replays what was captured: call it in such "
                "a region as it was captured in, or capture it again"
            )
        for parameter, address in zip(self.parameters, self.addresses, strict=True):
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"{_NAME}: a parameter {tuple(parameter.shape)} of {self.label} was moved "
                    "since it was captured, and its graph reads the old memory: capture it again"
                )
        for place in self.places:
            if place.moved():
                raise RuntimeError(
                    f"{_NAME}: main_grad or overwrite_main_grad of a parameter "
                    f"{tuple(place.parameter.shape)} of {self.label} was replaced since it was "
                    "captured, and its graph goes on as captured: write into the same main_grad "
                    "(main_grad.zero_()), or capture it again"
                )

    def start(self, first: bool | None) -> None:
        """Before a replay, whose backward pass runs no Python."""
        if first:
            zeroed = [place.main_grad for place in self.places if not place.overwrite]
            if zeroed:
                torch._foreach_zero_(zeroed)
        if torch.is_grad_enabled():
            for place in self.places:
                if place.marked:
                    place.parameter.grad_added_to_main_grad = True


def _places(modules: list[MXModule]) -> list[_Place]:
    found: dict[int, _Place] = {}
    for module in modules:
        if not module.fuse_wgrad_accumulation:
            continue
        for parameter in module.parameters(recurse=False):  # type: ignore[attr-defined]
            main_grad = getattr(parameter, "main_grad", None)
            if parameter.requires_grad and isinstance(main_grad, Tensor):
                found[id(parameter)] = _Place(
                    parameter, main_grad, getattr(parameter, "overwrite_main_grad", False),
                    hasattr(parameter, "grad_added_to_main_grad"),
                )  # fmt: skip
    return list(found.values())


def _settings_now(modules: list[MXModule]) -> tuple[Any, ...]:
    """What te_mx modules would run with here, or, without any, what region this is."""
    region = active_region()
    if region is None or region.outside:
        return tuple(module._bound for module in modules) or (_OUTSIDE,)
    if isinstance(region.settings, ByName):
        return tuple(module._settings() for module in modules) or (region.settings,)
    return tuple(region.settings for _ in modules) or (region.settings,)


def _said(settings: Any) -> str:
    return _OFF if settings is None else str(settings)


_GRAPHED = "_te_mx_graphed"


def _checked(made: Any, captured: _Captured) -> Any:
    """What torch made, with checks before each replay; a module keeps its identity."""
    module = captured.module
    replay: Callable[..., Any] = made if module is None else module.forward

    @functools.wraps(replay)
    def call(*args: Any, is_first_microbatch: "bool | None" = None, **kwargs: Any) -> Any:
        if module is not None and module.training != captured.training:
            if is_first_microbatch is not None:
                kwargs["is_first_microbatch"] = is_first_microbatch
            return replay(*args, **kwargs)
        if is_first_microbatch is not None:
            check_flag("is_first_microbatch", is_first_microbatch)
        captured.check()
        captured.start(is_first_microbatch)
        return replay(*args, **kwargs)

    call.__dict__[_GRAPHED] = True
    for parameter in captured.parameters:
        if parameter.requires_grad:
            _own_grad(parameter)
    if module is None:
        return call
    module.forward = call
    return module


def _own_grad(parameter: nn.Parameter) -> None:
    """Autograd would take the graph's gradient for ``.grad`` as it is, and the next backward pass
    overwrite it before it adds to it."""
    held = weakref.ref(parameter)

    @unserializable_hook
    def own(grad: "Tensor | None") -> "Tensor | None":
        leaf = held()
        fresh = grad is not None and leaf is not None and leaf.grad is None
        return grad.clone() if fresh else None  # type: ignore[union-attr]

    parameter.register_hook(own)
