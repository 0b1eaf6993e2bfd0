"""What the modules that run in MXFP8 share: settings of a forward, kept weights, names, checks and
checkpoints.

reset_parameters() of the modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from te_mx._ops import capturing
from te_mx.autograd import node
from te_mx.autograd.grad_target import (
    Label,
    OwnedGradient,
    Queue,
    Start,
    WeightGradient,
    started,
)
from te_mx.autograd.node import differentiable
from te_mx.context import region as context
from te_mx.context.region import (
    RECOMPUTED,
    active_region,
    backward_pass_id,
    innermost,
    is_tracing,
)
from te_mx.nn import converted
from te_mx.nn.checks import Checked
from te_mx.nn.tensor_parallel import TensorParallelGroup
from te_mx.recipes.settings import Settings
from te_mx.runtime.arguments import check_flag
from te_mx.runtime.ran import new_tags
from te_mx.weights import gradients
from te_mx.weights.frozen import Freezable, lies
from te_mx.weights.gradients import DelayedWgrad
from te_mx.weights.missing import check_saved
from te_mx.weights.ranks import SeveralRanks
from te_mx.weights.state_dict import load_module, save_codes

# Whether modules made here keep a copy of what their weights start with: see
# te_mx.pytorch.quantized_model_init.
preserves: ContextVar[bool] = ContextVar("te_mx_preserves_init", default=False)


def get_high_precision_init_val(parameter: Any) -> Tensor | None:
    """What a weight started with, on the CPU; None once that was cleared."""
    return getattr(parameter, "_high_precision_init_val", None)


def clear_high_precision_init_val(parameter: Any) -> None:
    """Give the memory of that copy back."""
    parameter.__dict__.pop("_high_precision_init_val", None)


def _preserve(parameter: Any) -> None:
    parameter._high_precision_init_val = parameter.detach().to("cpu", copy=True)
    for function in (get_high_precision_init_val, clear_high_precision_init_val):
        setattr(parameter, function.__name__, MethodType(function, parameter))


class Resettable:
    """Mixin of the modules, beside an nn.Module: initial values, also for parameters on the meta
    device."""

    _building: bool = False  # in the constructor, which leaves the meta device alone
    _preserves: bool = False  # copies of what weights start with

    def _initialize(self) -> None:
        """Write the initial values."""
        raise NotImplementedError

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Give the parameters their initial values again.

        Parameters on the meta device are made real first, as in Transformer Engine: on torch's
        default device, as new nn.Parameters. ``to_empty(device=...)`` before it, as for layers of
        torch, puts them on another one. Where meta is the default device they stay there.

        Args:
            defer_init: Transformer Engine's: True changes nothing.

        Raises:
            TypeError: `defer_init` is no bool.
            RuntimeError: the module is frozen without its high-precision weights.
        """
        assert isinstance(self, nn.Module)
        module: Any = self
        check_flag("reset_parameters: defer_init", defer_init)
        self._note_preserving()
        if defer_init or (self._building and _on_meta(self)):
            return
        if module._is_dropped():
            raise RuntimeError(
                f"{module._label()}: frozen without its high-precision weights, there is nothing "
                "to reset; call te_mx.unfreeze_weights(model, dequantize=True) first"
            )
        _make_real(self)
        self._initialize()
        self._preserve_weights()
        # What was kept of the weights before is old now.
        self.__dict__.pop("_microbatch", None)
        if module._frozen is not None:
            module._frozen.kept.clear()

    def _finish_building(self) -> None:
        """The end of a constructor: parameters on the meta device have no values yet."""
        assert isinstance(self, nn.Module)
        self._note_preserving()
        if not _on_meta(self):
            self.reset_parameters()

    def _preserve_weights(self) -> None:
        module: Any = self
        for parameter in module._parameters.values() if self._preserves else ():
            # Norms and biases are not quantized.
            if parameter is not None and parameter.dim() > 1 and not parameter.is_meta:
                _preserve(parameter)

    def _note_preserving(self) -> None:
        if preserves.get():
            self._preserves = True


def _on_meta(module: nn.Module) -> bool:
    return any(p is not None and p.is_meta for p in module._parameters.values())


def _make_real(module: nn.Module) -> None:
    device = torch.get_default_device()
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta and device.type != "meta":
            made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)  # marks such as skip_backward_post_hook
            module._parameters[name] = made


NEVER: Any = object()
TRANSIENT = (
    "_seen",
    "_ran",
    "_microbatch",
    "_tag",
    "_delayed",
    "_tp_group",
    "_gathered_with",
)  # what a copy starts without


class MXModule(Resettable, Freezable, DelayedWgrad, SeveralRanks, TensorParallelGroup, Checked):
    """Mixin of the modules, beside an nn.Module."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    name: str | None = None
    fuse_wgrad_accumulation: bool = False
    _converted: bool = False  # made by convert_model
    _seen: Settings | None = NEVER  # what the last forward ran with
    _ran: Set[Settings | None] = frozenset()  # what forwards ran with, in any thread
    _tag: int = -1  # first slot in te_mx.runtime.ran.LAST_RUN, three for each linear step
    _microbatch: dict[str, Any] | None = None  # weights kept for micro-batches, by key

    # --------------------------------------------------------------------------- running a forward
    def _held(self, *names: str) -> tuple[Any, ...]:
        """Parameters by name, without nn.Module's slow look-up where they are plain."""
        parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        held = []
        for name in names:
            held.append(parameters[name] if name in parameters else getattr(self, name))
        return tuple(held)

    def _weight_and_bias(self) -> tuple[Any, Any]:
        """The whole of both, of a layer with one weight; as `_held` where it is not split."""
        layer: Any = self
        if layer._split is not None:
            return layer.whole_weight(), layer.whole_bias()
        parameters = layer._parameters
        if "weight" in parameters and "bias" in parameters:
            return parameters["weight"], parameters["bias"]
        return layer.weight, layer.bias

    def _settings(self) -> Settings | None:
        """Settings that a forward runs with: those of te_mx.autocast, outside of it those that were
        bound; None in high precision."""
        if self._ran_with is not None:
            return self._ran_with
        tracing = is_tracing()
        settings = context.current_settings(bound=self._bound) if tracing else self._settings_now()
        if settings is None:
            if self._frozen is not None and self._frozen.dropped:
                return self._frozen.settings  # there is no high-precision weight to run on
            if self._converted and self.training and torch.is_grad_enabled():  # type: ignore[attr-defined]
                warn = converted.warn_plain_traced if tracing else converted.warn_plain
                warn(self.name)
        elif self._frozen is not None:
            try:
                settings = self._frozen.inside(settings)
            except ValueError as error:
                raise ValueError(f"{self._label()}: {error}") from None
        return settings

    def _settings_now(self) -> Settings | None:
        """Settings of the active region, or those that were bound.

        Inside a backward pass, which runs a forward to recompute it, only regions that were entered
        in this same pass count: torch.utils.checkpoint enters that of the first forward. For other
        code that recomputes, all forwards must have run with the same settings.

        Raises:
            RuntimeError: they have not.
        """
        region = innermost.get()
        if region is not None and region.left:
            region = active_region()
        settings = self._bound if region is None or region.outside else region.settings
        running = backward_pass_id()
        if running != -1 and (region is None or region.backward_pass != running):
            if len(self._ran) == 1:
                return next(iter(self._ran))
            if self._ran:
                raise RuntimeError(f"{self._label()}: {RECOMPUTED}")
            settings = context.current_settings(bound=self._bound)
        if settings is not self._seen:
            # Threads may share a module: each adds first. nn.Module.__setattr__ is slow.
            self.__dict__.setdefault("_ran", set()).add(settings)
            self.__dict__["_seen"] = settings
        if settings is not None:
            if context.notices:
                context.give_notices()
            if torch.jit.is_tracing() and torch.is_grad_enabled():
                self._refuse_jit_trace()
        return settings

    def _tag_now(self) -> int:
        """The first slot of this module; compiled code records nothing."""
        if is_tracing():
            return -1
        if self._tag < 0:
            self.__dict__["_tag"] = new_tags(self)
        return self._tag

    def _keeps(self, first: bool | None) -> bool:
        """Whether there may be something that stands in for a weight."""
        return self._frozen is not None or first is not None or self._gathered is not None

    def _kept_weight(
        self, key: str, first: bool | None, settings: Settings, device: torch.device, need_dx: bool
    ) -> Any:
        """What stands in for a weight: what is kept of a frozen one or for the micro-batches of a
        step, or made now and kept; None where this call quantizes.

        A CUDA graph is replayed on later weights: only frozen ones may be older than it. Neither it
        nor compiled code keeps anything between its calls, and compiled code cannot look here
        whether a frozen weight changed: ops of its graph do (weights/traced.py).
        """
        if self._gathered is not None:
            return self._gathered[key]
        frozen, tracing = self._frozen, is_tracing()
        if first is not None and type(first) is not bool:
            check_flag(f"{self._label()}: is_first_microbatch", first)
        if (tracing and frozen is not None) or (frozen is None and first is None):
            return None
        capture = not tracing and capturing(device)
        keep = not (tracing or capture)
        if frozen is None:
            kept = None if first or capture else (self._microbatch or {}).get(key)
        else:
            kept, follows = frozen.current(key, self)
            keep = keep and follows
        if kept is not None and kept.serves(settings, device, need_dx):
            if tracing:
                return kept
            if capture and frozen is not None and all(kept is not old for old in frozen.in_graphs):
                frozen.in_graphs.append(kept)
            return kept.on_current_stream()
        if not keep:
            return None
        made = self._make_kept(key, settings, need_dx)
        if frozen is None:
            self.__dict__["_microbatch"] = {**(self._microbatch or {}), key: made}
        else:
            frozen.kept[key] = made
        return made

    # ------------------------------------------------- weight gradients with a place of their own
    def _routed(self) -> bool:
        """Whether weight gradients do not simply go back to autograd."""
        return self.fuse_wgrad_accumulation or self.delay_wgrad_compute

    def _sink(
        self, parameters: Sequence[Tensor], first: bool | None, queue: Queue | None
    ) -> WeightGradient | None:
        """The place of the gradient of one weight in this call; None when there will be none."""
        fuse = self.fuse_wgrad_accumulation
        again = context.first_run() if fuse and first is True else None
        trains = len(parameters) == 1 and parameters[0].requires_grad
        if not (torch.is_grad_enabled() and (trains or any(p.requires_grad for p in parameters))):
            if again is not None:  # a reentrant checkpoint, which runs this again with gradients
                self._started(parameters, again)
            return None
        if node.active():
            node.refuse(self._label(), parameters)
        owners = gradients.owners_of(self, parameters)
        if self.delay_wgrad_compute and not all(p.is_leaf for p in parameters):
            raise RuntimeError(
                f"{self._label()}: delay_wgrad_compute=True needs weights that are parameters, but "
                "something computes one (a parametrization, functional_call); build the module "
                "without delay_wgrad_compute"
            )
        starts: Sequence[Start | None] = ()
        if fuse and first is True:
            owned: Sequence[Tensor] = [owner.parameter for owner in owners] or parameters
            starts = self._started(owned, again)
        label = Label(self)
        if owners:
            return OwnedGradient(parameters, owners, label, fuse, starts, queue)
        if gradients.is_replicated():
            return gradients.replicated(self, parameters, label, starts, queue)
        return WeightGradient(parameters, label, fuse, starts, queue)

    def _started(
        self, parameters: Sequence[Tensor], again: dict[int, Start] | None
    ) -> list[Start | None]:
        return [started(p, again) for p in parameters if p.requires_grad]

    # ------------------------------------------------------------------- transforms and tracers
    def _refuse_transforms(self, inp: Tensor) -> None:
        """Called where transforms are active: refuses those that concern this call."""
        held = itertools.chain(self.parameters(), self.buffers())  # type: ignore[attr-defined]
        node.refuse(self._label(), (inp, *held))

    def _transformed(self, inp: Tensor, **given: Any) -> Any:
        """Called where transforms are active: the result of a forward with these arguments under
        one level of torch.func's gradients, None where no transform concerns this call. Others are
        refused, and so are weight gradients with a place of their own, and computed weights."""
        module: Any = self
        names = [name for name, held in module._parameters.items() if held is not None]
        tensors = (inp, *(module._parameters[name] for name in names))
        plain = not self._routed() and not module._modules and not self._is_dropped()
        if not (plain and node.one_gradient() and torch.is_grad_enabled()):
            self._refuse_transforms(inp)
            return None
        if not any(node.requires_grad(tensor) for tensor in tensors):
            return None

        self._tag_now()

        def run(inp: Tensor, *leaves: Tensor) -> Any:
            # A copy without a forward of its own: others may call the module meanwhile.
            copy = module.__class__.__new__(module.__class__)
            held = {**module._parameters, **dict(zip(names, leaves, strict=True))}
            copy.__dict__.update(module.__dict__, _parameters=held)
            return type(module).forward(copy, inp, **given)

        return differentiable(self._label(), run, tensors)

    def _refuse_jit_trace(self) -> None:
        """Raise NotImplementedError where torch.jit.trace would lose gradients: it records ops, and
        those of te_mx have none."""
        if any(p.requires_grad for p in self.parameters()):  # type: ignore[attr-defined]
            raise NotImplementedError(
                f"{self._label()}: torch.jit.trace records no gradients of quantized layers; trace "
                "under torch.no_grad(), for inference, or inside te_mx.autocast(enabled=False)"
            )

    def _as_leaf(self, inp: Proxy, *args: Any, **given: Any) -> Proxy:
        """A call of this module in the graph that torch.fx is making. What a forward does depends
        on the region that it runs in, so no graph holds its steps."""
        path = inp.tracer.path_of_module(self)  # type: ignore[attr-defined]
        if not path:
            raise TypeError(
                f"{self._label()}: torch.fx cannot trace the layer itself, which is a leaf of its "
                "graphs; trace a module that holds it"
            )
        kwargs = {k: v for k, v in given.items() if v is not None and v is not False}
        return inp.tracer.create_proxy("call_module", path, (inp, *args), kwargs)

    # ---------------------------------------------------------------------------------------- names
    def _described(self) -> str:
        """The sizes and arguments of the module, in words; here: in those of another library."""
        return super().extra_repr()  # type: ignore[misc]

    def extra_repr(self) -> str:
        places = lies(self, *self._weight_keys)
        said = self._described() + (f", {places}" if places else "") + self._frozen_repr()
        return said.removeprefix(", ")

    def _label(self) -> str:
        kind = f"te_mx.{type(self).__name__}"
        if self.name:
            return f"{kind} {self.name!r}"
        return f"{kind}({self._described()}{self._frozen_repr()})"

    # ---------------------------------------------------------------------------------- checkpoints
    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: without what a forward makes again."""
        state = {k: v for k, v in self.__dict__.items() if k not in TRANSIENT}
        if self._frozen is not None:
            state["_frozen"] = self._frozen.without_copies()
        return state

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)  # type: ignore[misc]
        self._forget_copies()
        return moved

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._forget_copies()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._is_dropped() or self._claim is not None:
            check_saved(self)
        if self._is_dropped():
            save_codes(self, destination, prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        load_module(
            self, super()._load_from_state_dict, state_dict, prefix, local_metadata, strict,  # type: ignore[misc]
            missing_keys, unexpected_keys, error_msgs,
        )  # fmt: skip

    def _adapt_state_dict(self, state_dict: Any, prefix: str, error_msgs: list[str]) -> None:
        """Give entries of other forms the names and shapes that this module has."""
