"""The activations of te_mx.LayerNormMLP in plain torch, for the high-precision path, and which of
them a function of another library is.

====================  ==========================================================================
name                  value; a and b are the halves of the columns for gated ones
====================  ==========================================================================
gelu                  0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
gelu_erf              0.5 x (1 + erf(x / sqrt(2)))
relu, srelu           max(x, 0), max(x, 0)^2
silu, qgelu           x sigmoid(x), x sigmoid(1.702 x)
geglu, reglu, sreglu  gelu(a) b, relu(a) b, srelu(a) b
swiglu, qgeglu, glu   silu(a) b, qgelu(a) b, sigmoid(a) b
clamped_swiglu        y sigmoid(alpha y) (clamp(b, -limit, limit) + offset), y = min(a, limit)
====================  ==========================================================================
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_mx.autograd.activation import activation
from te_mx.dispatch.fused import ACTIVATIONS, Activation
from te_mx.dispatch.problem import INVARIANT
from te_mx.recipes.settings import Settings
from te_mx.runtime.arguments import check_number, is_one_of, shown

_CLOSE = 1e-5  # of values that may be fp32 on the way; tanh and erf forms of GELU differ by 5e-4
_PARAMS = {"limit": "limit", "alpha": "alpha", "glu_linear_offset": "offset"}


def resolve(owner: str, name: str, params: Mapping[str, Any] | None) -> Activation:
    """The activation of a module from Transformer Engine's arguments.

    Raises:
        ValueError: a name that is not known, parameters for another than clamped_swiglu, or one
            that is not finite, or a limit below 0.
        TypeError: a parameter that is not known or is no number, or parameters that are no dict.
    """
    if not is_one_of(name, ACTIVATIONS):
        raise ValueError(
            f"{owner}: activation must be one of {', '.join(ACTIVATIONS)}, got {shown(name)}"
        )
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"{owner}: activation_params must be a dict, got {shown(params)}")
    if params and name != "clamped_swiglu":
        raise ValueError(
            f"{owner}: activation_params are for clamped_swiglu, got {shown(params)} for {name!r}"
        )
    numbers = {}
    for key, value in (params or {}).items():
        if not is_one_of(key, _PARAMS):
            raise TypeError(
                f"{owner}: activation_params takes the numbers {', '.join(_PARAMS)}, got "
                f"{shown(key)}={shown(value)}"
            )
        numbers[_PARAMS[key]] = check_number(f"{owner}: activation_params[{key!r}]", value)
    if numbers.get("limit", 0) < 0:
        raise ValueError(
            f"{owner}: activation_params['limit'] must be 0 or more, got {numbers['limit']}"
        )
    return Activation(name, **numbers)


def plain(h: Tensor, act: Activation) -> Tensor:
    """The activation of h [..., cols] or, gated, [..., 2 cols], in its dtype; differentiable."""
    if not act.gated:
        return _base(h, act)
    a, b = h.chunk(2, -1)
    if act.base == "clamped_silu":
        b = b.clamp(-act.limit, act.limit) + act.offset
    return _base(a, act) * b


def beside(h: Tensor, act: Activation, settings: Settings | None) -> Tensor:
    """`plain`, and under precision "invariant" te_mx's own: silu, sigmoid and tanh GELU of torch
    give fp32 values other bits by their place on CPUs."""
    if settings is None or settings.precision != INVARIANT:
        return plain(h, act)
    return activation(h.flatten(0, -2), act).unflatten(0, h.shape[:-1])


def known(h: Tensor, a: Tensor, gated: bool = False) -> Activation | None:
    """The activation that makes a of h, told by the values, since names and classes differ from
    library to library; None for another. `gated`: only gated ones count."""
    for act in map(Activation, ACTIVATIONS):
        if (gated and not act.gated) or (act.gated and h.shape[-1] % 2):
            continue
        made = plain(h.double(), act)
        if made.shape == a.shape and torch.allclose(a.double(), made, rtol=_CLOSE, atol=_CLOSE):
            return act
    return None


def _base(x: Tensor, act: Activation) -> Tensor:
    base = act.base
    if base == "gelu":
        return F.gelu(x, approximate="tanh")
    if base == "gelu_erf":
        return F.gelu(x)
    if base == "silu":
        return F.silu(x)
    if base == "relu":
        return F.relu(x)
    if base == "srelu":
        return F.relu(x).square()
    if base == "sigmoid":
        return x.sigmoid()
    if base == "qgelu":
        return x * (1.702 * x).sigmoid()
    x = x.clamp(max=act.limit)
    return x * (act.alpha * x).sigmoid()
