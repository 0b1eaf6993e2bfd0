"""Attention masks that say nothing: compiled code leaves them out where eager code makes none.

Eager code of Transformers looks at positions, finds one sequence in a row, and passes no mask but
"causal" on. Compiled code cannot look and makes the mask, with which attention takes three times as
long (NVIDIA H200, 16 heads of 128, 2048 tokens). Up to how many tokens there is none in eager code
is found out by running the model's own forward on stand-ins for its layers; it counts for calls
that give tokens alone, as long as the model's config is what it was."""

import copy
import itertools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_mx.autograd.saved import surely
from te_mx.context.region import is_tracing
from te_mx.fusion.class_swap import Reclassed
from te_mx.fusion.probe import apart, forward_of, twin
from te_mx.fusion.sequences import Fusion
from te_mx.nn.guards import hooked
from te_mx.nn.linear import Linear
from te_mx.runtime import compiled

ATTRIBUTE = "_te_mx_traced"
_WORD = "te_mx_no_mask"
_MASK, _IDS, _EMBEDDED, _CACHE = "attention_mask", "input_ids", "inputs_embeds", "use_cache"
_SIZES = tuple([1 << n for n in range(2, 15)])  # tokens that are tried, as long as there is none


class Beside(NamedTuple):
    """One of the layers of the model, whose recipe counts."""

    beside: nn.Linear

    def is_traced(self) -> bool:
        """Whether code is traced that quantizes."""
        beside: Any = self.beside
        return is_tracing() and type(beside) is Linear and beside._settings() is not None


class Traced(NamedTuple):
    """A module that does something of its own in compiled code."""

    module: nn.Module
    plan: "Beside | MaskPlan"


class MaskPlan(NamedTuple):
    """As Beside. most: tokens up to which eager code makes no mask; as long as the model has this
    config."""

    beside: nn.Linear
    most: int
    config: dict[str, Any]


# Models by id, for what Dynamo calls with constants.
_models: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


class SaysNothing(Reclassed):
    """Mixin in front of the class of a model that makes the masks of its layers."""

    def _te_mx_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        if is_tracing() and self._makes_none(args, kwargs):
            kwargs[_WORD] = True
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _models[id(self)] = self  # type: ignore[assignment]

    def _makes_none(self, args: Any, kwargs: Any) -> bool:
        """Whether eager code would make no mask of these arguments."""
        plan: MaskPlan = self.__dict__[ATTRIBUTE]
        asked = {name for name, value in kwargs.items() if value is not None}
        asked -= {name for name in asked if name[:7] == "output_" and kwargs[name] is False}
        if len(args) > 1 or asked - {_IDS, _EMBEDDED, _CACHE} or not Beside(plan[0]).is_traced():
            return False
        tokens = args[0] if args else kwargs.get(_IDS)
        tokens = kwargs.get(_EMBEDDED) if tokens is None else tokens
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            return False
        if not surely(tokens.shape[1] <= plan.most):
            return False
        if not all(isinstance(layer, LeavesMask) for layer in self._modules["layers"]):  # type: ignore[attr-defined]
            return False
        return not compiled.exporting() and compiled.is_as_planned(id(self))


@compiled.constant
def is_as_planned(model_id: int) -> bool:
    """Whether a model has the config that it had, and the forward."""
    model: Any = _models.get(model_id)
    if model is None or model._own.forward is not model._followed[0]:
        return False
    return vars(model.config) == model.__dict__[ATTRIBUTE].config


class LeavesMask(Reclassed):
    """Mixin in front of the class of one of its layers."""

    def _te_mx_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        if kwargs.pop(_WORD, False):
            kwargs[_MASK] = None
        return super().forward(*args, **kwargs)  # type: ignore[misc]


# --------------------------------------------------------------------------------------- stand-ins
class _Layer(nn.Module):
    """In the place of a layer: notes whether it was told that there is no mask, by both ways."""

    def __init__(self, real: nn.Module, seen: list[bool]) -> None:
        super().__init__()
        self.__dict__.update(real=real, seen=seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append(not args and kwargs.get(_WORD, False) and kwargs.get(_MASK, 0) is None)
        return hidden


class _Other(nn.Module):
    """In the place of anything else: what it is given, or embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, given: Tensor, *_: Any, **__: Any) -> Tensor:
        if given.is_floating_point():
            return given
        return torch.zeros(1).expand(*given.shape, self.width)


def _most_without(model: Any, width: int) -> int:
    """Up to how many tokens, of those tried, a model hands on that there is no mask."""
    most = 0
    for size in _SIZES:
        either = (False,) if most else (False, True)
        how = itertools.product((1, 2), either, either, either)
        if not all(_hands_none(model, width, (rows, size), *one) for rows, *one in how):
            break
        most = size
    return most


def _hands_none(
    model: Any, width: int, shape: tuple[int, int], training: bool, embedded: bool, cached: bool
) -> bool:
    """Whether a model hands no mask to any layer, and on what its layers are told, of rows of so
    many tokens, given as they are or embedded."""
    children, seen = model._modules, []  # type: ignore[var-annotated]
    layers = nn.ModuleList([_Layer(layer, seen) for layer in children["layers"]])
    others: dict[str, nn.Module] = {name: _Other(width) for name in children if name != "layers"}
    try:
        with apart():
            made = twin(model, training, {**others, "layers": layers})
            ids = _tokens(shape, children.values())
            given = {_EMBEDDED: _Other(width)(ids)} if embedded else {_IDS: ids}
            forward_of(model)(made, **given, **{_CACHE: cached, _WORD: True})
    except Exception:
        return False
    return len(seen) == len(layers) and all(seen)


def _tokens(shape: tuple[int, int], children: Any) -> Tensor:
    """Rows of tokens, padding among them."""
    ids = torch.arange(shape[1])
    for one in children:
        if isinstance(one, nn.Embedding):
            ids %= one.num_embeddings
            if one.padding_idx is not None:
                ids[shape[1] // 2 :: 2] = one.padding_idx
    return ids.expand(shape)


def plan_masks(model: nn.Module, converts: Any) -> tuple[list[Fusion], list[Traced], list[Traced]]:
    """The report, the models that make the masks of their layers, and these."""
    found: list[Fusion] = []
    models: list[Traced] = []
    layers: list[Traced] = []
    for name, module in model.named_modules():
        stack = module._modules.get("layers")
        if not isinstance(stack, nn.ModuleList) or not len(stack) or "forward" in vars(module):
            continue
        if any(isinstance(one, Reclassed) or hooked(one) for one in (module, *stack)):
            continue
        linear = next((one for one in stack[0].modules() if one in converts), None)
        if not isinstance(linear, nn.Linear) or not hasattr(module, "config"):
            continue
        most = _most_without(module, linear.in_features)
        if most:
            plan = MaskPlan(linear, most, copy.deepcopy(vars(module.config)))
            what = f"{type(module).__name__}: in compiled code, too, no mask that says nothing"
            found.append(Fusion(name or "(root)", f"{most} tokens", what, ""))
            models.append(Traced(module, plan))
            layers += [Traced(layer, Beside(linear)) for layer in stack]
            _models[id(module)] = module
    return found, models, layers
