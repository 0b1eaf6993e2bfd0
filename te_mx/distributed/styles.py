"""How te_mx's modules are sharded by torch's parallelize_module, which itself knows nn.Linear, and
which of the hooks around modules are known: what they do with what a layer takes and makes."""

import inspect
import operator
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from te_mx.nn.base import MXModule
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.nn.guards import why_not_usual as _why_not_but_hooks
from te_mx.nn.layernorm_linear import LayerNormLinear
from te_mx.nn.layernorm_mlp import LayerNormMLP
from te_mx.nn.linear import Linear
from te_mx.nn.tensor_parallel import BOTH, COLUMN, EXPERTS, ROW, cut_of
from te_mx.runtime.arguments import check_flag, is_one_of, shown
from te_mx.weights import gated_halves

MODES = (COLUMN, ROW, EXPERTS)


class ModuleParallel(ParallelStyle):
    """A style of parallelize_module for every te_mx module; torch's ColwiseParallel and
    RowwiseParallel serve te_mx.Linear too.

    LayerNormLinear is sharded along out_features; LayerNormMLP along ffn_hidden_size, fc1 by rows
    and fc2 by columns. Their normalization is on every rank. fc1 of a gated activation becomes two
    parameters, ``fc1_activated_weight`` and ``fc1_gate_weight`` (and ``_bias``), each sharded; a
    state_dict has the one ``fc1_weight`` of every LayerNormMLP.

    Args:
        mode: "column" (out_features), "row" (in_features), or "experts": the stacked weights of a
            te_mx.GroupedLinear, of which each rank runs those that it has on rows of its own. None
            is "column", where there is a choice.
        input_layouts: the placement of inputs that are plain tensors; None is Replicate(), or
            Shard(-1) for "row". Shard(0) or Shard(1), along the tokens, is sequence parallelism.
        output_layouts: that of the result; None leaves it sharded along out_features for "column"
            and is Replicate() otherwise.
        use_local_output: return a plain tensor, what this rank has.

    Raises:
        TypeError, ValueError: an argument of a wrong type or value.
    """

    def __init__(
        self,
        mode: str | None = None,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        if not is_one_of(mode, (*MODES, None)):
            raise ValueError(
                f"ModuleParallel: mode must be one of {', '.join(map(repr, MODES))} or None, got "
                f"{shown(mode)}"
            )
        for name, value in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if value is not None and not isinstance(value, Placement):
                raise TypeError(
                    f"ModuleParallel: {name} must be a Placement or None, got {shown(value)}"
                )
        check_flag("ModuleParallel: use_local_output", use_local_output)
        self.mode = mode or "column"
        row = self.mode == "row"
        self.input_layouts = input_layouts or (Shard(-1) if row else Replicate())
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        """Called by parallelize_module.

        Raises:
            TypeError: the module is none of te_mx, or has no such mode.
        """
        if not isinstance(module, (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear)):
            raise TypeError(
                "ModuleParallel takes te_mx.Linear, LayerNormLinear, LayerNormMLP and "
                f"GroupedLinear, got {type(module).__name__}; call te_mx.convert_model first where "
                "it is an nn.Linear, or use a style of torch"
            )
        if isinstance(module, (LayerNormLinear, LayerNormMLP)) and self.mode != "column":
            raise TypeError(
                f"ModuleParallel: {type(module).__name__} is sharded one way only, got "
                f"mode={self.mode!r}"
            )
        if self.mode == "experts" and not (
            isinstance(module, GroupedLinear) and module.single_grouped_weight
        ):
            raise TypeError(
                'ModuleParallel: mode="experts" shards stacked weights, those of a '
                f"te_mx.GroupedLinear(single_grouped_weight=True), got {module._label()}"
            )
        return distribute_module(
            module, device_mesh, partial(_partition, self), partial(_prepare_input, self),
            partial(_prepare_output, self),
        )  # fmt: skip


def _partition(style: ModuleParallel, name: str, module: nn.Module, mesh: Any) -> None:
    if not isinstance(module, MXModule):
        return
    if isinstance(module, LayerNormMLP) and module._act.gated:
        gated_halves.split(module)
    for key, value in list(module.named_parameters(recurse=False)):
        stacked = isinstance(module, GroupedLinear) and (
            module.single_grouped_weight if key.startswith("weight") else module.single_grouped_bias
        )
        dim = cut_of(BOTH if isinstance(module, LayerNormMLP) else style.mode, key, stacked)
        place = [Replicate() if dim is None else Shard(dim)]
        made = distribute_tensor(value, mesh, place, src_data_rank=style.src_data_rank)
        module.register_parameter(key, nn.Parameter(made, requires_grad=value.requires_grad))
    module._forget_copies()


def _prepare_input(style: ModuleParallel, module: Any, inputs: Any, mesh: Any) -> Any:
    inp, *rest = inputs
    if style.mode != "experts" and not isinstance(inp, DTensor):
        inp = DTensor.from_local(inp, mesh, [style.input_layouts], run_check=False)
    return (inp, *rest)


def _prepare_output(style: ModuleParallel, module: Any, outputs: Any, mesh: Any) -> Any:
    if style.mode == "experts":
        return outputs
    out, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = style.output_layouts
    if wanted is None and any(place.is_partial() for place in out.placements):
        wanted = Replicate()
    if wanted is not None:
        out = out.redistribute(placements=[wanted])
    if style.use_local_output:
        out = out.to_local()
        if getattr(module, "return_layernorm_output", False):
            rest[-1] = rest[-1].to_local()
    return (out, *rest) if isinstance(outputs, tuple) else out


_MADE_BY = f"{distribute_module.__name__}.<locals>."
_INNER, _WHOLE = (Shard(-1),), (Replicate(),)
_OURS = {_prepare_input, _prepare_output}
# What torch's styles have distribute_module call are functions of these classes.
_THEIRS = {(one.__module__, one.__qualname__) for one in (ColwiseParallel, RowwiseParallel)}


# By hook what it closes over: to look takes longer than a layer has.
_held: weakref.WeakKeyDictionary[Any, Mapping[str, Any]] = weakref.WeakKeyDictionary()


def given(hook: Any, name: str) -> Any:
    """The function that distribute_module was given, of a hook that it made; None of others, and of
    functions that no style of torch or te_mx has."""
    if not getattr(hook, "__qualname__", "").startswith(_MADE_BY):
        return None
    held = _held.get(hook)
    if held is None:
        held = _held[hook] = inspect.getclosurevars(hook).nonlocals
    made = held.get(name)
    if not isinstance(made, partial):
        return None
    owner = made.func.__module__, made.func.__qualname__.rpartition(".")[0]
    return made if made.func in _OURS or owner in _THEIRS else None


class Wanted(NamedTuple):
    """What the hook behind a layer makes of its result: where that is to be, None where it already
    is but for sums, which every rank gets; and whether a plain tensor comes out."""

    layouts: tuple[Placement, ...] | None
    local: bool

    def whole(self) -> bool:
        """Whether every rank gets a sum."""
        return self.layouts in (None, _WHOLE)


def wanted_of(layer: Any) -> Wanted | None:
    """That of a layer with one known hook behind it; None of others."""
    if len(layer._forward_hooks) != 1 or layer._forward_hooks_with_kwargs:
        return None
    made = _of(layer, "_forward_hooks", "output_fn")
    return None if made is None else _wanted(made)


def _wanted(made: Any) -> Wanted:
    if made.func is not _prepare_output:
        return Wanted(*made.args)
    style = made.args[0]
    layouts = None if style.output_layouts is None else (style.output_layouts,)
    return Wanted(layouts, style.use_local_output)


def hooks_of(layer: Any) -> list[Any]:
    """In front of a layer, and behind it."""
    return [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]


def same_objects(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same ones."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


_usual: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def why_not_usual(name: str, layer: Any) -> str:
    """Why a layer is none that runs in a block on several ranks, but for its tensors."""
    if reason := _why_not_but_hooks(name, layer):
        return reason
    if layer._gathers:
        return f"{name} is gathered as codes"
    usual = (
        not (layer._backward_hooks or layer._backward_pre_hooks or "forward" in layer.__dict__)
        and not (layer._forward_pre_hooks_with_kwargs or layer._forward_hooks_with_kwargs)
        and _are_known(layer)
    )
    return "" if usual else f"{name} has hooks other than those of parallelize_module"


def _are_known(layer: Any) -> bool:
    now, before = hooks_of(layer), _usual.get(layer)
    if before is not None and same_objects(now, before):
        return True
    known = (
        all(given(hook, "input_fn") for hook in layer._forward_pre_hooks.values())
        and all(given(hook, "output_fn") for hook in layer._forward_hooks.values())
        and max(len(layer._forward_pre_hooks), len(layer._forward_hooks)) <= 1
    )
    if known:
        _usual[layer] = now
    return known


def _of(layer: Any, hooks: str, name: str) -> Any:
    return next((given(hook, name) for hook in getattr(layer, hooks).values()), None)


def why_not_between(first: list[Any], last: Any) -> str:
    """Why what the first layers make does not go to the last one as it is."""
    into = [_taken(_of(one, "_forward_pre_hooks", "input_fn")) for one in first]
    if any(one != into[0] for one in into):
        return "its first layers take their input differently"
    made = [_of(one, "_forward_hooks", "output_fn") for one in first]
    outs = [Wanted(None, False) if one is None else _wanted(one) for one in made]
    taken = _of(last, "_forward_pre_hooks", "input_fn")
    if any(one.local != outs[0].local for one in outs) or (outs[0].local and taken is None):
        return "its first layers give their results differently"
    layouts = [*(one.layouts for one in outs), *_taken(taken)[1:]]
    if all(one in (None, _INNER) for one in layouts):
        return ""
    return "its inner width is not sharded along the features on all ranks"


def _taken(made: Any) -> tuple[Any, ...]:
    """Of a hook in front of a layer its function, how it takes plain tensors as placed, and where
    torch's styles move them."""
    if made is None:
        return (None,)
    if made.func is _prepare_input:
        return made.func, (made.args[0].input_layouts,)
    return made.func, *made.args
