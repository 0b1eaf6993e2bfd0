"""Malformed arguments of the constructors: refused by name, before a parameter is made."""

from __future__ import annotations

import pytest
import torch

import te_mx

NORMALIZED = [
    lambda **given: te_mx.LayerNormLinear(8, 8, **given),
    lambda **given: te_mx.LayerNormMLP(8, 8, **given),
]


@pytest.mark.parametrize("make", NORMALIZED)
@pytest.mark.parametrize(
    ("eps", "error", "says"),
    [
        (float("nan"), ValueError, "eps must be finite, got nan"),
        (float("inf"), ValueError, "eps must be finite, got inf"),
        (-1e-5, ValueError, "eps must be 0 or more, got -1e-05"),
        ("1e-5", TypeError, "eps must be a number, got '1e-5'"),
        (None, TypeError, "eps must be a number, got None"),
        (True, TypeError, "eps must be a number, got True"),
        (torch.tensor(1e-5), TypeError, "eps must be a number, got tensor torch.float32"),
    ],
)
def test_eps(make, eps, error, says):
    with pytest.raises(error, match=f"te_mx.LayerNorm.*: {says}"):
        make(eps=eps)


@pytest.mark.parametrize("make", NORMALIZED)
def test_eps_that_is_a_number(make):
    assert make(eps=0).eps == 0
    assert make(eps=torch.finfo(torch.bfloat16).eps).eps == 2.0**-7


@pytest.mark.parametrize("name", [["LayerNorm"], torch.ones(2), 3, "BatchNorm"])
@pytest.mark.parametrize("make", NORMALIZED)
def test_normalization(make, name):
    with pytest.raises(ValueError, match=r"normalization must be one of 'LayerNorm', 'RMSNorm'"):
        make(normalization=name)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"activation": ["gelu"]}, ValueError, "activation must be one of"),
        ({"activation": torch.ones(2)}, ValueError, "activation must be one of .* got tensor"),
        ({"activation_params": 3}, TypeError, "activation_params must be a dict, got 3"),
        ({"activation_params": torch.ones(2)}, TypeError, "activation_params must be a dict"),
        ({"limit": float("nan")}, ValueError, r"activation_params\['limit'\] must be finite"),
        ({"limit": torch.tensor(3.0)}, TypeError, r"\['limit'\] must be a number, got tensor"),
        ({3: 3.0}, TypeError, "activation_params takes the numbers limit, alpha.* got 3=3.0"),
    ],
)
def test_activations(given, error, says):
    if not given.keys() & {"activation", "activation_params"}:
        given = {"activation_params": given}
    with pytest.raises(error, match=says):
        te_mx.LayerNormMLP(8, 8, **{"activation": "clamped_swiglu", **given})


class Silent(torch.Tensor):
    """A tensor that nobody may print: on a GPU the host would wait for its values."""

    def __repr__(self, **kwargs):
        raise AssertionError("an error printed a tensor")


def test_a_refusal_prints_no_tensor():
    value = torch.ones(3, 4).as_subclass(Silent)
    shown = r"=tensor torch.float32 \(3, 4\) on cpu is not supported"
    grouped = te_mx.GroupedLinear(2, 4, 4)
    for name in ("out", "dgrad_out"):
        with pytest.raises(NotImplementedError, match=f"te_mx.GroupedLinear: {name}{shown}"):
            grouped(torch.ones(3, 4), [1, 2], **{name: value})
    with pytest.raises(NotImplementedError, match=f"te_mx.GroupedLinear: tp_group{shown}"):
        te_mx.GroupedLinear(2, 4, 4, tp_group=value)
    with pytest.raises(NotImplementedError, match="ub_name=list of 1 is not supported"):
        te_mx.Linear(4, 4, ub_name=[value])
