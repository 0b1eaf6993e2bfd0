"""Every private name of torch and of Python that te_mx uses, and nothing else does: each is looked
up here, with what it is for and what te_mx does without it. All are there in PyTorch 2.11 to
2.15, where te_mx is tested; `tests/project/test_torch_internals.py` takes each away in
turn and trains.

What nn.Module keeps its parts in (``_parameters``, ``_modules``, ``_buffers``, its dicts of hooks)
and ``Tensor._version``, ``Tensor._base`` and ``torch._foreach_*`` are no internals in this sense:
torch's documentation names them, or subclasses have always read them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

# ------------------------------------------------------------------------------- backward passes
# The number of the backward pass that runs in this thread, -1 outside of one; and whether that pass
# will run a node. Without: input gradients are added by autograd, and main_grad and delayed weight
# gradients are refused (`knows_passes`). A forward that other code than torch.utils.checkpoint runs
# again in the backward pass counts as one outside of it: it has to enter te_mx.autocast itself.
pass_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
will_run: Any = getattr(torch._C, "_will_engine_execute_node", None)
knows_passes = hasattr(torch._C, "_current_graph_task_id") and will_run is not None


# ------------------------------------------------------------------------ transforms of torch.func
# Which transform is active, None outside of all. Without: torch itself refuses autograd functions
# such as te_mx's under a transform, in words of its own, and every op goes by the dispatcher.
_functorch = getattr(torch._C, "_functorch", None)
transform_level: Any = getattr(_functorch, "peek_interpreter_stack", lambda: "unknown")
transform: Any = getattr(_functorch, "peek_interpreter_stack", lambda: None)


# ---------------------------------------------------------------------- who watches the dispatcher
# The number of modes of __torch_dispatch__, and whether the profiler records. Without one: every op
# goes by the dispatcher, and torch's own functions stand between DTensors and ranks.
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
profiling: Callable[[], bool]
if hasattr(torch.autograd.profiler, "_is_profiler_enabled"):
    # No function of Python, which would cost more than the look.
    profiling = partial(attrgetter("_is_profiler_enabled"), torch.autograd.profiler)
else:
    profiling = partial(bool, 1)


# ------------------------------------------------------------------------------------------ memory
# The address of the storage behind a tensor, how many tensors hold it, and how many of Python's
# variables. Without: memory of the CPU comes from torch's allocator each time.
storage_id: Callable[[Any], int]
if hasattr(torch.UntypedStorage, "_cdata"):
    storage_id = attrgetter("_cdata")
else:
    storage_id = lambda storage: StorageWeakRef(storage).cdata  # noqa: E731
storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)
references: Callable[[Any], int] = getattr(sys, "getrefcount", lambda _: 0)
# Whether references are counted so at all: where threads run without a lock they are not.
counts_references = not sysconfig.get_config_var("Py_GIL_DISABLED")


def moved_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The same memory in a storage that nobody has seen (torch 2.12); without: the same one."""
    if not hasattr(storage, "_swap_data_ptr_"):
        return storage
    made: Any = torch.UntypedStorage(0, device="cpu")
    made._swap_data_ptr_(storage)
    return made


# -------------------------------------------------------------------------------------------- CUDA
# The current stream of a device as an address, without an object of Python around it. Without: the
# public function.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


# ------------------------------------------------------------------------------------------- Python
def calling_frame(up: int) -> Any:
    """The frame `up` calls above the function that asks: whose code reads the weight of a layer
    that has none, saves a model, or looks for adapters. Without: None, and nobody is told."""
    frame = inspect.currentframe()
    for _ in range(up + 1):
        frame = None if frame is None else frame.f_back
    return frame


def closed_over(function: Any, name: str) -> Any:
    """What a function that another one made has of it: which functions of a style torch's
    distribute_module made a hook of. Without: None, and the hook counts as an unknown one."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None)
    return cells[names.index(name)].cell_contents if cells and name in names else None


# ----------------------------------------------------------------------------------------- modules
# Whether hooks were registered for all modules. Without: they may have been, and no modules run as
# one.
hooked_everywhere: Callable[[], bool] = getattr(
    nn.modules.module, "_has_any_global_hook", lambda: True
)


# ----------------------------------------------------------------------- torch.utils.checkpoint
_BINDS = "_te_mx_binds"


def bind_recomputed(bound: Callable[[Any], Any]) -> None:
    """Have torch.utils.checkpoint run bound(f) from now on, wherever it would run f again. It has
    no hook for that, but both of its forms hand f to a class that every entry to them uses. Without
    these, as they are or if somebody changed them already: nothing; modules then go by what they
    ran with, see nn/base.py."""
    from torch.utils import checkpoint

    reentrant = getattr(checkpoint, "CheckpointFunction", None)
    if _takes(reentrant, "forward", "ctx", "run_function"):
        forward = reentrant.forward  # type: ignore[union-attr]

        @functools.wraps(forward)
        def bound_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            return forward(ctx, bound(run_function), *args)

        bound_forward.__dict__[_BINDS] = True
        reentrant.forward = staticmethod(bound_forward)  # type: ignore[union-attr]

    frame: Any = getattr(checkpoint, "_CheckpointFrame", None)
    if _takes(frame, "__init__", "self", "recompute_fn"):
        init = frame.__init__

        @functools.wraps(init)
        def bound_init(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kw: Any) -> None:
            init(self, bound(recompute_fn), *args, **kw)

        bound_init.__dict__[_BINDS] = True
        frame.__init__ = bound_init


def _takes(owner: Any, method: str, *first: str) -> bool:
    """Whether owner has the method, its first arguments have these names, and it was not bound."""
    function = getattr(owner, method, None)
    return (
        inspect.isfunction(function)
        and not hasattr(function, _BINDS)
        and tuple(inspect.signature(function).parameters)[:2] == first
    )


# ------------------------------------------------------------------------------------------ DTensor
# What this rank has of a DTensor, itself and not a view, and the object that describes it. They are
# set on instances, so they are looked for when the first one is there.
def local_part(tensor: Any) -> Any:
    """What this rank has of a DTensor, without a history. Without: to_local()."""
    found = getattr(tensor, "_local_tensor", None)
    if found is not None:
        return found
    with torch.no_grad():
        return tensor.to_local()


def held_by(tensor: Any) -> Any:
    """The tensor that has the memory: of a DTensor what this rank has."""
    return getattr(tensor, "_local_tensor", tensor)


def description(tensor: Any) -> Any:
    """The object that describes a DTensor, the same one as long as it lies so; without, and of
    other tensors: one that is new every time, so that plans are made for each call."""
    return getattr(tensor, "_spec", None) or object()


def descriptions() -> tuple[Any, Any]:
    """The classes of that object and of its part for the whole tensor; without: (None, None), and
    torch's own functions stand between DTensors and ranks."""
    try:
        from torch.distributed.tensor import _dtensor_spec
    except ImportError:
        return None, None
    one = getattr(_dtensor_spec, "DTensorSpec", None)
    other = getattr(_dtensor_spec, "TensorMeta", None)
    return (None, None) if one is None or other is None else (one, other)


def functions_of_styles() -> dict[str, Any]:
    """What torch's styles have distribute_module call around layers: "column in", "column out",
    "row in" and "row out". Without: their hooks count as unknown ones, and blocks of layers on
    several ranks run layer by layer."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    found = {}
    for name, style in (("column", ColwiseParallel), ("row", RowwiseParallel)):
        found[f"{name} in"] = getattr(style, "_prepare_input_fn", None)
        found[f"{name} out"] = getattr(style, "_prepare_output_fn", None)
    return {name: function for name, function in found.items() if function is not None}


def functional_collectives() -> Any:
    """Collectives that torch.compile keeps in a graph.

    Raises:
        NotImplementedError: there are none, and so no layers of several ranks.
    """
    try:
        from torch.distributed import _functional_collectives
    except ImportError:
        raise NotImplementedError(
            "te_mx: layers between the ranks of a process group need collectives that this PyTorch "
            f"({torch.__version__}) does not have; give them no tp_group"
        ) from None
    return _functional_collectives


# ------------------------------------------------------------------------- data-parallel wrappers
try:
    from torch.distributed import _composable_state as _composable
except ImportError:
    _composable = None  # type: ignore[assignment]
# Modules that fully_shard or replicate wrapped. Without: it is as if there were some, which costs a
# look for each weight gradient; and quantized_all_gather finds no sharded weight, and says so.
wrapped: Any = getattr(_composable, "_module_state_mapping", ("unknown",))


def fsdp_params() -> Iterator[tuple[Any, Any, nn.Module, str]]:
    """(what FSDP2 knows of a parameter, the group that it is reduced with, its module, its name) of
    every parameter of fully_shard and replicate."""
    for state in [ref() for ref in getattr(wrapped, "values", tuple)()]:
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
        for group in (getattr(state, "_fsdp_param_group", None),) if groups is None else groups:
            for param in () if group is None else group.fsdp_params:
                info = getattr(param, "_module_info", None)
                if info is not None:
                    yield param, group, info.module, info.param_name


def module_of(param: Any) -> Any:
    """The module that has a parameter of FSDP2. Without: None."""
    return getattr(getattr(param, "_module_info", None), "module", None)


def size_of(param: Any) -> tuple[int, ...]:
    """The size of a parameter before fully_shard cut it, on this rank where tensor parallelism cut
    it too. Without: that of the whole parameter."""
    return tuple(getattr(param, "_orig_size", param.sharded_param.shape))


def gathered_parameter(param: Any) -> Any:
    """The parameter that fully_shard lends to a module for a forward, None before the first."""
    return getattr(param, "unsharded_param", None)


def gradient_hook(group: Any) -> Any:
    """The hook of set_all_reduce_hook, which sees the gradients that FSDP2 reduces."""
    return getattr(group, "_all_reduce_hook", None)


def is_managed(module: Any) -> bool:
    """Whether fully_shard or FullyShardedDataParallel swaps the parameters of a module, which both
    mark so; torch's replicate does not."""
    return getattr(module, "_is_fsdp_managed_module", False)


def running_ddp() -> Any:
    """The DistributedDataParallel that runs a forward now. Without: an error in a process group,
    for a weight gradient that goes to main_grad or is delayed."""
    kind = nn.parallel.DistributedDataParallel
    found = getattr(kind, "_active_ddp_module", kind)
    if found is not kind:
        return found
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise NotImplementedError(
            "te_mx: this PyTorch does not say whether DistributedDataParallel runs a module, which "
            "fuse_wgrad_accumulation and delay_wgrad_compute must know in a process group; build "
            "the layer without both"
        )
    return None


# What makes a tensor of a class of one's own without memory. Without: quantized_all_gather is
# refused.
wrapper_of: Any = getattr(Tensor, "_make_wrapper_subclass", None)
