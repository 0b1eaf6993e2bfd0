"""te_mx.autocast: which recipe is active, per thread and per asyncio task.

The state is one ContextVar holding a linked list of entered regions: an autocast object, which only
knows which regions are its own, can be re-entered, nested, and shared between threads and tasks.

Two other readers shape this file:

- ``torch.compile``. Dynamo can neither trace a ContextVar nor guard on one. It does guard on
  attributes of modules by reading them again before every call, so ``ambient`` below is a module
  attribute computed by the module's ``__getattr__``: the guard itself asks the ContextVar, and
  tells no region from a disabled one, because a bound recipe counts in the first only. Regions
  entered *inside* compiled code are kept in ``_traced``, a plain object whose changes Dynamo
  follows while it traces.
- Recomputation. It runs a forward inside the backward pass, after the region was left and, on
  GPUs, in another thread. ``torch.utils.checkpoint`` enters the region of the first forward again,
  see `install`; of other code that does such a thing nothing is known. A region therefore
  remembers the backward pass that it was entered in, and those outside do not count there.

torch.utils.checkpoint runs a function again inside the region that it ran in first, as it does
with torch.autocast: the first region of a process has it bind functions to theirs
(te_mx/torch_internals.py)."""

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from te_mx.recipe import Recipe, Settings, resolve_recipe
from te_mx.recipes.custom import settings_of, words_of
from te_mx.recipes.settings import ByName, Mixed, read
from te_mx.runtime.arguments import shown
from te_mx.torch_internals import bind_recomputed
from te_mx.torch_internals import pass_id as backward_pass_id

F = TypeVar("F", bound=Callable[..., Any])

is_tracing = torch.compiler.is_dynamo_compiling
at_exit: list[Callable[[], None]] = []  # called when a thread leaves a region


class Region:
    """One entered autocast region. `settings` is None where MXFP8 is off; `left` says that its code
    ended where another region was the innermost one, so that it counts no more. `outside` marks
    what stands for being in no region at all, for code that runs again what ran there.
    `first_run` is what the runs of such code share, see `first_run`."""

    __slots__ = ("backward_pass", "first_run", "left", "outside", "parent", "recipe", "settings")

    def __init__(
        self,
        settings: Settings | ByName | None,
        recipe: Recipe | None,
        parent: "Region | None",
        outside: bool = False,
        first_run: dict[int, Any] | None = None,
    ) -> None:
        self.settings = settings
        self.recipe = recipe
        self.parent = parent
        self.outside = outside
        self.backward_pass = backward_pass_id()
        self.first_run = first_run
        self.left = False


innermost: ContextVar[Region | None] = ContextVar("te_mx_autocast", default=None)


class _Traced:
    """Regions entered in code that Dynamo traces: (settings, outer) pairs, None outside."""

    def __init__(self) -> None:
        self.top: tuple[Settings | ByName | None, Any] | None = None


def active_region() -> Region | None:
    """The innermost region that was not left, in this thread or task."""
    region = innermost.get()
    while region is not None and region.left:
        region = region.parent
    return region


_traced = _Traced()
_this = sys.modules[__name__]
_UNKNOWN = "unknown"  # what is active in a forward that a backward pass runs outside of regions
_OFF = "off"  # a region where MXFP8 is off
_started = False  # whether a region was ever entered


def __getattr__(name: str) -> Any:
    # Read through the module object only, so that a Dynamo guard on it re-reads the ContextVar.
    if name == "ambient":
        region = active_region()
        if region is None:
            return _UNKNOWN if _started and backward_pass_id() != -1 else None
        return region.settings or (None if region.outside else _OFF)
    if name == "_words_traced":  # made when Dynamo reads it
        globals()[name] = torch.compiler.assume_constant_result(words_of)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def current_settings(
    certain: bool = True, bound: Settings | Mixed | None = None
) -> Settings | Mixed | ByName | None:
    """Settings of the innermost region, `bound` outside of every one; None when MXFP8 is off.
    Traceable by Dynamo.

    Raises:
        RuntimeError: a backward pass runs this forward, and there is no region. `certain` False
            takes that for MXFP8 being off.
    """
    if is_tracing() and _traced.top is not None:
        return _traced.top[0]
    settings = _this.ambient
    if settings is None:
        return bound
    if not isinstance(settings, str):
        return settings
    if certain and settings == _UNKNOWN:
        raise RuntimeError(f"te_mx: {RECOMPUTED}")
    return None


def resolved(
    settings: Settings | Mixed | ByName | None, names: tuple[str, ...], kind: str
) -> Settings | Mixed | None:
    """What a module of this kind ("linear", "grouped_linear"), whose weights have these names, runs
    with. Traceable by Dynamo."""
    if not isinstance(settings, ByName):
        return settings
    if not is_tracing():
        return settings_of(settings, names, kind)
    words: str = _this._words_traced(settings.key, names, kind)
    each = tuple([read(one) if one else None for one in words.split("\n")])
    return each[0] if len(each) == 1 else Mixed(each)


RECOMPUTED = (
    "a backward pass runs this forward, as recomputation does, outside of every te_mx.autocast "
    "region that it entered, so the recipe of the first forward is not known; enter te_mx.autocast "
    "inside the function that is recomputed (with enabled=False for high precision)"
)


def current_recipe() -> Recipe | None:
    """The recipe that is active in this thread or task, None where MXFP8 is off."""
    region = active_region()
    return None if region is None or region.recipe is None else region.recipe.__copy__()


@contextmanager
def entered_again(region: Region | None, first_run: dict[int, Any] | None = None) -> Iterator[None]:
    """A region like this one, or like none, whatever is entered and left inside."""
    outer = active_region()
    if region is None:
        again = Region(None, None, outer, outside=True, first_run=first_run)
    else:
        again = Region(region.settings, region.recipe, outer, region.outside, first_run)
    token = innermost.set(again)
    try:
        yield
    finally:
        innermost.reset(token)


def first_run() -> dict[int, Any] | None:
    """In a function that runs again in the backward pass (`install`): what its first run asked
    of weights, by their ids, which the others do not ask once more. It lives as long as the
    function. None in other code."""
    region = innermost.get()
    while region is not None and region.first_run is None:
        region = region.parent
    return None if region is None else region.first_run


def _start() -> None:
    """Before the first region."""
    global _started
    install()
    _started = True


# Called once each, when a region is entered or a bound recipe used next: what others have to say.
notices: list[Callable[[], None]] = []


def give_notices() -> None:
    while notices:
        notices.pop()()


def was_entered() -> bool:
    """Whether a region was ever entered, with MXFP8 on or off, or is in the code being traced."""
    return _started or _traced.top is not None


class autocast:
    """Run the te_mx modules inside in the formats of a recipe, MXFP8 by default.

    Context manager and decorator (of functions and of async functions); nestable and re-entrant,
    also through one and the same object; seen only by the thread or asyncio task that entered it.
    Without it the modules are plain high-precision layers, but those that a recipe was bound to by
    `te_mx.convert_model`: a region, enabled or not, wins over that recipe.

    The backward pass needs no autocast: the forward decided, also for what
    ``torch.utils.checkpoint`` runs again. Other code that recomputes enters it again itself, unless
    its layers have run with one recipe only. Together with ``torch.autocast`` the output dtype
    follows ``torch.autocast``, which says dtypes and nothing else: its ``enabled=False`` leaves
    layers quantized, that of te_mx.autocast does not.

    Under ``torch.compile`` enter it around the compiled call or inside the compiled function;
    there, construct it inside as well, as Dynamo enters none that was made outside.

    A generator that is closed elsewhere, by another thread or inside another region, leaves its
    own region and no other.

    Args:
        enabled: False turns quantization off inside, also in an enabled outer region; the recipe is
            not looked at then.
        calibrating: Transformer Engine's. True changes nothing: block scales follow the data of
            every call, and there is nothing to calibrate. A recipe in this place,
            ``autocast(True, recipe)``, is taken as the recipe.
        recipe: one of `te_mx.recipe` or its name there (`te_mx.recipe.NAMED`: "mxfp8", "mxfp4",
            "float8_block", ..), or Transformer Engine's; None means `te_mx.get_default_recipe()`.
            It counts as it is now: fields that are set later, also inside the region, change
            regions that are made after that.
        amax_reduction_group, _graph: Transformer Engine's, of no effect: no largest values are
            reduced over processes, and CUDA graphs need no preparation.

    Raises:
        TypeError: `enabled` or `calibrating` is no bool, `recipe` is no recipe, or what is
            decorated is no function or a generator function.
        ValueError: a name that no recipe has.
        NotImplementedError: a recipe that te_mx does not have.
    """

    __slots__ = ("_open", "_recipe", "_settings")

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        if enabled is not True and enabled is not False:
            raise TypeError(
                f"autocast: enabled must be a bool, got {shown(enabled)}; pass a recipe as "
                "autocast(recipe=...)"
            )
        if calibrating is not True and calibrating is not False:
            if recipe is not None:
                raise TypeError(
                    f"autocast: calibrating must be a bool, got {shown(calibrating)} beside "
                    f"recipe={shown(recipe)}; pass one recipe, as autocast(recipe=...)"
                )
            recipe = calibrating
        resolved = resolve_recipe(recipe) if enabled else None
        # A change of the recipe counts in regions that are made after it. Nobody has what a name
        # stands for, and `current_recipe` gives no one the region's own.
        own = recipe is None or type(recipe) is str or is_tracing()
        self._recipe = resolved if resolved is None or own else resolved.__copy__()
        self._settings = None if resolved is None else resolved.chosen
        self._open: list[Region] = []  # entered through this object and not left

    def __enter__(self) -> "autocast":
        if is_tracing():
            _traced.top = (self._settings, _traced.top)
        else:
            if not _started:
                _start()
            if notices:
                give_notices()
            region = Region(self._settings, self._recipe, innermost.get())
            self._open.append(region)
            innermost.set(region)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if is_tracing():
            top = _traced.top
            _traced.top = None if top is None else top[1]
            return
        for forget in at_exit:
            forget()
        region, opened = innermost.get(), self._open
        if region is not None and region in opened:
            innermost.set(region.parent)
            opened.remove(region)
        elif (left := self._entered_elsewhere(region)) in opened:
            opened.remove(left)

    def _entered_elsewhere(self, inside: Region | None) -> Region | None:
        """Leave a region that is not the innermost one here, as when a generator is closed or
        collected: it lies further out, or was entered in another thread or task."""
        region = inside
        while region is not None and region not in self._open:
            region = region.parent
        if region is None and len(self._open) == 1:
            region = self._open[0]
        if region is not None:
            region.left = True
        return region

    def __call__(self, fn: F) -> F:
        if not callable(fn) or isinstance(fn, type):
            raise TypeError(f"autocast decorates functions, got {shown(fn)}")
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(
                "autocast cannot decorate the generator function "
                f"{getattr(fn, '__qualname__', type(fn).__name__)}: its body would run after the "
                "region is left; use `with te_mx.autocast(...):` inside it"
            )
        # A fresh object per call: Dynamo enters only context managers made in the code it traces.
        enabled, recipe = self._settings is not None, self._recipe
        if asyncio.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with autocast(enabled, recipe=recipe):
                    return await fn(*args, **kwargs)

            return run_async  # type: ignore[return-value]

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with autocast(enabled, recipe=recipe):
                return fn(*args, **kwargs)

        return run  # type: ignore[return-value]

    def __repr__(self) -> str:
        return "autocast(enabled=False)" if self._recipe is None else f"autocast({self._recipe!r})"


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` under Transformer Engine's older name and argument names."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def output_dtype(x: Tensor) -> torch.dtype:
    """torch.autocast's dtype where that is on for the device of x, else the dtype of x."""
    kind = "cuda" if x.is_cuda else x.device.type
    if kind == "meta":  # torch.autocast does not know it
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def bound(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` in the region that is active now, or in none, whenever and wherever it runs."""
    region = active_region()
    first_run: dict[int, Any] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        with entered_again(region, first_run):
            return fn(*args, **kwargs)

    return run


def install() -> None:
    """Bind what torch.utils.checkpoint will run again from now on."""
    bind_recomputed(bound)
