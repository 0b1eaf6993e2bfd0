"""Every private name of torch that te_mx uses, and nothing else does: fifteen, each looked up here,
with what it is for and what te_mx does without it. All are there in PyTorch 2.11 to 2.15, where
te_mx is tested; `tests/project/test_torch_internals.py` takes each away in turn and trains.

What nn.Module keeps its parts in (``_parameters``, ``_modules``, ``_buffers``, its dicts of hooks)
and ``Tensor._version``, ``Tensor._base`` and ``torch._foreach_*`` are no internals in this sense:
torch's documentation names them, or subclasses have always read them."""

import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn


def _found(path: str, otherwise: Any) -> Any:
    """What has a name, "module:name"; without it `otherwise`."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return otherwise


# ------------------------------------------------------------------------------- backward passes
# The number of the backward pass that runs in this thread, -1 outside of one; and whether that pass
# will run a node. Without: input gradients are added by autograd, and main_grad and delayed weight
# gradients are refused (`knows_passes`). A forward that other code than torch.utils.checkpoint runs
# again in the backward pass counts as one outside of it: it has to enter te_mx.autocast itself.
_pass: Any = _found("torch._C:_current_graph_task_id", None)
pass_id: Callable[[], int] = _pass or (lambda: -1)
will_run: Any = _found("torch._C:_will_engine_execute_node", None)
knows_passes = _pass is not None and will_run is not None


# ------------------------------------------------------------------------ transforms of torch.func
# Which transform is active, None outside of all. Without: torch itself refuses autograd functions
# such as te_mx's under a transform, in words of its own, and every op goes by the dispatcher.
_transform: Any = _found("torch._C:_functorch.peek_interpreter_stack", None)
transform_level: Any = _transform or (lambda: "unknown")
transform: Any = _transform or (lambda: None)


# ---------------------------------------------------------------------- who watches the dispatcher
# The number of modes of __torch_dispatch__, and whether the profiler records. Without one: every op
# goes by the dispatcher, and torch's own functions stand between DTensors and ranks.
dispatch_modes: Callable[[], int] = _found("torch._C:_len_torch_dispatch_stack", lambda: 1)
profiling: Callable[[], bool] = partial(bool, 1)
if hasattr(torch.autograd.profiler, "_is_profiler_enabled"):
    # No function of Python, which would cost more than the look.
    profiling = partial(attrgetter("_is_profiler_enabled"), torch.autograd.profiler)


# ------------------------------------------------------------------------------------------ memory
# How many tensors and variables hold the storage at an address. Without: memory of the CPU comes
# from torch's allocator each time.
storage_uses: Callable[[int], int] = _found("torch._C:_storage_Use_Count", lambda _: 0)


# -------------------------------------------------------------------------------------------- CUDA
# The current stream of a device as an address, without an object of Python around it. Without: the
# public function.
raw_stream: Any = _found("torch._C:_cuda_getCurrentRawStream", None)


# ------------------------------------------------------------------------------------------- Python
def calling_frame(up: int) -> Any:
    """The frame `up` calls above the function that asks: whose code reads the weight of a layer
    that has none, saves a model, or looks for adapters. Without: None, and nobody is told."""
    frame = inspect.currentframe()
    for _ in range(up + 1):
        frame = None if frame is None else frame.f_back
    return frame


# ----------------------------------------------------------------------------------------- modules
# Whether hooks were registered for all modules. Without: as if, and no modules run as one.
hooked_everywhere: Callable[[], bool] = _found(
    "torch.nn.modules.module:_has_any_global_hook", lambda: True
)


# ----------------------------------------------------------------------- torch.utils.checkpoint
_BINDS = "_te_mx_binds"


def bind_recomputed(bound: Callable[[Any], Any]) -> None:
    """Have torch.utils.checkpoint run bound(f) from now on, wherever it would run f again. It has
    no hook for that, but both of its forms hand f to a class that every entry to them uses. Without
    these, as they are or if somebody changed them already: nothing; modules then go by what they
    ran with, see nn/base.py."""
    reentrant: Any = torch.utils.checkpoint.CheckpointFunction
    if _takes(reentrant, "forward", "ctx", "run_function"):
        forward = reentrant.forward

        @functools.wraps(forward)
        def bound_forward(ctx: Any, run_function: "Callable[..., Any]", *args: Any) -> Any:
            return forward(ctx, bound(run_function), *args)

        bound_forward.__dict__[_BINDS] = True
        reentrant.forward = staticmethod(bound_forward)

    frame: Any = _found("torch.utils.checkpoint:_CheckpointFrame", None)
    if _takes(frame, "__init__", "self", "recompute_fn"):
        init = frame.__init__

        @functools.wraps(init)
        def bound_init(
            self: Any, recompute_fn: "Callable[..., Any]", *args: Any, **kw: Any
        ) -> None:
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
def like(made: Any) -> Callable[[Tensor], Any]:
    """What makes more DTensors like one, each of what this rank has of it, without a history.
    Without: DTensor.from_local does, at 24 us a tensor in place of 2."""
    kind = type(made)
    spec = getattr(made, "_spec", None)
    if spec is not None:
        return lambda local: kind(local, spec, requires_grad=local.requires_grad)
    mesh, placements, shape, stride = made.device_mesh, made.placements, made.shape, made.stride()
    return lambda local: kind.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )


# ------------------------------------------------------------------------- data-parallel wrappers
# Modules that fully_shard or replicate wrapped. Without: it is as if there were some, which costs a
# look for each weight gradient; main_grad is looked for at what they lend, and quantized_all_gather
# finds no sharded weight, and both say so.
wrapped: Any = _found("torch.distributed._composable_state:_module_state_mapping", ("unknown",))


def fsdp_params() -> Iterator[tuple[Any, Any]]:
    """(what FSDP2 knows of a parameter, the group that it is reduced with) of every parameter of
    fully_shard and replicate. Without what their state has them in: as without `wrapped`."""
    for state in [ref() for ref in wrapped.values()] if isinstance(wrapped, Mapping) else ():
        for name, groups in () if state is None else vars(state).items():
            if name.startswith("_fsdp_param_group"):  # torch 2.11 has one, and no list
                for group in groups if isinstance(groups, list) else [groups]:
                    yield from () if group is None else ((one, group) for one in group.fsdp_params)


def gradient_hook(group: Any) -> Any:
    """The hook of set_all_reduce_hook, which sees the gradients that FSDP2 reduces. Without: there
    may be one, and main_grad and delayed gradients under fully_shard are refused."""
    return None if group is None else getattr(group, "_all_reduce_hook", group)


def running_ddp() -> Any:
    """The DistributedDataParallel that runs a forward now. Without: an error in a process group,
    for a weight gradient that goes to main_grad or is delayed."""
    kind = nn.parallel.DistributedDataParallel
    if (found := getattr(kind, "_active_ddp_module", kind)) is not kind:
        return found
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise NotImplementedError(
            "te_mx: this PyTorch does not say whether DistributedDataParallel runs a module, which "
            "fuse_wgrad_accumulation and delay_wgrad_compute must know in a process group; build "
            "the layer without both"
        )
    return None


# Makes a tensor of one's own class without memory. Without: quantized_all_gather is refused.
wrapper_of: Any = _found("torch:Tensor._make_wrapper_subclass", None)
