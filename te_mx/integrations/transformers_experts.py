"""Experts of Transformers: modules whose forward asks its experts registry what to run.

    h = x @ gate_up_proj[e]^T + bias,  a = gate(h),  y = a @ down_proj[e]^T + bias

for the tokens of every expert e, then each token's sum over its experts, weighted. Weights are [E,
out, in], or [E, in, out] where the class says `is_transposed`; without a gate the first one is
up_proj, and its activation is act_fn. The gate (halves, interleaved, ..) is the class's own."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from te_mx.autograd import node
from te_mx.autograd.activation import activation
from te_mx.autograd.routing import Route, put_back, route, take_rows
from te_mx.dispatch.fused import Activation
from te_mx.dispatch.groups import INDEX_DTYPES
from te_mx.fusion.experts import ExpertsModule
from te_mx.integrations.seam import Seam, why_not_in_place, why_not_parameter
from te_mx.nn import activations
from te_mx.runtime.arguments import shown

_REGISTRY = "transformers.integrations.moe"

# (rows [R, in], ends of the experts, key of the weight, bias [E, out] or None) -> [R, out]
Product = Callable[[Tensor, Tensor, str, Tensor | None], Tensor]


class TransformersExperts(ExpertsModule):
    """Mixin before a class that transformers.integrations.moe.use_experts_implementation made."""

    @property
    def _weight_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        return keys_of(self)

    @property
    def _transposed(self) -> bool:
        return bool(getattr(self, "is_transposed", False))

    def _te_mx_forward(self, *args: Any, **kwargs: Any) -> Any:
        """(hidden states [T, H], experts of each token [T, k], their weights [T, k]) -> [T, H].

        In MXFP8 inside `te_mx.autocast`, in every detail what the class does outside."""
        if args and isinstance(args[0], Proxy):
            return self._as_leaf(*args, **kwargs)
        each = self._settings_of_each()
        if self._is_plain(each[0]):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if each[0] is not None:
            self._refuse_spread()
        settings = dict(zip(keys_of(self), each, strict=True))
        alike = each[0] if all(one == each[0] for one in each) else None

        def product(x: Tensor, offs: Tensor, key: str, bias: "Tensor | None") -> Tensor:
            return self._product(x, offs, key, bias, settings[key])

        def both(x: Tensor, to: Route, *biases: "Tensor | None") -> "Tensor | None":
            return self._both_products(x, to, biases, alike)

        return run_experts(self, product, *args, both=both, **kwargs)


def run_experts(
    module: Any, product: Product, hidden_states: Tensor, top_k_index: Tensor,
    top_k_weights: Tensor, *, both: Callable[..., Tensor | None] | None = None,
) -> Tensor:  # fmt: skip
    """The experts of a module, their products by `product`, or by `both`: (tokens, their route,
    both biases) -> rows behind the second product, None where it does not. Numbers outside
    of the module's experts are no expert's, as those of other ranks under expert parallelism: they
    add nothing and get no gradient."""
    _check(hidden_states, top_k_index, top_k_weights)
    if node.active():
        held = *module.parameters(), *module.buffers()
        node.refuse(type(module).__name__, (hidden_states, top_k_weights, *held))
    first, last = keys_of(module)
    to = route(top_k_index, module.num_experts)
    biases = _bias(module, first), _bias(module, last)
    made = None if both is None else both(hidden_states, to, *biases)
    if made is None:
        x_RH = take_rows(hidden_states, to)
        a = _activated(module, product(x_RH, to.offs, first, biases[0]))
        made = product(a, to.offs, last, biases[1])
    y_RH = made
    if _flag(module, "has_post_expert_norm", False):
        # A normalization with a bias makes something of the zeros of no expert.
        y_RH = torch.where(to.inside(), module.post_expert_norm(y_RH), 0)
    return put_back(y_RH, to, top_k_weights).to(hidden_states.dtype)


def _activated(module: Any, h: Tensor) -> Tensor:
    if not _flag(module, "has_gate", True):
        return module.act_fn(h)
    gate = getattr(module, "_gate", None)
    return module._apply_gate(h) if gate is None else activation(h, gate)


def keys_of(module: Any) -> tuple[str, str]:
    """The names of the two weights."""
    return "gate_up_proj" if _flag(module, "has_gate", True) else "up_proj", "down_proj"


def _flag(module: Any, name: str, default: bool) -> bool:
    """What the class says of itself; versions of transformers differ in what they ask."""
    return bool(getattr(module, name, default))


def _bias(module: Any, key: str) -> Tensor | None:
    return getattr(module, f"{key}_bias") if _flag(module, "has_bias", False) else None


def _check(x: Any, index: Any, scores: Any) -> None:
    """Raise unless these are tokens [T, H], expert numbers [T, k] and weights [T, k]."""
    for name, value, dims in (
        ("hidden_states", x, "[tokens, hidden]"),
        ("top_k_index", index, "[tokens, k]"),
        ("top_k_weights", scores, "[tokens, k]"),
    ):
        if not isinstance(value, Tensor) or value.dim() != 2:
            raise ValueError(f"experts: {name} must be a tensor {dims}, got {shown(value)}")
    if index.dtype not in INDEX_DTYPES:
        raise TypeError(f"experts: top_k_index must be int32 or int64, got {index.dtype}")
    if index.shape != scores.shape or index.shape[0] != x.shape[0]:
        raise ValueError(
            "experts: top_k_index and top_k_weights must be [tokens, k] for the tokens of "
            f"hidden_states {tuple(x.shape)}, got {tuple(index.shape)} and {tuple(scores.shape)}"
        )


# ------------------------------------------------------------------------------------- recognizing
def _takes(module: nn.Module) -> bool:
    forward: Any = getattr(type(module), "forward", None)
    if isinstance(module, TransformersExperts):
        return True
    return getattr(forward, "__globals__", {}).get("__name__") == _REGISTRY


def why_not_experts(module: Any) -> str:
    """Why experts cannot run in MXFP8, whoever calls them, or an empty string."""
    first, last = keys_of(module)
    for name in (first, last):
        if reason := why_not_parameter(module, name, 3):
            return reason
        if _flag(module, "has_bias", False) and (
            reason := why_not_parameter(module, f"{name}_bias", 2)
        ):
            return reason
    if len({len(getattr(module, name)) for name in (first, last)}) > 1:
        return f"its {first} and {last} do not hold the same number of experts"
    if getattr(module, "num_experts", None) != len(getattr(module, first)):
        return f"its num_experts is not the {len(getattr(module, first))} of {first}"
    needed = "_apply_gate" if _flag(module, "has_gate", True) else "act_fn"
    return "" if hasattr(module, needed) else f"it has no {needed}"


def _why_not(module: nn.Module) -> str:
    if module.__dict__.get("_is_expert_parallel") and "forward" in module.__dict__:
        return (
            "expert parallelism replaced its forward: convert before, or load the model with "
            'experts_implementation="te_mx" after importing te_mx.integrations.transformers'
        )
    return why_not_in_place(module) or why_not_experts(module)


def _shape(module: Any) -> str:
    """E x in -> inner -> out."""
    if isinstance(module, TransformersExperts):
        return module._widths()
    first, last = (getattr(module, key, None) for key in keys_of(module))
    if first is None or last is None or first.dim() != 3 or last.dim() != 3:
        return ""
    a, b = (-2, -1) if _flag(module, "is_transposed", False) else (-1, -2)
    return f"{len(first)} x {first.shape[a]} -> {first.shape[b]} -> {last.shape[b]}"


def _gate(module: Any) -> Activation | str:
    """What ``fuse=True`` computes in one step: the default gate, act_fn(first half) * second half,
    of an activation that te_mx has."""
    default = getattr(sys.modules.get(_REGISTRY), "_default_apply_gate", None)
    if not _flag(module, "has_gate", True):
        return "it has no gate"
    if default is None or type(module)._apply_gate is not default:
        return "the gate is the class's own"
    return _gated_by(module.act_fn) or f"te_mx has no {type(module.act_fn).__name__}"


@torch.no_grad()
def _gated_by(function: Any) -> Activation | None:
    """The activation function(a) * b, if te_mx has it."""
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return None
    a = torch.linspace(-12, 12, 4801, device="cpu", dtype=torch.float64)
    try:
        values = function(a)
    except Exception:  # a function of other arguments, or of another device
        return None
    if not isinstance(values, Tensor):
        return None
    return activations.known(torch.cat([a, torch.ones_like(a)]), values, gated=True)


SEAM = Seam(_takes, _why_not, _shape, TransformersExperts, _gate)
