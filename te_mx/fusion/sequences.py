"""Fusing layers of plain models into te_mx.LayerNormLinear and te_mx.LayerNormMLP, and back.

Only inside an nn.Sequential is it certain that one layer's result goes to the next and nowhere
else, so nothing is fused anywhere else. The fused module takes the place of the first layer, and
nn.Identity those of the others, so the names of later layers stay. It holds the very parameters of
the layers: optimizer state and tied weights stay, their names in the state_dict change."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from te_mx.nn.converted import unwatch
from te_mx.nn.layernorm_linear import LayerNormLinear
from te_mx.nn.layernorm_mlp import LayerNormMLP
from te_mx.nn.norm_base import NormModule

_NORMS = {nn.LayerNorm: "LayerNorm", nn.RMSNorm: "RMSNorm"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Fusion(NamedTuple):
    """One place where layers are (or could not be) fused: the name of the first layer, shape, what
    the layers are, and why not (empty when they are)."""

    name: str
    shape: str
    layers: str
    reason: str


class Plan(NamedTuple):
    """Layers of one nn.Sequential, under these names there, that become one module of this name."""

    sequence: nn.Sequential
    names: list[str]
    layers: tuple[nn.Module, ...]
    fqn: str
    linears: tuple[str, ...]  # the names in the model of its linear layers


def plan_fusions(
    model: nn.Module, why_not: Callable[[nn.Linear], str], keeps: Callable[[nn.Module, str], bool],
    unlike: Callable[[Sequence[str]], str],
) -> tuple[list[Fusion], list[Plan]]:  # fmt: skip
    """What can be fused; returns the report and what `fuse_all` is to do.

    `why_not` says why a linear layer cannot be converted, `keeps` whether the user excluded it,
    `unlike` why linear layers of these names do not run with one recipe."""
    found: list[Fusion] = []
    plans: list[Plan] = []
    uses: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        uses[id(module)] = uses.get(id(module), 0) + 1
    for prefix, sequence in model.named_modules():
        if type(sequence) is not nn.Sequential or "forward" in sequence.__dict__:
            continue
        names = list(sequence._modules)
        at = 0
        while at < len(names):
            layers = _match([sequence._modules[name] for name in names[at:]])
            if not layers:
                at += 1
                continue
            fqn = ".".join(part for part in (prefix, names[at]) if part)
            reason = _why_not(layers, why_not, uses)
            linears = []
            for offset, layer in enumerate(layers):
                if isinstance(layer, nn.Linear):
                    full = ".".join(part for part in (prefix, names[at + offset]) if part)
                    linears.append(full)
                    if not reason and keeps(layer, full):
                        reason = "excluded by filter_fn"
            reason = reason or unlike(linears)
            kinds = " + ".join(type(layer).__name__ for layer in layers)
            found.append(Fusion(fqn, _shape(layers), kinds, reason))
            if reason:
                at += 1
                continue
            taken = names[at : at + len(layers)]
            plans.append(Plan(sequence, taken, layers, fqn, tuple(linears)))
            at += len(layers)
    return found, plans


def fuse_all(plans: list[Plan]) -> list[NormModule]:
    """Fuse what was planned; returns the modules that were made."""
    made = [_fused(plan) for plan in plans]  # all of them before the first one takes its place
    for plan, module in zip(plans, made, strict=True):
        plan.sequence._modules[plan.names[0]] = module
        for name in plan.names[1:]:
            plan.sequence._modules[name] = nn.Identity()
    return made


def unfuse(model: nn.Module) -> list[Fusion]:
    """Put the original layers back, with the parameters that the fused modules have now. Fused
    modules that were not made by `fuse` are reported with the reason."""
    found = []
    for prefix, sequence in list(model.named_modules()):
        for at, module in list(sequence._modules.items()):
            if not isinstance(module, NormModule):
                continue
            fqn = ".".join(part for part in (prefix, at) if part)
            layers: tuple[nn.Module, ...] | None = module.__dict__.get("_fused_from")
            kind = f"te_mx.{type(module).__name__}"
            if layers is None:
                found.append(Fusion(fqn, "", kind, "it was built as such: no layers to go back to"))
                continue
            if state := module._source.standing:
                reason = f"{state}: call te_mx.unfreeze_weights first"
                found.append(Fusion(fqn, _shape(layers), kind, reason))
                continue
            names = list(sequence._modules)
            first = names.index(at)
            rest = [sequence._modules[name] for name in names[first + 1 : first + len(layers)]]
            if [type(layer) for layer in rest] != [nn.Identity] * (len(layers) - 1):
                found.append(Fusion(fqn, _shape(layers), kind, "its place in the model changed"))
                continue
            _give_back(module, layers)
            unwatch(module)
            for name, layer in zip(names[first : first + len(layers)], layers, strict=True):
                layer.train(module.training)
                sequence._modules[name] = layer
            found.append(Fusion(fqn, _shape(layers), kind, ""))
    return found


# ---------------------------------------------------------------------------------------- matching
def _match(layers: list[nn.Module | None]) -> tuple[Any, ...]:
    """The longest pattern that starts here: [norm] Linear activation Linear, or norm Linear."""
    norm = 1 if layers and type(layers[0]) in _NORMS else 0
    rest = layers[norm:]
    if not rest or not isinstance(rest[0], nn.Linear):
        return ()
    block = len(rest) >= 3 and _activation(rest[1]) and isinstance(rest[2], nn.Linear)
    # A block that changes its width is no LayerNormMLP.
    if block and rest[0].in_features == rest[2].out_features:  # type: ignore[union-attr]
        return tuple(layers[: norm + 3])
    return tuple(layers[:2]) if norm else ()


def _activation(layer: nn.Module | None) -> str:
    """The name of an activation layer; empty for any other."""
    if type(layer) is nn.GELU:
        return "gelu" if layer.approximate == "tanh" else "gelu_erf"
    if type(layer) is nn.SiLU:
        return "silu"
    return "relu" if type(layer) is nn.ReLU else ""


def _why_not(
    layers: tuple[Any, ...], why_not: Callable[[nn.Linear], str], uses: dict[int, int]
) -> str:
    """Why these layers are not fused, or an empty string."""
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for layer in layers:
        if uses[id(layer)] > 1:
            return f"a {type(layer).__name__} of it is shared"
        if any(getattr(layer, hooks) for hooks in _HOOKS):
            return f"a {type(layer).__name__} of it has hooks"
        if "forward" in layer.__dict__ or parametrize.is_parametrized(layer):
            return f"a {type(layer).__name__} of it was changed on the instance"
    for linear in linears:
        if reason := why_not(linear):
            return reason
    if len(linears) == 2 and linears[0].out_features != linears[1].in_features:
        return "the sizes of its linear layers do not fit"
    if type(layers[0]) in _NORMS:
        norm = layers[0]
        if tuple(norm.normalized_shape) != (linears[0].in_features,):
            return f"it normalizes over {tuple(norm.normalized_shape)}, not over in_features"
        if norm.weight is None:
            return "its normalization has no weight"
        if norm.eps is None:
            return "eps=None depends on the dtype of the input: give a number"
    return ""


def _shape(layers: Iterable[Any]) -> str:
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    return " -> ".join(str(n) for n in (linears[0].in_features, *(x.out_features for x in linears)))


# --------------------------------------------------------------------------------------- replacing
def _fused(plan: Plan) -> NormModule:
    """The module that stands for the layers, with their very parameters."""
    layers: tuple[Any, ...] = plan.layers
    norm = layers[0] if type(layers[0]) in _NORMS else None
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    common: dict[str, Any] = {"device": "meta", "name": plan.fqn}
    if norm is not None:
        common |= {"eps": norm.eps, "normalization": _NORMS[type(norm)]}
    made: NormModule
    if len(linears) == 1:
        made = LayerNormLinear(linears[0].in_features, linears[0].out_features, **common)
    else:
        common |= {"activation": _activation(layers[-2])}
        common.setdefault("normalization", None)
        made = LayerNormMLP(linears[0].in_features, linears[0].out_features, **common)
    for own, layer, theirs in _pairs(made, layers):
        made._parameters[own] = getattr(layer, theirs, None)
    made.use_bias = any(linear.bias is not None for linear in linears)
    made.train(plan.sequence.training)
    made.__dict__["_fused_from"] = layers
    return made


def _pairs(made: NormModule, layers: tuple[Any, ...]) -> list[tuple[str, Any, str]]:
    """(parameter of the fused module, layer, parameter of the layer)."""
    pairs = []
    if type(layers[0]) in _NORMS:
        pairs += [(f"layer_norm_{kind}", layers[0], kind) for kind in ("weight", "bias")]
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    prefixes = ["fc1_", "fc2_"] if isinstance(made, LayerNormMLP) else [""]
    for prefix, linear in zip(prefixes, linears, strict=True):
        pairs += [(prefix + kind, linear, kind) for kind in ("weight", "bias")]
    return pairs


def _give_back(made: NormModule, layers: tuple[Any, ...]) -> None:
    for own, layer, theirs in _pairs(made, layers):
        value = made._parameters[own]
        if value is not None or theirs in layer._parameters:
            layer._parameters[theirs] = value
