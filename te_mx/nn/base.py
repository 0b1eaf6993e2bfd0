"""What the modules that run in MXFP8 share: settings, kept weights, names, checks and checkpoints.

reset_parameters() of the modules."""

import itertools
from collections.abc import Callable, Sequence, Set
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from te_mx.autograd import node
from te_mx.autograd.grad_target import Queue
from te_mx.autograd.high_precision import HighPrecisionLinear
from te_mx.autograd.node import differentiable
from te_mx.context import region as context
from te_mx.context.region import RECOMPUTED, active_region, backward_pass_id, innermost, is_tracing
from te_mx.nn import converted
from te_mx.nn.checks import Checked
from te_mx.nn.tensor_parallel import TensorParallelGroup
from te_mx.recipe import Recipe, resolve_recipe
from te_mx.recipes.custom import settings_of
from te_mx.recipes.settings import ByName, Mixed, Settings
from te_mx.runtime import compiled
from te_mx.runtime.arguments import check_flag
from te_mx.runtime.kernel_log import new_tags
from te_mx.weights.freezing import Freezable, lies
from te_mx.weights.gradients import DelayedWgrad
from te_mx.weights.missing import check_saved
from te_mx.weights.ranks import SeveralRanks, above
from te_mx.weights.state_dict import load_module

# Whether modules made here keep a copy of what their weights start with: see
# te_mx.pytorch.quantized_model_init.
preserves: ContextVar[bool] = ContextVar("te_mx_preserves_init", default=False)


def get_high_precision_init_val(parameter: Any) -> Tensor | None:
    """What a weight started with, on the CPU; None once that was cleared."""
    return getattr(parameter, "_high_precision_init_val", None)


def clear_high_precision_init_val(parameter: Any) -> None:
    """Give the memory of that copy back."""
    parameter.__dict__.pop("_high_precision_init_val", None)


class Resettable:
    """Mixin of the modules, beside an nn.Module: initial values, also of meta parameters."""

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
        source = module._source
        source.needs_values(
            RuntimeError,
            f"{module._label()}: frozen without its high-precision weights, there is nothing to "
            "reset; call te_mx.unfreeze_weights(model, dequantize=True) first",
        )
        _make_real(self)
        self._initialize()
        self._preserve_weights()
        source.forget()

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
                parameter._high_precision_init_val = parameter.detach().to("cpu", copy=True)
                for function in (get_high_precision_init_val, clear_high_precision_init_val):
                    setattr(parameter, function.__name__, MethodType(function, parameter))

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


def names_of(name: str, keys: Sequence[str]) -> tuple[str, ...]:
    """The names of the weights of a module: its own, or one for each of several."""
    if len(keys) == 1:
        return (name,)
    prefix = f"{name}." if name else ""
    return tuple([prefix + key.removesuffix("_weight") for key in keys])


NEVER: Any = object()
_PLAIN = frozenset((nn.Parameter, type(None)))
# What a copy starts without.
TRANSIENT = frozenset((
    "_seen", "_ran", "_tag", "_call", "_wgrad_label", "_delayed", "_tp_group", "_gathered_with",
))  # fmt: skip


class MXModule(Resettable, Freezable, DelayedWgrad, SeveralRanks, TensorParallelGroup, Checked):
    """Mixin of the modules, beside an nn.Module."""

    # For type checkers, to whom nn.Module says nothing. Under return_bias it is a tuple.
    __call__: Callable[..., Tensor]

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    name: str | None = None
    _converted: bool = False  # made by convert_model
    _module_type = "linear"  # Transformer Engine's module_type, of roles
    _seen: Settings | Mixed | None = NEVER  # what the last forward ran with
    _ran: Set[Settings | Mixed | None] = frozenset()  # what forwards ran with, in any thread
    _tag: int = -1  # first slot in te_mx.runtime.kernel_log.LAST_RUN, three for each linear step

    # --------------------------------------------------------------------------- running a forward
    def _held(self, *names: str) -> tuple[Any, ...]:
        """Parameters by name, without nn.Module's slow look-up where they are plain."""
        parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        held = []
        for name in names:
            held.append(parameters[name] if name in parameters else getattr(self, name))
        return tuple(held)

    def _enter(self, inp: Any, first: bool | None, *before: Any) -> tuple[Settings | None, Any]:
        """What stands in front of every forward(inp, *before, first): the settings of its steps,
        and None; or None and the result, where something else is to run: a graph of torch.fx,
        another rank's part, code outside of the graph that is being compiled, high precision, a
        transform of torch.func."""
        module: Any = self
        plain = type(inp) is Tensor
        if not plain and isinstance(inp, Proxy):
            return None, self._as_leaf(inp, *before, is_first_microbatch=first)
        if (module.fuse_wgrad_accumulation or module.delay_wgrad_compute) and is_tracing():
            return None, compiled.untraced(module.forward, inp, *before, first)
        usual = plain and module._shared is None
        usual = usual and _PLAIN.issuperset(map(type, module._parameters.values()))
        if not usual and self._is_spread(inp):
            return None, above.distributed.run(self, inp, *before, first)
        settings = self._settings()
        if settings is None:
            return None, module._high_precision(inp, *before, first)
        if node.active():
            made = self._transformed(inp, *before, is_first_microbatch=first)
            return (settings, None) if made is None else (None, made)
        return settings, None

    def _settings(self) -> Any:
        """Settings that a forward runs with: those of te_mx.autocast, outside of it those that were
        bound; None in high precision.

        Inside a backward pass, which runs a forward to recompute it, only regions that were entered
        in this same pass count: torch.utils.checkpoint enters that of the first forward. For other
        code that recomputes, all forwards must have run with the same settings.

        A module with several weights may run with `Mixed` ones.

        Raises:
            RuntimeError: they have not.
        """
        source = self._source
        if is_tracing():
            traced = self._resolved(context.current_settings(bound=self._bound))
            return self._inside(traced) if traced is None or source.fixes else traced
        region = innermost.get()
        if region is not None and region.left:
            region = active_region()
        settings: Any = self._bound if region is None or region.outside else region.settings
        if type(settings) is ByName:
            settings = settings_of(settings, self._names(), self._module_type)
        running = backward_pass_id()
        again = running != -1 and (region is None or region.backward_pass != running)
        if again and len(self._ran) == 1:
            settings = next(iter(self._ran))
        else:
            if again:
                if self._ran:
                    raise RuntimeError(f"{self._label()}: {RECOMPUTED}")
                settings = self._resolved(context.current_settings(bound=self._bound))
            if settings is not self._seen:
                # Threads may share a module: each adds first. nn.Module.__setattr__ is slow.
                self.__dict__.setdefault("_ran", set()).add(settings)
                self.__dict__["_seen"] = settings
            if settings is not None:
                if context.notices:
                    context.give_notices()
                if torch.jit.is_tracing() and torch.is_grad_enabled():
                    self._refuse_jit_trace()
        return self._inside(settings) if settings is None or source.fixes else settings

    def _inside(self, settings: Settings | Mixed | None) -> Settings | None:
        """What the state of the weights makes of them."""
        if isinstance(settings, Mixed):
            raise NotImplementedError(
                f"{self._label()}: {self._source.standing or 'gathered as codes'}, and its weights "
                f"run with different recipes here ({settings.formats}), which is not supported; "
                "unfreeze it, or give it one recipe"
            )
        return self._source.inside(self, settings)

    def _one_settings(self) -> Settings | None:
        """`_settings`, of a module whose weights several ranks share.

        Raises:
            NotImplementedError: its weights run with different ones.
        """
        settings: Settings | Mixed | None = self._settings()
        if isinstance(settings, Mixed):
            raise NotImplementedError(
                f"{self._label()}: its weights run with different recipes ({settings.formats}), "
                "which is not supported where several ranks share the module; give it one recipe"
            )
        return settings

    def _chosen(self, recipe: Recipe | None, name: str) -> Settings | Mixed | None:
        """What code beside a forward takes for this module, of this name if it has none: a recipe,
        without one what is bound, or the default; None in high precision."""
        if recipe is None and (self._bound is not None or self._bound_plain):
            return self._bound
        return self._resolved(resolve_recipe(recipe).chosen, name)

    def _resolved(
        self, chosen: Settings | Mixed | ByName | None, name: str = ""
    ) -> Settings | Mixed | None:
        """What this module, of this name if it has none, runs with where that was chosen. Under
        other recipes than those by name a compiled graph does not depend on the name."""
        if not isinstance(chosen, ByName):
            return chosen
        return context.resolved(chosen, self._names(self.name or name), self._module_type)

    def _names(self, name: str | None = None) -> tuple[str, ...]:
        """The names under which a recipe is asked about the weights; `name`: that of the module in
        a model, if it is not the module's own."""
        return names_of(name or self.name or "", self._weight_keys)

    def _warn_plain(self) -> None:
        """Called where a forward runs in high precision: a converted model that trains so is not
        what its user meant."""
        told = self._converted and not self._bound_plain
        if told and self.training and torch.is_grad_enabled():  # type: ignore[attr-defined]
            warn = converted.warn_plain_traced if is_tracing() else converted.warn_plain
            warn(self.name)

    def _tag_now(self) -> int:
        """The first slot of this module; compiled code records nothing."""
        if is_tracing():
            return -1
        if self._tag < 0:
            self.__dict__["_tag"] = new_tags(self)
        return self._tag

    def _routed(self) -> bool:
        """Whether weight gradients do not simply go back to autograd."""
        return self.fuse_wgrad_accumulation or self.delay_wgrad_compute

    def _gradients_of(self, key: str, weight: Tensor) -> Sequence[Tensor]:
        """What gets the gradient of a weight: itself, or the parameters that it is joined of."""
        names = self._parts_of(key)
        return [weight] if len(names) == 1 else self._held(*names)

    def _plain_linear(
        self, x: Tensor, key: str, weight: Tensor, bias: Tensor | None, first: bool | None,
        queue: Queue | None = None,
    ) -> Tensor:  # fmt: skip
        """x @ weight.T + bias in high precision; the gradient of the weight of this key goes where
        that of a quantized product does."""
        grad_target = self._grad_target(key, weight, first, queue)
        if grad_target is None:
            return nn.functional.linear(x, weight, bias)
        return HighPrecisionLinear.apply(x, weight, bias, grad_target)

    def _grad_target(
        self, key: str, weight: Tensor, first: bool | None, queue: Queue | None
    ) -> Any:
        """Where the gradient of a weight goes, None where autograd takes it."""
        if not self._routed():
            return None
        return self._source.grad_target(self, self._gradients_of(key, weight), first, queue)

    # ------------------------------------------------------------------- transforms and tracers
    def _refuse_transforms(self, inp: Tensor) -> None:
        """Called where transforms are active: refuses those that concern this call."""
        held = itertools.chain(self.parameters(), self.buffers())  # type: ignore[attr-defined]
        node.refuse(self._label(), (inp, *held))

    def _transformed(self, inp: Tensor, *before: Any, **given: Any) -> Any:
        """Called where transforms are active: the result of a forward with these arguments under
        one level of torch.func's gradients, None where no transform concerns this call. Others are
        refused, and so are weight gradients with a place of their own, and computed weights."""
        module: Any = self
        names = [name for name, held in module._parameters.items() if held is not None]
        tensors = (inp, *(module._parameters[name] for name in names))
        plain = not (before or self._routed() or module._modules or self._source.standing)
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
        if "_source" in state:
            state["_source"] = self._source.without_copies()
        return state

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)  # type: ignore[misc]
        self._forget_copies()
        return moved

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._forget_copies()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        check_saved(self)
        self._source.save(self, destination, prefix)
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
