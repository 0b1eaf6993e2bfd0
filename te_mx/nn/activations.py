"""The activations of te_mx.LayerNormMLP in plain torch, for the high-precision path.

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

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from te_mx.arguments import is_one_of, shown
from te_mx.backends.fused import ACTIVATIONS, Activation

_PARAMS = {"limit": "limit", "alpha": "alpha", "glu_linear_offset": "offset"}


def resolve(owner: str, name: str, params: Mapping[str, Any] | None) -> Activation:
    """The activation of a module from Transformer Engine's arguments.

    Raises:
        ValueError: a name that is not known, parameters for another than clamped_swiglu, or a
            number that means nothing.
        TypeError: a parameter that is not known or is no number, or parameters that are no dict.
    """
    if not is_one_of(name, ACTIVATIONS):
        raise ValueError(
            f"{owner}: activation must be one of {', '.join(ACTIVATIONS)}, got {shown(name)}"
        )
    given = {} if params is None else params
    if not isinstance(given, Mapping):
        raise TypeError(f"{owner}: activation_params must be a dict, got {shown(params)}")
    if given and name != "clamped_swiglu":
        raise ValueError(
            f"{owner}: activation_params are for clamped_swiglu, got {shown(params)} for {name!r}"
        )
    for key, value in given.items():
        if key not in _PARAMS or isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(
                f"{owner}: activation_params takes the numbers {', '.join(_PARAMS)}, got "
                f"{key}={shown(value)}"
            )
        if not (value >= 0 if key == "limit" else abs(value) < math.inf):
            raise ValueError(
                f"{owner}: activation_params takes a limit of 0 or more and finite numbers beside "
                f"it, got {key}={value}"
            )
    return Activation(name, **{_PARAMS[key]: float(value) for key, value in given.items()})


def plain(h: Tensor, act: Activation) -> Tensor:
    """The activation of h [..., cols] or, gated, [..., 2 cols], in its dtype; differentiable."""
    if not act.gated:
        return _base(h, act)
    a, b = h.chunk(2, -1)
    if act.base == "clamped_silu":
        b = b.clamp(-act.limit, act.limit) + act.offset
    return _base(a, act) * b


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
