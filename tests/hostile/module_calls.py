"""The table of te_mx's modules: forwards inside and outside autocast, parameters that were replaced
by wrong ones, checkpoints, and what else a module offers. Constructors: constructor_calls.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from constructor_calls import SIZES, K, N, constructor
from judge import Call
from malformed import (
    COUNT,
    DEVICE,
    FLAG,
    FUNCTION,
    OPTIONAL_DTYPE,
    OPTIONAL_FLAG,
    other_than,
    values,
)
from malformed_tensors import (
    INPUT,
    PARAMETER,
    SHARED_ROWS,
    SPLITS,
    STRIDES,
    VECTOR_PARAMETER,
    state_dict_of,
)
from torch import Tensor, nn

import te_mx

ROWS = 24


# ----------------------------------------------------------------------------- forward and backward
def module(family: str, device: str, **how: Any) -> nn.Module:
    torch.manual_seed(1)
    made = getattr(te_mx, family)(**SIZES[family], device=device, **how)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "bias" in name:  # so that a lost one shows
                parameter.uniform_(1, 2)
    return made


def inputs(family: str, device: str) -> dict[str, Any]:
    torch.manual_seed(2)
    given: dict[str, Any] = {"inp": torch.randn(ROWS, K).to(device), "is_first_microbatch": None}
    return given | ({"m_splits": [10, 14]} if family == "GroupedLinear" else {})


def trained(layer: nn.Module, run: Callable[..., Tensor], **arguments: Any) -> dict[str, Any]:
    """Result and gradients of a forward and a backward pass."""
    inp = arguments["inp"]
    if isinstance(inp, Tensor) and inp.is_floating_point() and inp.is_leaf:
        inp.requires_grad_()
    out = run(**arguments)
    out = out[0] if isinstance(out, tuple) else out
    out.float().square().sum().backward()
    found = {"out": out.detach(), "inp": getattr(inp, "grad", None)}
    return found | {name: p.grad for name, p in layer.named_parameters() if p is not None}


def _in_autocast(layer: nn.Module, **arguments: Any) -> dict[str, Any]:
    with te_mx.autocast():
        return trained(layer, layer, **arguments)


FORWARD = {
    "inp": INPUT, "is_first_microbatch": OPTIONAL_FLAG, "m_splits": SPLITS,
    "fp8_output": FLAG | values(True_=True), "fp8_grad": FLAG | values(True_=True),
    "out": other_than("None"), "dgrad_out": other_than("None"),
}  # fmt: skip


def forward(family: str, inside: bool) -> Call:
    grouped = family == "GroupedLinear"
    absent = dict.fromkeys(("out", "dgrad_out"), None) if grouped else {}
    if family in ("Linear", "LayerNormLinear"):
        absent = dict.fromkeys(("fp8_output", "fp8_grad"), False)

    def make(device: str) -> Callable[..., Any]:
        layer = module(family, device)
        return functools.partial(_in_autocast if inside else _outside, layer)

    def arguments(device: str) -> dict[str, Any]:
        return inputs(family, device) | absent

    names = list(arguments("cpu"))
    where = "forward" if inside else "forward outside autocast"
    return Call(
        f"te_mx.{family}.{where}", make, arguments, {name: FORWARD[name] for name in names},
        covers=f"te_mx.{family}.forward", plain=None if inside else plain_forward(family),
    )  # fmt: skip


def _outside(layer: nn.Module, **arguments: Any) -> dict[str, Any]:
    return trained(layer, layer, **arguments)


def plain_forward(family: str) -> Callable[[str], Callable[..., Any]]:
    """The layer in torch's own functions."""

    return lambda device: functools.partial(_in_plain_torch, family, module(family, device))


def _in_plain_torch(family: str, layer: nn.Module, **arguments: Any) -> dict[str, Any]:
    return trained(layer, functools.partial(_PLAIN[family], layer), **arguments)


def _linear(layer: Any, inp: Any, **_: Any) -> Tensor:
    return F.linear(inp, layer.weight, layer.bias)


def _norm(layer: Any, inp: Any) -> Tensor:
    return F.layer_norm(inp, (K,), layer.layer_norm_weight, layer.layer_norm_bias, layer.eps)


def _layernorm_linear(layer: Any, inp: Any, **_: Any) -> Tensor:
    return _linear(layer, _norm(layer, inp))


def _layernorm_mlp(layer: Any, inp: Any, **_: Any) -> Tensor:
    h = F.gelu(F.linear(_norm(layer, inp), layer.fc1_weight, layer.fc1_bias), approximate="tanh")
    return F.linear(h, layer.fc2_weight, layer.fc2_bias)


def _grouped(layer: Any, inp: Any, **_: Any) -> Tensor:
    lines = inp.reshape(-1, inp.shape[-1])
    parts = lines[:10], lines[10:24]
    done = [
        F.linear(x, w, b) for x, w, b in zip(parts, layer.weights(), layer.biases(), strict=True)
    ]
    return torch.cat(done).view(*inp.shape[:-1], N)


_PLAIN: dict[str, Callable[..., Tensor]] = {
    "Linear": _linear, "LayerNormLinear": _layernorm_linear, "LayerNormMLP": _layernorm_mlp,
    "GroupedLinear": _grouped,
}  # fmt: skip


# --------------------------------------------------------------------------------------- parameters
def parameters(family: str, inside: bool, **how: Any) -> Call:
    """A forward after parameters were replaced by wrong ones."""

    def make(device: str) -> Callable[..., Any]:
        run = _in_autocast if inside else _outside
        return functools.partial(_with_parameters, family, device, run, how)

    def plain(device: str) -> Callable[..., Any]:
        run = functools.partial(_in_plain_torch, family)
        return functools.partial(_with_parameters, family, device, run, how)

    def arguments(device: str) -> dict[str, Any]:
        return dict(module(family, device, **how).named_parameters())

    held = arguments("cpu")
    kinds = {name: PARAMETER if p.dim() > 1 else VECTOR_PARAMETER for name, p in held.items()}
    shown = "".join(f" {name}" for name in how)
    where = "in autocast" if inside else "outside"
    return Call(
        f"te_mx.{family}{shown} with other parameters {where}", make, arguments, kinds,
        covers=f"te_mx.{family}.forward", plain=None if inside else plain,
    )  # fmt: skip


def _with_parameters(
    family: str, device: str, run: Callable[..., Any], how: dict[str, Any], **given: Tensor
) -> dict[str, Any]:
    layer = module(family, device, **how)
    for name, value in given.items():
        trains = value.is_floating_point() or value.is_complex()
        layer._parameters[name] = nn.Parameter(value.detach(), requires_grad=trains)
    return run(layer, **inputs(family, device))


# -------------------------------------------------------------------------------------- checkpoints
def checkpoint(family: str, dropped: bool) -> Call:
    def make(device: str) -> Callable[..., Any]:
        layer = module(family, device)
        load = functools.partial(_load, layer)
        load.watched = (layer,)  # type: ignore[attr-defined]
        return load

    def arguments(device: str) -> dict[str, Any]:
        layer = module(family, device)
        if dropped:
            te_mx.freeze_weights(layer, drop_master=True)
        return {"state_dict": dict(layer.state_dict())}

    keys = arguments("cpu")["state_dict"]
    kind = state_dict_of(*keys)
    words = "|".join(["state_dict", "Missing key", "Unexpected key", *keys])
    return Call(
        f"te_mx.{family}.load_state_dict{' of codes' if dropped else ''}", make, arguments,
        {"state_dict": kind}, covers=f"te_mx.{family}.load_state_dict",
        says={"state_dict": words},
        plain=None if dropped else lambda device: functools.partial(_load, _Bare(family, device)),
    )  # fmt: skip


def _load(layer: nn.Module, state_dict: Any) -> Any:
    layer.load_state_dict(state_dict)
    return {name: value.detach().clone() for name, value in layer.named_parameters()}


class _Bare(nn.Module):
    """A plain module with the parameters of a te_mx module."""

    def __init__(self, family: str, device: str) -> None:
        super().__init__()
        for name, parameter in module(family, device).named_parameters():
            self.register_parameter(name, parameter)


# --------------------------------------------------------------------------------------------- rest
def backward(family: str) -> Call:
    """A gradient of another form than autograd's own."""

    def run(layer: nn.Module, grad: Any) -> Any:
        given = inputs(family, str(grad.device))
        given["inp"].requires_grad_()
        with te_mx.autocast():
            layer(**given).backward(grad)
        return [given["inp"].grad, *(p.grad for p in layer.parameters())]

    width = N if family != "LayerNormMLP" else K
    return Call(
        f"te_mx.{family}.forward with another gradient",
        lambda d: functools.partial(run, module(family, d)),
        lambda d: {"grad": torch.randn(ROWS, width).to(d)},
        {"grad": STRIDES.but("on the cpu") | SHARED_ROWS},  # torch refuses that one itself
        covers=f"te_mx.{family}.forward",
    )  # fmt: skip


def reset(family: str) -> Call:
    return Call(
        f"te_mx.{family}.reset_parameters", lambda d: module(family, d).reset_parameters,
        lambda d: {"defer_init": False}, {"defer_init": FLAG},
    )  # fmt: skip


def hook(family: str) -> Call:
    method = "register_wgrad_accumulation_and_reduce_hooks"
    return Call(
        f"te_mx.{family}.{method}", lambda d: getattr(module(family, d), method),
        lambda d: {"hook": print}, {"hook": FUNCTION},
    )  # fmt: skip


def backward_dw(family: str) -> Call:
    """Of which nothing waits."""

    def run(layer: nn.Module, times: int) -> None:
        given = inputs(family, "cpu")
        with te_mx.autocast():
            layer(**given).sum().backward()
        for _ in range(times):
            layer.backward_dw()  # type: ignore[operator]

    return Call(
        f"te_mx.{family}.backward_dw",
        lambda d: functools.partial(run, module(family, "cpu", delay_wgrad_compute=True)),
        lambda d: {"times": 1}, {"times": values(twice=2)}, says={"times": "backward_dw"},
    )  # fmt: skip


def of_family(family: str) -> tuple[Call, ...]:
    return (
        constructor(family), forward(family, True), forward(family, False), backward(family),
        parameters(family, True), parameters(family, False), checkpoint(family, False),
        checkpoint(family, True), hook(family), backward_dw(family),
        reset(family),
    )  # fmt: skip


def invariant(device: str, kind: type[nn.Linear]) -> nn.Linear:
    """Of small integers, whose sums are exact in any order."""
    made = kind(K, N, device=device)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) % 7 - 3)
    return made


# Its arguments and errors are those of nn.Linear.
INVARIANT = (
    Call(
        "te_mx.InvariantLinear", lambda d: te_mx.InvariantLinear,
        lambda d: {"in_features": K, "out_features": N, "bias": True, "device": torch.device(d),
                   "dtype": None},
        {"in_features": COUNT, "out_features": COUNT, "bias": FLAG, "device": DEVICE,
         "dtype": OPTIONAL_DTYPE},
        plain=lambda d: nn.Linear,
    ),
    Call(
        "te_mx.InvariantLinear.forward", lambda d: invariant(d, te_mx.InvariantLinear).forward,
        lambda d: {"input": torch.arange(ROWS * K, device=d).view(ROWS, K).float() % 5 - 2},
        {"input": INPUT}, plain=lambda d: invariant(d, nn.Linear).forward,
    ),
)  # fmt: skip
MODULES = (
    *INVARIANT,
    *(call for family in SIZES for call in of_family(family)),
    parameters("GroupedLinear", True, single_grouped_weight=True),
)
