"""Parameters that were replaced by what the layer cannot read: refused in every forward, by the
names of layer and parameter, before an address is taken.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_mx

BUILD = {
    "Linear": lambda: te_mx.Linear(64, 40, name="fc"),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(64, 40, name="fc"),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(64, 40, name="fc"),
    "LayerNormMLP gated": lambda: te_mx.LayerNormMLP(
        64, 40, name="fc", activation="swiglu", normalization="RMSNorm"
    ),
    "GroupedLinear": lambda: te_mx.GroupedLinear(3, 64, 40, name="fc"),
    "GroupedLinear stacked": lambda: te_mx.GroupedLinear(
        3, 64, 40, name="fc", single_grouped_weight=True
    ),
    "GroupedLinear mixed": lambda: te_mx.GroupedLinear(
        3, 64, 40, name="fc", single_grouped_weight=True, single_grouped_bias=False
    ),
}
CASES = [(family, name) for family, make in BUILD.items() for name, _ in make().named_parameters()]
OTHERS = {
    "meta": (lambda p: p.to("meta"), ValueError, "inp is on cpu and {} on meta.*load it"),
    "short": (lambda p: p[..., :3].clone(), ValueError, "{} must have shape .*, got .*3"),
    "long": (lambda p: torch.cat([p, p]), ValueError, "{} must have shape"),
    "flat": (lambda p: torch.ones(()), ValueError, r"{} must have shape .*, got \(\)"),
    "fp64": (lambda p: p.double(), TypeError, "got {} torch.float64; convert"),
    "int": (lambda p: p.int(), TypeError, "got {} torch.int32; convert"),
}


def call(layer: nn.Module, grad: bool = True) -> torch.Tensor:
    splits = ([8, 0, 16],) if isinstance(layer, te_mx.GroupedLinear) else ()
    with torch.set_grad_enabled(grad), te_mx.autocast():
        return layer(torch.ones(24, 64), *splits)


def replace(layer: nn.Module, name: str, value: torch.Tensor) -> None:
    setattr(layer, name, nn.Parameter(value, requires_grad=value.is_floating_point()))


@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_cannot_be_read(family: str, name: str, how: str):
    make, error, message = OTHERS[how]
    layer = BUILD[family]()
    replace(layer, name, make(getattr(layer, name).detach()))
    for grad in (True, False):
        with pytest.raises(error, match=f"'fc': .*{message.format(name)}"):
            call(layer, grad)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_parameters_that_are_gone(family: str, name: str):
    """A bias may be; a weight may not, and neither may what a list of groups needs."""
    layer = BUILD[family]()
    setattr(layer, name, None)
    if "bias" in name and "Grouped" not in family:
        call(layer)
    else:
        with pytest.raises(ValueError, match=f"'fc': {name} is None"):
            call(layer)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_kept_weights_do_not_hide_what_became_of_the_parameters(name: str):
    layer = te_mx.Linear(64, 40, name="fc")
    x = torch.ones(24, 64)
    with te_mx.autocast():
        layer(x, is_first_microbatch=True)
        replace(layer, name, getattr(layer, name).detach().to("meta"))
        with pytest.raises(ValueError, match=f"{name} on meta"):
            layer(x, is_first_microbatch=False)


@pytest.mark.parametrize("family", BUILD)
def test_without_masters_the_rest_is_looked_at(family: str):
    layer = BUILD[family]()
    te_mx.freeze_weights(layer, drop_master=True)
    call(layer, grad=False)
    for name, value in list(layer.named_parameters()):
        replace(layer, name, value.detach().to("meta"))
        with pytest.raises(ValueError, match=f"'fc': inp is on cpu and {name} on meta"):
            call(layer, grad=False)
        replace(layer, name, value.detach())
    layer.to("meta")
    with pytest.raises(ValueError, match=r"'fc': inp is on cpu and .* on meta"):
        call(layer, grad=False)


def test_a_checkpoint_that_lacks_the_bias():
    layer = te_mx.Linear(64, 40, device="meta", name="fc")
    layer.load_state_dict({"weight": torch.randn(40, 64)}, assign=True, strict=False)
    with pytest.raises(ValueError, match="bias on meta; bias has no values yet"):
        call(layer)


def test_parts_of_a_split_parameter():
    def split():
        return te_mx.Linear(64, 40, parameters_split=["q", "k"], name="fc")

    layer = split()
    replace(layer, "k_weight", layer.k_weight.detach().to("meta"))
    with pytest.raises(ValueError, match="q_weight on cpu, k_weight on meta"):
        call(layer)
    layer = split()
    layer.k_bias = None
    with pytest.raises(ValueError, match=r"'fc': .*q_bias on cpu, k_bias None"):
        call(layer)
    layer = split()
    replace(layer, "k_weight", torch.randn(19, 64))
    with pytest.raises(ValueError, match=r"'fc': weight must have shape .*, got \(39, 64\)"):
        call(layer)


@pytest.mark.parametrize("family", BUILD)
def test_other_places_for_parameters_still_work(family: str):
    """torch.func.functional_call and parametrizations put theirs in, and all are checked."""
    layer = BUILD[family]()
    expected = call(layer)
    own = {name: p.detach().clone() for name, p in layer.named_parameters()}
    splits = ([8, 0, 16],) if isinstance(layer, te_mx.GroupedLinear) else ()
    with te_mx.autocast():
        got = torch.func.functional_call(layer, own, (torch.ones(24, 64), *splits))
    assert torch.equal(got, expected)
    name = next(name for name in own if "weight" in name and "norm" not in name)
    nn.utils.parametrize.register_parametrization(layer, name, nn.Identity())
    assert torch.equal(call(layer), expected)
    with pytest.raises(ValueError, match=f"{name} on meta"), te_mx.autocast():
        layer.parametrizations[name].original = nn.Parameter(own[name].to("meta"))
        layer(torch.ones(24, 64), *splits)
